"""Privacy loss of batches that are no Poisson sample: with a limit, and of an allocated epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lightning_dp.accounting._pmf import GaussianNode, LossPmf, discretise, support
from lightning_dp.accounting.events import (
    AbstractEvent,
    RandomAllocationEpoch,
    Relation,
    TruncatedGaussian,
)
from lightning_dp.accounting.steps import FloatArray, Steps

_UNIT = 2.0**-52
_POINTS = 1000  # of a distribution of ratios
_SMALLEST = -600.0  # logarithm of a mass under Q at the largest ratio: products of two are numbers


def node_of(event: AbstractEvent, relation: Relation) -> SampledNode:
    """Return the pair of distributions of an event that costs less than its pair of numbers."""
    if isinstance(event, TruncatedGaussian):
        return TruncatedNode(*event.pair, event.chance_of_limit, relation)
    assert isinstance(event, RandomAllocationEpoch)
    return AllocationNode(event.noise_multiplier, event.batches)


class TruncatedNode(NamedTuple):
    """With a public chance a subsampled Gaussian of half the noise, else one of all of it.

    Args:
        half, sample_rate: z/2 and q.
        chance: of the former.
        of: the relation.
    """

    half: float
    sample_rate: float
    chance: float
    of: Relation

    def support(self, log_tail: float, relation: str) -> tuple[float, float]:
        return support(self.half, self.sample_rate, log_tail, relation)

    def pmf(
        self, h: float, log_tail: float, relation: str, backward: bool, limit: float
    ) -> LossPmf:
        """Return the mixture of the two, which the hockey-stick divergence is convex in."""
        noises = (2 * self.half, 1 - self.chance), (self.half, self.chance)
        parts = [
            (discretise(z, self.sample_rate, h, log_tail, relation, backward, limit), weight)
            for z, weight in noises
        ]
        start = min(pmf.start for pmf, _ in parts)
        masses = np.zeros(max(pmf.start + pmf.probabilities.size for pmf, _ in parts) - start)
        for pmf, weight in parts:
            place = pmf.start - start
            masses[place : place + pmf.probabilities.size] += weight * pmf.probabilities
        infinity = math.fsum(weight * pmf.infinity for pmf, weight in parts)
        return _trimmed(start, masses * (1 + 4 * _UNIT), infinity * (1 + 4 * _UNIT))

    def divergence(self, orders: FloatArray) -> FloatArray:
        """Return the Rényi divergence, whose ``e^((a - 1) rho)`` is convex too."""
        from lightning_dp.accounting.renyi import total_divergence

        one = np.ones(1)
        steps = [Steps(z * one, self.sample_rate * one, one) for z in (2 * self.half, self.half)]
        rare, often = (
            (orders - 1) * total_divergence(each, self.of, orders) for each in steps[::-1]
        )
        with np.errstate(divide="ignore"):
            mixed = np.logaddexp(np.log(self.chance) + rare, np.log1p(-self.chance) + often)
        return np.asarray(mixed / (orders - 1))


class AllocationNode(NamedTuple):
    """An epoch of which each record takes part in one of t steps, drawn uniformly and secretly.

    With x_i ~ N(0, z^2) under Q and one of them, chosen uniformly, from N(1, z^2) under P, the ratio of
    the densities is the mean of t independent ``E_i = exp((x_i - 1/2) / z^2)``, of mean 1 under Q.

    Any pair that the Gaussian one, of one step, is a post-processing of, may take its place: the same
    post-processing of each of the t coordinates gives the pair above. Connecting the dots makes such a
    pair, with finitely many ratios (arXiv 2207.04380v1, Theorem 5, and Blackwell's theorem). Then sums
    of k ratios are kept on a grid of :data:`_POINTS`: a ratio between two points is shared out between
    them so that its mean stays, which is again such a pair (the larger experiment also tells which
    point was drawn, and the mean over both is the ratio). One above the last point keeps its mass
    there, and the rest of its mean goes to infinity; one below the first is shared with the ratio 0.
    So the result dominates in both orders, and sums of 2k come from those of k: about 2 log2(t) sums.

    Where masses under Q would be too small for floats (little noise at a tiny δ), a full batch is the
    bound: the pair above is a mixture of its pairs.

    Args:
        noise_multiplier: of each step.
        batches: t, the steps of the epoch.
    """

    noise_multiplier: float
    batches: int

    def support(self, log_tail: float, relation: str) -> tuple[float, float]:
        if (full := self._full_batch(log_tail)) is not None:
            return full.support(log_tail, relation)
        logs = _mean_of(*self, log_tail).logs
        return max(-float(logs[0]), 0.0), max(float(logs[-1]), 0.0)

    def pmf(
        self, h: float, log_tail: float, relation: str, backward: bool, limit: float
    ) -> LossPmf:
        """Return the loss on a grid, its ratios shared out once more."""
        if (full := self._full_batch(log_tail)) is not None:
            return full.pmf(h, log_tail, relation, backward, limit)
        ratios = _mean_of(*self, log_tail)
        reach = max(1, math.ceil(min(limit / h, 2.0**40)))
        low = math.floor(float(ratios.logs[0]) / h)
        points = math.ceil(float(ratios.logs[-1]) / h) - low + 2
        masses = _shared(ratios.logs, ratios.masses, low * h, h, points)
        places = low + np.arange(points)
        if backward:  # the loss is the logarithm of 1 / ratio, under Q
            places, masses, infinity = -places[::-1], masses[::-1], ratios.zero
        else:
            masses = masses * np.exp(places * h) * (1 + 8 * _UNIT)
            infinity = ratios.infinite
        beyond = places > reach
        infinity += float(masses[beyond].sum()) * (1 + 1e-9)
        places, masses = np.maximum(places[~beyond], -reach), masses[~beyond]
        start = int(places[0])
        sums = np.bincount(places.astype(np.intp) - start, masses).astype(np.float64)
        return _trimmed(start, sums, infinity)

    def divergence(self, orders: FloatArray) -> FloatArray:
        """Return that of a Gaussian release, as if it were told which step uses whom: a bound."""
        return np.asarray(orders / (2 * self.noise_multiplier**2))

    def _full_batch(self, log_tail: float) -> GaussianNode | None:
        """Return the release of a full batch where the ratios' masses are no numbers."""
        full = GaussianNode(self.noise_multiplier, 1.0)
        largest = full.support(log_tail - 4, "add_remove")[1]
        return full if log_tail - largest < _SMALLEST else None


SampledNode = TruncatedNode | AllocationNode


def _trimmed(start: int, masses: FloatArray, infinity: float) -> LossPmf:
    """Return a pmf whose ends have mass: moments are taken from there."""
    first, last = np.flatnonzero(masses)[[0, -1]]
    masses = masses[first : last + 1]
    masses.flags.writeable = False
    return LossPmf(int(start + first), masses, infinity)


@dataclass(frozen=True)
class _Ratios:
    """A distribution of the mean of k ratios: masses under Q at ``exp(low + i step)`` and at 0.

    ``infinite`` is the mass under P at infinity. Masses are rounded up.
    """

    low: float
    step: float
    masses: FloatArray
    zero: float
    infinite: float

    @property
    def logs(self) -> FloatArray:
        return np.asarray(self.low + self.step * np.arange(self.masses.size), dtype=np.float64)


@lru_cache(maxsize=64)
def _mean_of(noise_multiplier: float, k: int, log_tail: float) -> _Ratios:
    """Return the distribution of the mean of k ratios, about ``e^log_tail`` of it at 0 and infinity."""
    if k == 1:
        down, up = support(noise_multiplier, 1.0, log_tail - 4, "add_remove")
        h = (down + up) / _POINTS
        where = (noise_multiplier, 1.0, h, log_tail - 4, "add_remove")
        pmf = discretise(*where)
        logs = (pmf.start + np.arange(pmf.probabilities.size)) * h
        masses = pmf.probabilities * np.exp(-logs) * (1 + 8 * _UNIT)
        return _Ratios(pmf.start * h, h, masses, discretise(*where, True).infinity, pmf.infinity)
    half = _mean_of(noise_multiplier, k // 2, log_tail)
    tail = math.exp(log_tail - 4)
    found = _joined(half, half, 0.5, tail)
    if k % 2:
        found = _joined(found, _mean_of(noise_multiplier, 1, log_tail), (k - 1) / k, tail)
    return found


def _joined(first: _Ratios, second: _Ratios, share: float, tail: float) -> _Ratios:
    """Return the distribution of ``share X + (1 - share) Y``, X and Y independent."""
    # Where all ratios are above a half, the difference from 1 counts.
    near = min(first.low, second.low) > -0.7
    there, back = (np.expm1, np.log1p) if near else (np.exp, np.log)
    logs = back(share * there(first.logs)[:, None] + (1 - share) * there(second.logs))
    low, high = float(logs[0, 0]), float(logs[-1, -1])
    step = (high - low) / (_POINTS - 1)
    products = first.masses[:, None] * second.masses
    masses = _shared(logs.ravel(), products.ravel(), low, step, _POINTS)
    zero = first.zero * second.zero
    grid = low + step * np.arange(_POINTS)
    alone = (
        (first.logs + math.log(share), first.masses * second.zero),
        (second.logs + math.log1p(-share), second.masses * first.zero),
    )
    for at, mass in alone:
        inside = at >= low
        masses += _shared(at[inside], mass[inside], low, step, _POINTS)
        zero += _shared_with_zero(at[~inside] - low, mass[~inside], masses[:1])
    infinite = share * first.infinite + (1 - share) * second.infinite
    # The ends are cut where next to nothing is beyond them, which makes the next grid finer.
    beyond = np.cumsum((masses * np.exp(grid))[::-1])[::-1]
    last = max(int(np.flatnonzero(beyond > tail)[-1]), 1)
    above = masses[last + 1 :]
    infinite += float(above @ (np.exp(grid[last + 1 :]) - math.exp(grid[last])))
    masses[last] += above.sum()
    least = min(int(np.flatnonzero(np.cumsum(masses) > tail)[0]), last - 1)
    zero += _shared_with_zero(grid[:least] - grid[least], masses[:least], masses[least : least + 1])
    rounding = 1 + 1e-12
    masses = masses[least : last + 1] * rounding
    return _Ratios(float(grid[least]), step, masses, zero * rounding, infinite * rounding)


def _shared(
    logs: FloatArray, masses: FloatArray, low: float, step: float, points: int
) -> FloatArray:
    """Share masses out between their neighbours on a grid, so that the mean of the ratio stays."""
    place = (logs - low) / step
    left = np.clip(np.floor(place).astype(np.intp), 0, points - 2)
    upper = np.expm1(np.clip(place - left, 0.0, 1.0) * step) / math.expm1(step)
    # The place is off by some units of the largest logarithm over the step: to both neighbours.
    error = 16 * _UNIT * (points + float(np.abs(logs).max(initial=0.0)) / step)
    found = np.bincount(left, masses * (1 - upper + error), points)
    found = found + np.bincount(left + 1, masses * (upper + error), points)
    return np.asarray(found, dtype=np.float64)


def _shared_with_zero(logs: FloatArray, masses: FloatArray, point: FloatArray) -> float:
    """Share masses out between the ratio 0 and a point, relative to which ``logs`` are; add to it."""
    point += masses @ np.exp(logs)
    return float(masses @ -np.expm1(logs))
