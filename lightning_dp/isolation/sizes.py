"""Batches of the size that a run has: branches that four records do not take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.isolation.comparison import Batch, Change, Comparisons
from lightning_dp.isolation.kinds import (
    SyntheticKind,
    Values,
    exchange_in_turn,
    exchange_rows,
    parts_of,
)
from lightning_dp.isolation.outcome import ISOLATED, Isolation
from lightning_dp.isolation.synthetic import take_rows

__all__ = ["probe_size"]

_LARGE = Values(-1000, 1000)


def probe_size(
    comparisons: Comparisons,
    pool: Any,
    n: int,
    tamest: SyntheticKind,
    last: Sequence[int],
    expected: int,
    most: int,
) -> Isolation:
    """Exchange half of the records of a batch as large as those of the run, and compare it with a few.

    As many as a few seconds allow: what was tried instead is said. The first n records must have the
    gradients that they have among themselves, or else those that they have without the last one.

    Args:
        pool: synthetic records, the first n of which are the usual batch.
        tamest: their kind.
        last: for each part of the batch the largest whole number that the model takes.
        expected: the number of records in a batch.
        most: how many a pass may have.
    """
    size = min(expected, most)
    left_out = (f"{expected} records at once, but {max(size, n)}",) if size < expected else ()
    if size <= n:
        return Isolation("isolated", left_out=left_out)
    kind = _all_classes(pool, tamest, last)
    records = take_rows(pool, [row % (2 * n) for row in range(size)])
    generator = torch.Generator().manual_seed(0)
    records = exchange_rows(records, range(n, size), kind, generator)
    before = Batch(records, size, (id(pool), size))
    rows = range(0, size, 2)
    reals = [place for place, part in enumerate(parts_of(pool)) if part.is_real]
    try:
        try:  # a few of them large
            kinds = (kind, kind.everywhere(reals, _LARGE)) if reals else (kind,)
            after = exchange_in_turn(before.records, rows, kinds, 0)
            found = comparisons.outcome(Change.exchanged(before, after, rows))
        except UnsupportedModelError:
            raise
        except Exception:
            after = exchange_rows(before.records, rows, kind, generator)
            found = comparisons.outcome(Change.exchanged(before, after, rows))
        if found.outcome == "isolated" and not comparisons.answer(before).is_random:
            found = _fewer(comparisons, Batch.of(pool, range(n)), before)
    except UnsupportedModelError:
        raise
    except Exception:
        return Isolation("isolated", left_out=(f"{size} records at once",))
    return found if found.outcome != "isolated" else Isolation("isolated", left_out=left_out)


def _fewer(comparisons: Comparisons, few: Batch, many: Batch) -> Isolation:
    """Compare the first of many records with those few alone, whose answer is known."""
    same = range(few.n)
    found = comparisons.outcome(Change(few, many, same, same), why=False)
    return found if found.outcome == "isolated" else _last_left_out(comparisons, many)


def _last_left_out(comparisons: Comparisons, before: Batch) -> Isolation:
    others = range(before.n - 1)
    try:
        return comparisons.outcome(Change(before, Batch.of(before.records, others), others, others))
    except UnsupportedModelError:
        raise
    except Exception:  # some models run on an even number of records only
        return ISOLATED


def _all_classes(pool: Any, tamest: SyntheticKind, last: Sequence[int]) -> SyntheticKind:
    """Return a kind with all class numbers that the model takes, where there is one per record."""
    kind = tamest
    for place, part in enumerate(parts_of(pool)):
        if not part.is_real and part.is_single:
            low = int(tamest.of(place, part.dtype).low)
            kind = kind.at(place, Values(low, last[place], last[place] - low + 1))
    return kind
