"""Each record in turn left out, or replaced: do the gradients of the others move?"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.isolation.comparison import Batch, Change, Comparisons
from lightning_dp.isolation.coupling import CURES, common_factor
from lightning_dp.isolation.outcome import ISOLATED, Isolation
from lightning_dp.isolation.stand_ins import NotProbed

__all__ = ["probe_one_position", "probe_positions"]

_SEED = 100  # with which random numbers begin


def probe_positions(comparisons: Comparisons, pool: Any, n: int) -> Isolation:
    """Leave out one half of the records, the other one, and the last record; replace every second one.

    So each record is gone while others are there, and a single one too: a statistic of the batch may be
    the same for halves, such as the share of a label. Where gradients of halves move, or cannot be
    compared, the record at every position is left out in turn, or replaced.

    Where the model draws random numbers, it draws others for each position.

    Args:
        pool: at least 2n records; the first n are the batch, the others the replacements.
    """
    for j in (n - 1,) if _halves_are_alone(comparisons, pool, n) else range(n):
        found = _at(comparisons, pool, n, j)
        if found.outcome != "isolated":
            return found
    for first in (0, 1):
        found = comparisons.outcome(_every_second(pool, n, first))
        if found.outcome != "isolated":
            return found
    return ISOLATED


def _halves_are_alone(comparisons: Comparisons, pool: Any, n: int) -> bool:
    """Tell whether each half of the records has the same gradients without the other one."""
    whole = Batch.of(pool, range(n))
    if comparisons.answer(whole).is_random:
        return False
    halves = range(n // 2), range(n // 2, n)
    try:
        found = (
            comparisons.outcome(
                Change(whole, Batch.of(pool, half), half, range(len(half))), why=False
            )
            for half in halves
        )
        return all(each.outcome == "isolated" for each in found)
    except UnsupportedModelError:
        raise
    except Exception:  # some models need more records, or an even number
        return False


def probe_one_position(comparisons: Comparisons, pool: Any, n: int) -> Isolation:
    """Leave out the last record, and replace every second one: the same in few passes."""
    found = _at(comparisons, pool, n, n - 1)
    return found if found.outcome != "isolated" else comparisons.outcome(_every_second(pool, n, 0))


def _at(comparisons: Comparisons, pool: Any, n: int, j: int) -> Isolation:
    removed, replaced = _removed(pool, n, j), _replaced(pool, n, j)
    if comparisons.answer(replaced.before).is_random:
        return _under_other_numbers(comparisons, replaced, j)
    try:
        found = comparisons.outcome(removed)
    except UnsupportedModelError:
        raise
    except Exception:  # some models run on an even number of records only
        return comparisons.outcome(replaced)
    if found.reason == CURES["denominator"] and _is_sum(comparisons, pool, n, removed):
        return Isolation("coupled", CURES["sum"])
    return found


def _under_other_numbers(comparisons: Comparisons, change: Change, j: int) -> Isolation:
    """Compare under other random numbers, and again where they leave no gradient."""
    *first, last = (replace(change, seed_number=_SEED + j + more) for more in (0, 50, 100, 150))
    for each in first:
        with suppress(NotProbed):
            return comparisons.outcome(each)
    return comparisons.outcome(last)


def _removed(pool: Any, n: int, j: int) -> Change:
    others = [i for i in range(n) if i != j]
    return Change(Batch.of(pool, range(n)), Batch.of(pool, others), others, range(n - 1))


def _replaced(pool: Any, n: int, j: int) -> Change:
    rows = [n + j if i == j else i for i in range(n)]
    others = [i for i in range(n) if i != j]
    return Change(Batch.of(pool, range(n)), Batch.of(pool, rows), others, others)


def _every_second(pool: Any, n: int, first: int) -> Change:
    changed = range(first, n, 2)
    rows = [n + i if i in changed else i for i in range(n)]
    others = [i for i in range(n) if i not in changed]
    return Change(Batch.of(pool, range(n)), Batch.of(pool, rows), others, others)


def _is_sum(comparisons: Comparisons, pool: Any, n: int, removed: Change) -> bool:
    """Tell whether the others move since there are fewer records, and not by any of their values.

    The engine takes the loss for a mean and multiplies by the number of records. If it is a sum,
    that factor stays: m / n between the two batches, whatever the records are.
    """
    here = comparisons.answer(removed.before).about(removed.rows_before)
    there = comparisons.answer(removed.after).about(removed.rows_after)
    factor = common_factor(here, there)
    if factor is None or abs(factor * n / (n - 1) - 1) >= 1e-3:
        return False
    replaced = (comparisons.outcome(_replaced(pool, n, j)) for j in range(n))
    return all(found.outcome == "isolated" for found in replaced)
