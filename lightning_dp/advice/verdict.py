r"""Judgement on the releases of a whole run: did a direction outlast the noise, and where did it lead?

The agreements a_t (:mod:`lightning_dp.signal`) are independent and standard normal if the releases hold
noise alone. They are summed over the stretches of the run, pairs of neighbours, pairs of pairs and so
on up to the whole, each sum over the root of its number: all standard normal, so that a direction is
found which lasts long, or early on, or late. The largest of the k sums exceeds
:math:`Φ^{-1}(1 - α/k)` under noise alone with probability at most α (Bonferroni's inequality).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from scipy.special import ndtri

from lightning_dp.signal import Signal, Stretch

__all__ = ["Verdict", "judged"]

_ALPHA = 0.01  # of 100 runs that learn nothing, one is taken for one that does
_LEAST = 10  # agreements below which nothing is said
_SURE = 4.0  # standard deviations of one sum that was not chosen by its value
_SHARE = 0.1  # of the clearest quarter's, below which agreement at the end is what is left of it


@dataclass(frozen=True)
class Verdict:
    """A judgement on the releases of a run.

    Args:
        largest: the largest of the sums, in standard deviations of noise.
        threshold: what noise alone stays below in 99 of 100 runs.
        quarters: the sums over the quarters of the run.
    """

    largest: float
    threshold: float
    quarters: tuple[float, ...]

    @property
    def learns(self) -> bool:
        """True if a direction in the releases outlasts their noise."""
        return self.largest > self.threshold

    @property
    def stops_short(self) -> bool:
        """True if the last quarter's releases still point where earlier ones did, clearly.

        The optimizer has gone that way all the time, and was not there yet.
        """
        last, clearest = self.quarters[-1], max(self.quarters)
        return self.learns and last > _SURE and last > _SHARE * clearest

    @property
    def jumps(self) -> bool:
        """True if the last half's releases point against earlier ones, so steps jump across."""
        half = self.quarters[2:]
        return sum(half) / math.sqrt(len(half)) < -_SURE


def judged(signal: Signal) -> Verdict | None:
    """Judge the releases of a run; None if there are too few.

    Example:
        >>> import torch
        >>> from lightning_dp.boundary import Query, Release, Term
        >>> from lightning_dp.signal import SignalTracker
        >>> tracker, generator = SignalTracker(), torch.Generator().manual_seed(1)
        >>> for step in range(100):
        ...     noise = torch.randn(1000, generator=generator)
        ...     tracker.observe(Query((Term(),), 1.0, 1.0), Release(noise, noise_std=1.0), step)
        >>> judged(tracker.signal()).learns
        False
    """
    if signal.whole.agreements < _LEAST:
        return None
    sums = [each.z_score for each in _scanned(signal) if each.agreements]
    ends = [round(part * len(signal.stretches) / 4) for part in range(5)]
    quarters = (signal.between(a, b) for a, b in pairwise(ends))
    return Verdict(
        largest=max(sums),
        threshold=float(-ndtri(_ALPHA / len(sums))),
        quarters=tuple(each.z_score if each.agreements else 0.0 for each in quarters),
    )


def _scanned(signal: Signal) -> Iterator[Stretch]:
    """Yield the stretches, pairs of neighbours, pairs of pairs, up to the whole."""
    level = list(signal.stretches)
    while level:
        yield from level
        if len(level) == 1:
            return
        last = level[-1:] if len(level) % 2 else []
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [first.plus(second) for first, second in pairs] + last
