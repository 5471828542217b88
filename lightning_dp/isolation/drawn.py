"""Samples of a data set that depend on what was drawn with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_dp.isolation.copies import Copies, quiet, random_state, seeded
from lightning_dp.isolation.rows import normal_form, same_parts

__all__ = ["MIXED", "NotRepeatable", "fetch", "mixes_samples"]

MIXED = (
    "{} gives other samples of a record after, or together with, other records: it mixes samples, or "
    "keeps what it saw (the sample before, a position, a running statistic, counts). Make each "
    "sample of one record, constants and random numbers"
)
_SEED = 0


class NotRepeatable(RuntimeError):
    """The data set gives other samples each time, or raises."""


def fetch(dataset: Any, records: Sequence[int]) -> list[Any]:
    """Return samples as torch's fetcher reads them."""
    together = getattr(dataset, "__getitems__", None)
    return list(together(list(records)) if together else [dataset[each] for each in records])


def mixes_samples(dataset: Any, record: int, others: Sequence[int]) -> bool:
    """Tell whether a record's sample depends on what else was drawn, before it or with it.

    It is read alone, after others, and in one call with others, always by a fresh copy of the data
    set and from the same random state, also of the generators that it holds. Neither the data set (where
    it can be copied) nor the global random states change.

    Args:
        dataset: with indices.
        record: index of the record.
        others: indices of at least one other record.

    Raises:
        NotRepeatable: if nothing can be said.
    """
    with quiet():
        try:
            found = _Reader(dataset, record).depends_on(others)
        except Exception:
            found = None
    if found is None:
        raise NotRepeatable
    return found


class _Reader:
    def __init__(self, dataset: Any, record: int) -> None:
        self._copies, self._record = Copies(dataset), record
        self._is_random = False

    def depends_on(self, others: Sequence[int]) -> bool | None:
        """Return None if the sample is another one each time."""
        alone = self._after([])
        if not same_parts(alone, self._after([])):
            return None
        first, last = others[:1], others[-1:]
        # They end with different records: one of them may be the last that training drew, which a
        # data set that keeps the sample before has seen before the record is read alone, too.
        ways = [self._after(first), self._after([*first, *last])]
        if hasattr(self._copies.fresh(), "__getitems__"):
            ways += [self._together([], first), self._together([], last)]
            if not self._is_random:  # else those before it draw the numbers that it drew alone
                ways.append(self._together(others, []))
        return not all(same_parts(alone, each) for each in ways)

    def _after(self, others: Sequence[int]) -> Any:
        dataset = self._copies.fresh()
        for other in others:
            fetch(dataset, [other])
        return self._read(dataset, [self._record], 0)

    def _together(self, before: Sequence[int], behind: Sequence[int]) -> Any:
        records = [*before, self._record, *behind]
        return self._read(self._copies.fresh(), records, len(before))

    def _read(self, dataset: Any, records: Sequence[int], place: int) -> Any:
        with seeded(_SEED, dataset):
            start = random_state(dataset)
            sample = fetch(dataset, records)[place]
            self._is_random = self._is_random or random_state(dataset) != start
        return normal_form(sample)
