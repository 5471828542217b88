"""Batches in which rows are not records, as a ``collate_fn`` makes them of synthetic samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_dp.isolation.copies import quiet, seeded
from lightning_dp.isolation.nesting import leaves, number_of_rows
from lightning_dp.isolation.rows import layout_of, same_parts
from lightning_dp.isolation.samples import SampleMaker, lengths_in

__all__ = ["CollatedPool", "collated_pools", "has_folded_rows"]

_RECORDS = 8
_MORE = (6, 1, 0, 3, 5, 2, 4, 7)  # by how much samples are longer
_CLASSES = (2, 8)  # whole numbers below 2 are right as places among few nodes, too


@dataclass(frozen=True, eq=False)
class CollatedPool:
    """Synthetic samples, and the batches that are made of some of them.

    Args:
        fresh: returns what makes a batch of a list of samples, in the state in which it is now.
        maker: of the samples.
        lengths: which lengths are other ones in each sample.
        dim: the dimension of these lengths.
    """

    fresh: Callable[[], Callable[[list[Any]], Any]] = field(repr=False)
    maker: SampleMaker
    lengths: frozenset[int] = frozenset()
    dim: int = 0

    def take(self, rows: Sequence[int]) -> Any:
        """Return the batch of some records, in this order."""
        collate = self.fresh()
        with seeded(0, collate):
            return collate([self._sample(row % _RECORDS) for row in rows])

    def _sample(self, i: int) -> Any:
        lengths = {length: length + _MORE[i] for length in self.lengths}
        return self.maker.make(i, "plain", lengths, self.dim)

    @property
    def is_telling(self) -> bool:
        """True if records differ, as they do unless nothing in a sample can be made up."""
        one, other = (leaves(self.take(range(i, i + 4))) for i in (0, 4))
        return not same_parts(one, other)


def has_folded_rows(fresh: Callable[[], Callable[[list[Any]], Any]], sample: Any) -> bool:
    """Tell whether batches have parts with several rows for a record: frames, or nodes of graphs.

    Or whether their tensors do not tell how many records there are: lists of images, one for each.
    False where that cannot be tried.
    """
    with quiet():
        for classes in _CLASSES:
            pool = CollatedPool(fresh, SampleMaker(sample, classes))
            try:
                few = pool.take(range(4))
                layout = layout_of(few, pool.take(range(8)), 4)
            except Exception:
                continue
            is_folded = any(leaf.dim == 0 and leaf.per_record > 1 for leaf in layout.leaves)
            return is_folded or (layout.has_rows and number_of_rows(few) != 4)
    return False


def collated_pools(
    fresh: Callable[[], Callable[[list[Any]], Any]], sample: Any
) -> Iterator[CollatedPool]:
    """Make pools of 8 records, first such with samples of several lengths.

    What a model cannot take of them is for the caller to find out.
    """
    for classes in _CLASSES:
        maker = SampleMaker(sample, classes)
        for dim in (0, -1):
            found = lengths_in(sample, dim)
            yield CollatedPool(fresh, maker, frozenset(found), dim)
            if len(found) > 1:
                yield from (CollatedPool(fresh, maker, frozenset({n}), dim) for n in sorted(found))
        yield CollatedPool(fresh, maker)
