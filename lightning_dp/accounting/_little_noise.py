"""Bounds for steps with so little noise that no grid could hold their losses.

Given which of the steps a record takes part in, the pair of distributions is that of a Gaussian of
``mu^2 = Delta^2 sum z_t^-2`` over those steps. The hockey-stick divergence is jointly convex, so the
profile of the mixture over these sets is at most the mean of theirs, for both relations and in both
orders. A set of at most k of the steps with little noise, and all others, has at most
``mu_k^2 = Delta^2 (k / z_least^2 + sum_others z_t^-2)``, so that

``delta(epsilon) <= P(J > k) + G(epsilon; mu_k)`` for every k,

with J the number of such steps that the record takes part in, at most binomial with the largest of
their rates, and G the Gaussian profile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtrc

from lightning_dp.accounting.base import check_relation
from lightning_dp.accounting.gdp import gdp_delta, gdp_epsilon
from lightning_dp.accounting.steps import Steps

__all__ = ["HUGE", "LittleNoise"]

HUGE = 1e4
"""An epsilon for which a quick bound will do; a grid of such losses would be long."""

_LITTLE = 0.1  # a noise multiplier; below, a record that takes part is nearly published
_ROUND_UP = 1 + 1e-6  # of a binomial tail, for its rounding


@dataclass(frozen=True)
class LittleNoise:
    """The steps of a history that have little noise, and what all others cost.

    Args:
        count: of the former.
        sample_rate: the largest of theirs.
        mu: of one of them, the largest.
        others: the sum of the squares of μ of the others.
    """

    count: int
    sample_rate: float
    mu: float
    others: float

    @classmethod
    def of(cls, steps: Steps, relation: str) -> LittleNoise:
        """Return what a history is in these terms."""
        z, rates = steps.noise_multipliers, steps.sample_rates
        few = (z < _LITTLE) & (rates < 1)
        squares = check_relation(relation) ** 2 * steps.counts * (1 / z) ** 2
        mu = check_relation(relation) / float(z[few].min(initial=math.inf))
        count, rate = int(steps.counts[few].sum()), float(rates[few].max(initial=0.0))
        return cls(count, rate, mu, math.fsum(squares[~few]))

    def epsilon(self, delta: float) -> float:
        """Return an epsilon at ``delta``."""
        low, high = -1, self.count  # more than ``high`` take part with probability delta / 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._more(middle) <= delta / 2 else (middle, high)
        return gdp_epsilon(self._mu(high), delta - self._more(high))

    def delta(self, epsilon: float) -> float:
        """Return a delta at ``epsilon``."""
        few = {int(k) for k in np.geomspace(1, self.count + 1, 64) - 1}
        return min(1.0, *(self._more(k) + gdp_delta(self._mu(k), epsilon) for k in few))

    def _more(self, k: int) -> float:
        """Return the probability that a record takes part in more than k of them."""
        if k >= self.count:
            return 0.0
        return float(bdtrc(k, self.count, self.sample_rate)) * _ROUND_UP

    def _mu(self, k: int) -> float:
        return math.sqrt(k * self.mu**2 + self.others)
