"""Batches padded to their longest record: does its length change the gradients of the others?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.compiled import as_written
from lightning_dp.isolation.comparison import Batch, Change, Comparisons
from lightning_dp.isolation.copies import quiet, seeded
from lightning_dp.isolation.nesting import leaves
from lightning_dp.isolation.outcome import Isolation
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.samples import LONGER, WORDS, SampleMaker, lengths_in, size_of
from lightning_dp.isolation.stand_ins import NotProbed

__all__ = ["compare_lengths"]

# Of each, the first sample is the longest; the others are the batch without it.
_GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))
_CLASSES = (8, 2)  # whole numbers are below this
_SHORT = 6  # shorter samples are made longer, and others are made from half of their length on
_MORE = 8  # by which the longest sample is longer than that, at least
_BYTES = 2**24  # of a sample
_RANDOM = "the model draws random numbers, as many as a batch is long"
_NOT_MADE = "no samples of other lengths could be made"


@as_written()
def compare_lengths(
    passes: Passes, fresh: Callable[[], Callable[[list[Any]], Any]], sample: Any
) -> Isolation:
    """Compare gradients of records in a batch with those in the batch without its longest record.

    A batch is as long as its longest record, so how much padding the others get is decided by that
    one; it may change nothing for them. Made-up samples of other lengths are collated with and
    without a longer one, and the gradients of the others are compared, for two groups of samples.

    Args:
        passes: of the model.
        fresh: returns what makes a batch of a list of samples, in the state in which it is now.
        sample: one of the data set, of which types, shapes and dtypes are used.

    Returns:
        "isolated"; "coupled", with the reason; or "not probed", with the reason why nothing can be
        said: samples that the model does not take, random numbers that evaluation draws too, targets
        that a mean ignores (every batch is watched for these).
    """
    found = _compared(passes, fresh, sample)
    if found.reason != _RANDOM:
        return found
    with _in_evaluation(passes.module):  # dropout of functions, too
        return _compared(passes, fresh, sample)


def _compared(
    passes: Passes, fresh: Callable[[], Callable[[list[Any]], Any]], sample: Any
) -> Isolation:
    with passes.quietly(), quiet():
        for times in LONGER:
            if times * size_of(sample) > _BYTES:
                break
            found = _compared_where_padded(passes, _made_up(fresh, sample, times))
            if found.reason != _NOT_MADE:
                return found
    return Isolation("not probed", _NOT_MADE)


def _compared_where_padded(passes: Passes, ways: Iterator[_Samples]) -> Isolation:
    """Compare with the first samples that make batches of several lengths, and that the model takes."""
    why_not = _NOT_MADE
    for samples in ways:
        try:
            changes = [change for group in _GROUPS if (change := _change(samples, group))]
        except Exception:  # of a collate_fn that does not take such samples
            continue
        if len(changes) < len(_GROUPS):
            continue
        try:
            found = _outcomes(passes, changes)
        except NotProbed as error:
            why_not = str(error)
            continue
        except Exception as error:  # of the model's own, which may hold anything
            why_not = f"the model raised {type(error).__name__} on made-up samples"
            continue
        outcomes = {each.outcome for each in found}
        return found[0] if len(outcomes) == 1 else Isolation("not probed", "the groups differ")
    return Isolation("not probed", why_not)


@contextmanager
def _in_evaluation(module: nn.Module) -> Iterator[None]:
    """Inside, the model and its parts are in evaluation, each of which is what it was afterwards."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@dataclass(frozen=True)
class _Samples:
    """Synthetic samples of other lengths, and the batches that are made of some of them.

    Args:
        fresh: makes what makes batches.
        maker: of the samples.
        lengths: which lengths of a sample are other ones.
        dim: the dimension of these lengths.
        times: by how many times the length of a sample the longest one is longer; 0 if it is no longer.
    """

    fresh: Callable[[], Callable[[list[Any]], Any]] = field(repr=False)
    maker: SampleMaker
    lengths: frozenset[int]
    dim: int
    times: int

    def batch(self, chosen: Sequence[int]) -> Any:
        collate = self.fresh()
        with seeded(0, collate):
            return collate([self._sample(i) for i in chosen])

    def _sample(self, i: int) -> Any:
        place = i % len(_GROUPS[0])
        lengths = {n: self._length(n, place) for n in self.lengths}
        words = place or _MORE * (1 + self.times)
        return self.maker.make(i, "plain", {WORDS: words, **lengths}, self.dim)

    def _length(self, length: int, place: int) -> int:
        """Return the length of the sample at a place instead of another one; at 0 is the longest."""
        least = length // 2 if length >= 2 * _SHORT else length
        if place:
            return least + place
        return max(least + _MORE, length) + self.times * length


def _made_up(
    fresh: Callable[[], Callable[[list[Any]], Any]], sample: Any, times: int
) -> Iterator[_Samples]:
    """Yield ways to make samples of other lengths: all lengths of a dimension, then each of them."""
    for classes, dim in itertools.product(_CLASSES, (0, -1)):
        found = lengths_in(sample, dim)
        each = [frozenset({n}) for n in sorted(found)] if len(found) > 1 else []
        for lengths in (frozenset(found), *each):
            yield _Samples(fresh, SampleMaker(sample, classes), lengths, dim, times)


def _change(samples: _Samples, group: Sequence[int]) -> Change | None:
    """Return the change of a batch that loses its longest sample; None if the others are not the same."""
    longer, shorter = samples.batch(group), samples.batch(group[1:])
    parts, few = leaves(longer), leaves(shorter)
    tensors = [(a, b) for a, b in zip(parts, few, strict=True) if isinstance(a, Tensor)]
    n = len(group)
    if all(a.shape[1:] == b.shape[1:] for a, b in tensors):
        return None  # nothing is padded
    if not all(_are_padded(a, b, n) for a, b in tensors):
        return None  # random masks, for instance: of another batch they are others
    others = range(n - 1)
    key = "longer", group[0]
    return Change(Batch(longer, n, key), Batch(shorter, n - 1), range(1, n), others)


def _are_padded(longer: Tensor, shorter: Any, n: int) -> bool:
    """Tell whether the rows of the others are the same in both, apart from what is added at an end."""
    if not isinstance(shorter, Tensor) or longer.dim() != shorter.dim():
        return False
    if not longer.dim() or (len(longer), len(shorter)) != (n, n - 1):
        return False
    rows = longer[1:]
    for dim in range(1, rows.dim()):
        more = rows.shape[dim] - shorter.shape[dim]
        if more < 0:
            return False
        at_ends = (rows.narrow(dim, start, shorter.shape[dim]) for start in {0, more})
        rows = next((each for each in at_ends if _fits(each, shorter, dim)), rows[:0])
    return rows.shape == shorter.shape and bool((rows == shorter).all())


def _fits(rows: Tensor, shorter: Tensor, dim: int) -> bool:
    """Tell whether rows cut in one dimension may be the shorter ones: the last one decides."""
    if rows.shape != shorter.shape:
        return dim < rows.dim() - 1
    return bool((rows == shorter).all())


def _outcomes(passes: Passes, changes: Sequence[Change]) -> list[Isolation]:
    """Return what the first engine finds that can tell the records apart."""
    comparisons = Comparisons(passes)
    try:
        return [_outcome(comparisons, change) for change in changes]
    except UnsupportedModelError as error:
        below = passes.below(error)
        if below is None:
            raise
    return _outcomes(below, changes)


def _outcome(comparisons: Comparisons, change: Change) -> Isolation:
    before = comparisons.answer(change.before)
    if before.is_random:
        return Isolation("not probed", _RANDOM)
    found = comparisons.outcome(change)
    if found.outcome == "coupled" and None in before.ignored:
        return Isolation("not probed", "the loss leaves ignored targets out of its mean")
    return found
