"""Models that draw random numbers: other numbers take other branches, and may hide a sum."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.isolation.calls_seen import CallsSeen
from lightning_dp.isolation.comparison import Batch, Change, Comparisons
from lightning_dp.isolation.coupling import CURES
from lightning_dp.isolation.outcome import ISOLATED, Isolation
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.randomness import EXTREME_SEEDS, seed
from lightning_dp.isolation.stand_ins import NotProbed

__all__ = ["probe_draws"]

_LOOKS, _SECONDS = 64, 1.0  # at what other random numbers do, forward only
_RARE = 6  # ways that are probed, the rarest first
_SEEDS = 6  # with which norms are averaged
_SURE = 6.0  # standard errors


def probe_draws(
    comparisons: Comparisons, pool: Any, n: int, *, in_short: bool = False
) -> Isolation:
    """Replace records under rare random numbers, and tell a sum over records from a mean.

    Rare are those of :data:`EXTREME_SEEDS`, and those with which the forward pass makes other calls
    than usual.

    A model that draws nothing is isolated as far as this goes. For the sum, the last record is left
    out while the others meet the same random numbers; where that cannot be told, gradients of n and
    of 2n records are compared on average.

    Args:
        pool: at least 2n synthetic records, the first n of which are the batch.
        in_short: look for no others.
    """
    before = Batch.of(pool, range(n))
    if not comparisons.answer(before).is_random:
        return ISOLATED
    halves = range(n // 2), range(n // 2, n)
    tries = [(number, halves[0] if number % 2 else range(1, n, 2)) for number in EXTREME_SEEDS]
    branches = [] if in_short else _of_branches(comparisons, before)
    for number, rows in (*tries, *itertools.product(branches, halves)):
        after = Batch.of(pool, [n + row if row in rows else row for row in range(n)])
        try:
            found = comparisons.outcome(Change.exchanged(before, after.records, rows, number))
        except NotProbed:  # these numbers leave no gradient, as where all records are dropped
            continue
        if found.outcome != "isolated":
            return found
    return _mean_or_sum(comparisons, pool, n)


def _of_branches(comparisons: Comparisons, batch: Batch) -> list[int]:
    """Return seeds with which the model makes other calls than with the first: one for each such way."""
    try:
        seen = _signatures(comparisons.passes, batch.records)
    except Exception:  # with some numbers it raises: the next checks will see
        return []
    often = Counter(seen.values())
    found = {each: number for number, each in reversed(seen.items()) if each != seen[0]}
    return [found[each] for each in sorted(found, key=often.__getitem__)][:_RARE]


def _signatures(passes: Passes, batch: Any) -> dict[int, int]:
    """Run one copy forward again and again; return by seeds what tells which way each pass takes."""
    found: dict[int, int] = {}
    end = time.perf_counter() + _SECONDS
    with passes.on_copy() as module:
        for number in range(_LOOKS):
            if time.perf_counter() > end:
                break
            seed(number)
            with CallsSeen() as seen:
                passes.forward(module, batch)
            found[number] = seen.signature
    return found


def _mean_or_sum(comparisons: Comparisons, pool: Any, n: int) -> Isolation:
    last_left_out = Change(
        Batch.of(pool, range(n)),
        Batch.of(pool, range(n - 1)),
        range(n - 1),
        range(n - 1),
        same_first_rows=True,
    )
    try:
        if comparisons.outcome(last_left_out).outcome == "isolated":
            return ISOLATED
        growth, error = _growth(comparisons, pool, n)
    except UnsupportedModelError:
        raise
    except Exception:
        growth, error = math.nan, math.inf
    if abs(growth - 1) < 0.25 and growth > _SURE * error:
        return Isolation("coupled", CURES["sum"])
    if abs(growth) < 0.25 and _SURE * error < 1:
        return ISOLATED
    return Isolation("isolated", left_out=("sum or mean over the records",))


def _growth(comparisons: Comparisons, pool: Any, n: int) -> tuple[float, float]:
    """Return how often the gradients double with the number of records, with its standard error.

    They do not where the loss is a mean, and once where it is a sum: the engine takes the loss for
    a mean.
    """
    small, large = (_logarithms(comparisons, pool, n, times) for times in (1, 2))
    error = math.sqrt(float(small.var() / len(small) + large.var() / len(large)))
    return float(large.mean() - small.mean()), error


def _logarithms(comparisons: Comparisons, pool: Any, n: int, times: int) -> Tensor:
    """Return the binary logarithms of the norms of the first n records, each that often."""
    batch = Batch.of(pool, [*range(n)] * times)
    norms = [comparisons.answer(batch, 100 + number).norms for number in range(_SEEDS)]
    return torch.cat(norms).double().log2()
