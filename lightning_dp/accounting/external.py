"""Declared guarantees: their composition, and pessimistic loss distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_dp.accounting._pmf import LossPmf, Node, SampledNode, node_of
from lightning_dp.accounting.events import AbstractExternal, History, Relation
from lightning_dp.accounting.steps import CheckedHistory, FloatArray

_UNIT = 2.0**-52
_POINTS = 1024  # of the profile of a zCDP release, on each side
_ORDERS = 1 + np.geomspace(1e-6, 1e6, 3000)


@dataclass(frozen=True)
class Declared:
    """Declared guarantees together, under one relation.

    An (ε, δ)-DP release is no worse than one that, with probability δ, tells all, and else answers a
    yes-no question truly with probability ``e^ε / (1 + e^ε)`` (Kairouz, Oh and Viswanath, "The
    Composition Theorem for Differential Privacy", arXiv 1311.0776). So all of them together
    tell all with probability ``lost = 1 - prod_i (1 - δ_i)``, and else are pure:
    ``delta(e) = lost + (1 - lost) delta_pure(e)``, exactly.
    """

    pure: tuple[tuple[float, int], ...] = ()  # ε of each distinct question, and its count
    log_intact: float = 0.0  # sum_i log(1 - δ_i)
    rho: float = 0.0  # of all zCDP releases
    sampled: tuple[tuple[SampledNode, int], ...] = ()  # releases that are no pair, with counts

    @classmethod
    def of(cls, history: History, relation: Relation) -> Declared:
        """Add up the guarantees in a history, without its steps.

        Raises:
            ValueError: if one of them says nothing about the relation.
        """
        pure: dict[float, int] = {}
        sampled: dict[SampledNode, int] = {}
        logs, rhos = [], []
        for event, count in CheckedHistory.of(history).external(relation):
            if not isinstance(event, AbstractExternal):
                node = node_of(event)
                sampled[node] = sampled.get(node, 0) + count
                continue
            epsilon, delta, rho = event.costs(relation)
            if epsilon > 0:
                pure[epsilon] = pure.get(epsilon, 0) + count
            logs.append(count * math.log1p(-delta) if delta < 1 else -math.inf)
            rhos.append(count * rho)
        return cls(
            tuple(sorted(pure.items())), math.fsum(logs), math.fsum(rhos), tuple(sampled.items())
        )

    @property
    def is_empty(self) -> bool:
        """True if nothing of it costs anything."""
        return self == NOTHING

    @property
    def lost(self) -> float:
        """The probability that a release tells all."""
        return -math.expm1(self.log_intact)

    @property
    def simple_epsilon(self) -> float:
        """ε at δ = ``lost``, the sum of all ε; infinite if anything else is not pure."""
        if self.rho > 0 or self.sampled:
            return math.inf
        return math.fsum(n * epsilon for epsilon, n in self.pure)

    def left_of(self, delta: float) -> float:
        """Return δ for all that is pure, so that the whole has ``delta``; not above 0 if none is left."""
        if self.log_intact == 0.0:
            return delta
        if self.log_intact == -math.inf:
            return 0.0
        # Rounded down: the difference of two numbers that may be nearly the same.
        return (delta * (1 - 1e-14) - self.lost * (1 + 1e-14)) / math.exp(self.log_intact)

    def with_all(self, delta: float) -> float:
        """Return δ of the whole, if that of all else, pure, is ``delta``."""
        if self.log_intact == 0.0:
            return delta
        return min(1.0, (self.lost + math.exp(self.log_intact) * delta) * (1 + 1e-14))

    @property
    def nodes(self) -> tuple[tuple[Node, int], ...]:
        """The pure, zCDP and sampled ones, as pairs of distributions with their counts."""
        questions: list[tuple[Node, int]] = [(Question(e), count) for e, count in self.pure]
        concentrated = [(Concentrated(self.rho), 1)] if self.rho > 0 else []
        return (*questions, *concentrated, *self.sampled)


NOTHING = Declared()


class Question(NamedTuple):
    """A yes-no question that is answered truly with probability ``e^ε / (1 + e^ε)``.

    Its loss is ε with that probability, else -ε, under both relations and in both orders.
    """

    epsilon: float

    def support(self, log_tail: float, relation: str) -> tuple[float, float]:
        return self.epsilon, self.epsilon

    def pmf(
        self, h: float, log_tail: float, relation: str, backward: bool, limit: float
    ) -> LossPmf:
        """Return the two losses, each shared out between its neighbours on the grid.

        Connecting the dots keeps the masses under both distributions: with the loss a distance d
        above a grid point, the upper neighbour has ``(1 - e^-d) / (1 - e^-h)`` of it, the lower one
        ``(e^-d - e^-h) / (1 - e^-h)``.
        """
        reach = math.floor(self.epsilon / h) + 1
        masses = np.zeros(2 * reach + 1)
        truth = 1 / (1 + math.exp(-self.epsilon))
        for loss, mass in ((self.epsilon, truth), (-self.epsilon, math.exp(-self.epsilon) * truth)):
            below = min(math.floor(loss / h), reach - 1)
            d = min(max(loss - below * h, 0.0), h)
            error = 8 * _UNIT * (1 + self.epsilon / h)
            upper = -math.expm1(-d) / -math.expm1(-h)
            lower = math.exp(-d) * -math.expm1(d - h) / -math.expm1(-h)
            masses[reach + below] += mass * (lower + error)
            masses[reach + below + 1] += mass * (upper + error)
        first = int(np.flatnonzero(masses)[0])  # moments are taken from the ends
        masses = masses[first:]
        masses.flags.writeable = False
        return LossPmf(first - reach, masses, 0.0)


class Concentrated(NamedTuple):
    """Any release that is ρ-zCDP: its profile is at most what the Rényi divergences leave possible.

    ``delta(t) <= min_a exp((a - 1) (rho a - t + log(1 - 1/a)) - log a)`` for t >= 0 (Canonne, Kamath
    and Steinke, arXiv 2004.00010v4, Proposition 12), in both orders, so that
    ``delta(-t) = 1 - e^-t + e^-t delta_reversed(t)`` is bounded as well; and ``delta(0)``, the total
    variation, by ``sqrt(1 - e^-rho)`` and ``sqrt(rho / 2)`` (Bretagnolle and Huber; Pinsker). The
    true profile is convex in ``gamma = e^t`` and below these bounds, so it is below their greatest
    convex minorant on a grid, which is the profile of a discrete pair.
    """

    rho: float

    def support(self, log_tail: float, relation: str) -> tuple[float, float]:
        # At a - 1 = sqrt(-log_tail / rho), log delta <= (a - 1) (rho a - t).
        reach = self.rho + 2 * math.sqrt(self.rho * max(-log_tail, 1.0))
        return reach, reach

    def pmf(
        self, h: float, log_tail: float, relation: str, backward: bool, limit: float
    ) -> LossPmf:
        """Return the masses of the minorant at some of the grid points."""
        reach = self.support(log_tail, relation)[1]
        stride = max(1, math.ceil(reach / (_POINTS * h)))
        half = max(1, math.ceil(reach / (stride * h)))
        t: FloatArray = np.arange(-half, half + 1, dtype=np.float64) * (stride * h)
        # delta at the left end is at most 1, at any gamma.
        delta = np.minimum(self._profile(t), 1.0)
        kept = _minorant(t, delta)
        places = (kept - half) * stride
        masses = np.zeros(2 * half * stride + 1)
        masses[places + half * stride] = _masses(t[kept], delta[kept])
        masses.flags.writeable = False
        return LossPmf(-half * stride, masses, float(delta[-1]))

    def _profile(self, t: FloatArray) -> FloatArray:
        """Bounds of the profile at increasing t."""
        above = np.abs(t)
        a = _ORDERS
        # The lower envelope of the lines starts[i] - (a_i - 1) t; a poor choice of i is only looser.
        starts = (a - 1) * (self.rho * a + np.log1p(-1 / a)) - np.log(a)
        turns = np.maximum.accumulate(np.diff(starts) / np.diff(a))
        best = np.searchsorted(turns, above)
        bound = np.exp(np.minimum(starts[best] - (a[best] - 1) * above, 0.0)) * (1 + 1e-12)
        total_variation = min(math.sqrt(-math.expm1(-self.rho)), math.sqrt(self.rho / 2))
        bound = np.minimum(bound, total_variation * (1 + 1e-12))
        return np.where(t >= 0, bound, -np.expm1(-above) + np.exp(-above) * bound)


def _minorant(t: FloatArray, delta: FloatArray) -> NDArray[np.intp]:
    """Return the places of the points of the greatest convex minorant of delta(gamma), gamma = e^t."""
    kept: list[int] = []
    slopes: list[float] = []  # from each kept point to the next one, times e^t there
    for i in range(t.size):
        while kept:
            slope = _slope(t, delta, kept[-1], i)
            if not slopes or slopes[-1] * math.exp(t[kept[-1]] - t[kept[-2]]) < slope:
                break
            kept.pop()
            slopes.pop()
        if kept:
            slopes.append(_slope(t, delta, kept[-1], i))
        kept.append(i)
    return np.array(kept)


def _slope(t: FloatArray, delta: FloatArray, i: int, k: int) -> float:
    """``e^(t_i)`` times the slope of delta(gamma) between two points."""
    return float((delta[k] - delta[i]) / math.expm1(t[k] - t[i]))


def _masses(t: FloatArray, delta: FloatArray) -> FloatArray:
    """Masses of the pair whose profile joins some points: ``e^t`` times the changes of the slope."""
    widths = np.expm1(np.diff(t))
    after = np.append(np.diff(delta) / widths, 0.0)  # times e^t
    before = np.concatenate(([-math.exp(t[0])], after[:-1] * np.exp(np.diff(t))))
    # Each slope is rounded by a few units of the larger delta.
    error = 8 * _UNIT * np.concatenate(([1.0], delta[:-1] * np.exp(np.diff(t)) / widths))
    return np.asarray(np.maximum(after - before, 0.0) + error)
