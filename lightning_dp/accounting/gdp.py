"""Gaussian mechanisms without a grid: exact formulas of mu-GDP, and a bound for little noise."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, ndtr, ndtri

from lightning_dp._validate import between, not_negative, number, positive
from lightning_dp.accounting.base import check_delta, check_relation
from lightning_dp.accounting.events import binomial_tail
from lightning_dp.accounting.steps import FloatArray, Steps

HUGE = 1e4
"""An epsilon for which a quick bound will do; a grid of such losses would be long."""

_LARGE = 1e6  # from this μ on, losses near μ²/2 are known to a rounding error of some μ alone
_SLACK = 1e-15  # times μ: the rounding of ε/μ - μ/2
_LITTLE = 0.1  # a noise multiplier; below, a record that takes part is nearly published
_SQRT_HALF_PI = math.sqrt(math.pi / 2)


def gaussian_profile(epsilon: FloatArray, mu: float) -> tuple[FloatArray, FloatArray]:
    """``(delta, tail)`` of ``N(mu, 1)`` from ``N(0, 1)`` at each ``epsilon >= 0``.

    ``delta = Phi(-a) - e^epsilon Phi(-b)`` with ``a = epsilon/mu - mu/2``, ``b = a + mu``, and
    ``tail = Phi(-a)``, the size of the terms that cancel. As ``e^epsilon phi(b) = phi(a)``, for
    ``a > 0`` this is ``phi(a) (m(a) - m(b))`` with Mills ratio ``m``: relative accuracy in the tail.
    """
    a = epsilon / mu - mu / 2
    density = np.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    weighted = density * _SQRT_HALF_PI * erfcx((a + mu) / math.sqrt(2))
    tail = density * _SQRT_HALF_PI * erfcx(np.maximum(a, 0.0) / math.sqrt(2))
    low = a < 0
    tail[low] = ndtr(-a[low])
    return np.maximum(tail - weighted, 0.0), tail


def gdp_delta(mu: float, epsilon: float) -> float:
    """The exact delta of mu-GDP at epsilon.

    ``delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)``, the privacy profile of
    ``N(0, 1)`` against ``N(mu, 1)`` (Dong, Roth and Su, arXiv 1905.02383v3, Corollary 2.13; Balle and
    Wang, arXiv 1805.06530v2, Theorem 8). ``Phi`` is the normal distribution function.

    ``mu = sqrt(sum_t z_t^-2)`` for full-batch Gaussian releases with multipliers ``z_t``; above 1e6 it is
    an upper bound, ``Phi(mu/2 - epsilon/mu + 1e-15 mu)``.

    Example:
        >>> round(gdp_delta(mu=1.0, epsilon=1.0), 6)
        0.126937
    """
    epsilon, mu = not_negative("epsilon", epsilon), between("[0, inf]")("mu", mu)
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    if mu > _LARGE:
        return float(ndtr(mu / 2 - epsilon / mu + _SLACK * mu))
    return float(gaussian_profile(np.array([epsilon]), mu)[0][0])


def gdp_epsilon(mu: float, delta: float) -> float:
    """The exact epsilon of mu-GDP at delta, rounded up by 1e-12: the inverse of :func:`gdp_delta`.

    Example:
        >>> round(gdp_epsilon(mu=10 ** 0.5, delta=1e-5), 3)
        17.857
    """
    delta, mu = check_delta(delta), number("mu", mu)
    if gdp_delta(mu, 0.0) <= delta:
        return 0.0
    if math.isinf(mu):
        return math.inf
    if mu > _LARGE:  # solved for epsilon, and rounded up
        return mu * (mu / 2 - float(ndtri(delta)) + 2 * _SLACK * mu)
    log_delta = math.log(delta)

    def excess(epsilon: float) -> float:
        value = gdp_delta(mu, epsilon)
        return math.log(value) - log_delta if value > 0 else -1e3

    # delta(epsilon) <= Phi(mu/2 - epsilon/mu) <= exp(-(epsilon/mu - mu/2)^2 / 2).
    upper = mu * (mu / 2 + math.sqrt(-2 * log_delta))
    root = float(brentq(excess, 0.0, upper, xtol=1e-15 * upper, rtol=1e-14, maxiter=200))
    while excess(root) > 0:
        root *= 1 + 1e-12
    return root


def mu_of(steps: Steps, relation: str) -> float:
    """``mu = Delta sqrt(sum_t z_t^-2)`` with every ``q_t`` read as 1; Delta is 1 or 2 (replace-one)."""
    return check_relation(relation) * steps.mu


def mu_of_budget(epsilon: float, delta: float) -> float:
    """The largest μ with δ(ε; μ) <= δ."""
    epsilon = positive("epsilon", epsilon)
    high = 1.0
    while gdp_delta(high, epsilon) <= delta:
        high *= 2
    mu = float(brentq(lambda m: gdp_delta(m, epsilon) - delta, 1e-12, high, xtol=1e-15, rtol=1e-14))
    while gdp_delta(mu, epsilon) > delta:
        mu *= 1 - 1e-14
    return mu


@dataclass(frozen=True)
class LittleNoise:
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

    count: int  # of the steps with little noise
    sample_rate: float  # the largest of theirs
    mu: float  # of one of them, the largest
    others: float  # the sum of the squares of μ of all other steps

    @classmethod
    def of(cls, steps: Steps, relation: str) -> LittleNoise:
        """Split a history into steps with little noise and others."""
        z, rates = steps.noise_multipliers, steps.sample_rates
        few = (z < _LITTLE) & (rates < 1)
        squares = check_relation(relation) ** 2 * steps.counts * (1 / z) ** 2
        mu = check_relation(relation) / float(z[few].min(initial=math.inf))
        count, rate = int(steps.counts[few].sum()), float(rates[few].max(initial=0.0))
        return cls(count, rate, mu, math.fsum(squares[~few]))

    def epsilon(self, delta: float) -> float:
        """Return an epsilon at ``delta``."""
        few = bisect_left(range(self.count), True, key=lambda k: self._more(k) <= delta / 2)
        return gdp_epsilon(self._mu(few), delta - self._more(few))

    def delta(self, epsilon: float) -> float:
        """Return a delta at ``epsilon``."""
        few = {int(k) for k in np.geomspace(1, self.count + 1, 64) - 1}
        return min(1.0, *(self._more(k) + gdp_delta(self._mu(k), epsilon) for k in few))

    def _more(self, k: int) -> float:
        """Return the probability that a record takes part in more than k of them."""
        return binomial_tail(k + 1, self.count, self.sample_rate)

    def _mu(self, k: int) -> float:
        return math.sqrt(k * self.mu**2 + self.others)
