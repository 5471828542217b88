"""Many distinct events as few that cost a little more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from lightning_dp.accounting.base import History
from lightning_dp.accounting.events import AbstractEvent, Gaussian, PoissonGaussian

__all__ = ["coarse", "coarse_pairs"]

_FEW = 50
_RATIO = math.log(1.02)


def coarse(history: History) -> History:
    """Return events of which the given ones are at most as costly; the same ones if they are few.

    Noise multipliers are rounded down, by less than 2 %.

    Example:
        >>> history = [(PoissonGaussian(2.0 + i * 1e-5, 0.1), 1) for i in range(1000)]
        >>> len(coarse(history)), sum(count for _, count in coarse(history))
        (1, 1000)
    """
    if len(history) <= _FEW:
        return history
    kept: list[tuple[AbstractEvent, int]] = []
    counts: Counter[tuple[float, float]] = Counter()
    for event, count in history:
        if isinstance(event, Gaussian | PoissonGaussian):
            counts[event.pair] += count
        else:
            kept.append((event, count))
    return [*kept, *_rounded(counts)]


def coarse_pairs(pairs: Iterable[tuple[float, float]]) -> History:
    """The same for single Gaussian steps (noise multiplier, sample rate), which may be many."""
    return _rounded(Counter(pairs))


def _rounded(steps: Counter[tuple[float, float]]) -> History:
    if len(steps) <= _FEW:
        return [(_event(*pair), count) for pair, count in steps.items()]
    counts: dict[tuple[float, float], tuple[float, int]] = {}
    for (noise, rate), count in steps.items():
        key = (math.floor(math.log(noise) / _RATIO) if noise > 0 else -math.inf, rate)
        least, total = counts.get(key, (math.inf, 0))
        counts[key] = min(least, noise), total + count
    return [(_event(least, rate), total) for (_, rate), (least, total) in counts.items()]


def _event(noise: float, rate: float) -> AbstractEvent:
    return Gaussian(noise) if rate == 1 else PoissonGaussian(noise, rate)
