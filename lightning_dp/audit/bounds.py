"""Statistics of privacy audits: pure functions from counts of right and wrong guesses to bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import beta as beta_distribution
from scipy.stats import binom

from lightning_dp._validate import number, whole
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.events import AbstractEvent, History

FloatArray = NDArray[np.float64]

LEAST_SCALE = 1e-2  # less noise than this part of what is claimed counts as none
_DELTAS = (1e-3, 1e-2, 0.05, 0.15, 0.3, 0.5, 0.7)  # at which a trade-off curve is read


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    r"""Bound the probability of ``correct`` right guesses if the algorithm is (ε, δ)-private.

    m canaries are included by independent fair coins; from the output an attacker guesses r of the
    coins and v guesses are right. Then ``P[V >= v] <= β + 2 m δ α`` with
    ``β = P[W >= v]``, ``α = max_i P[v > W >= v - i] / i``, ``W ~ Binomial(r, e^ε / (1 + e^ε))``
    (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846v1, Theorem 5.2 and Appendix D).

    Args:
        canaries: m, their number.
        guesses: r; their number and their choice may depend on the coins through the output alone.
        correct: v, the right ones among them.
        epsilon: >= 0.
        delta: in [0, 1].

    Raises:
        ValueError: if not 0 <= v <= r <= m, or ε or δ is out of range.

    Example:
        >>> one_run_p_value(10, 10, 10, epsilon=0.0, delta=0.0) == 2**-10
        True
    """
    canaries, guesses = whole("canaries", canaries, 0), whole("guesses", guesses, 0)
    correct = whole("correct", correct, -(2**62))
    epsilon, delta = number("epsilon", epsilon), number("delta", delta)
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            f"correct={correct}, guesses={guesses}, canaries={canaries}: must be 0 <= correct <= "
            "guesses <= canaries."
        )
    if not (epsilon >= 0 and 0 <= delta <= 1):
        raise ValueError(f"epsilon={epsilon} must be at least 0 and delta={delta} in [0, 1].")
    # With δ = 0 each guess is right with probability at most e^ε / (1 + e^ε), whatever the others
    # are: randomized response is the worst case.
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, accuracy))
    # δ adds right guesses, 2 m δ of them in expectation. Adding i where W falls short of v by at
    # most i gains P[v > W >= v - i] at the price of i: α is the best gain for the price.
    i = np.arange(1, correct + 1)
    sums = np.cumsum(binom.pmf(correct - i, guesses, accuracy))
    slope = float(np.max(sums / i, initial=0.0))
    return min(1.0, tail + 2 * canaries * delta * slope)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, failure: float
) -> float:
    """Return the largest ε that is refuted; 0 if none is.

    An (ε', δ)-private algorithm with ε' < ε does so well with probability at most ``failure``. The
    other arguments are those of :func:`one_run_p_value`.

    Example:
        >>> round(one_run_epsilon(1000, 1000, 1000, delta=0.0, failure=0.05), 2)
        5.81
    """
    if one_run_p_value(canaries, guesses, correct, 0.0, delta) > failure:
        return 0.0
    # The p-value grows with ε, so refuted ones are all below some ε: double it, then bisect. The
    # lower end is returned, which is refuted.
    low, high = 0.0, 1.0
    while one_run_p_value(canaries, guesses, correct, high, delta) <= failure:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        is_refuted = one_run_p_value(canaries, guesses, correct, middle, delta) <= failure
        low, high = (middle, high) if is_refuted else (low, middle)
    return low


def upper_rate(errors: int, trials: int, failure: float) -> float:
    """Return Clopper and Pearson's upper bound on a rate, wrong with probability at most ``failure``."""
    if errors >= trials:
        return 1.0
    # The rate p at which so few errors have probability ``failure``: P[Binomial(n, p) <= k] is the
    # tail P[Beta(k + 1, n - k) > p], so p is a quantile.
    return float(beta_distribution.ppf(1 - failure, errors + 1, trials - errors))


@dataclass(frozen=True)
class Errors:
    """Errors of a test of "is the canary in the data?"."""

    false_alarms: int  # canaries outside the data (or their steps) that it called in
    outside: int  # of how many
    misses: int  # canaries in the data that it called out
    inside: int  # of how many

    def upper_rates(self, failure: float) -> tuple[float, float]:
        """Bound both rates; the two bounds hold together except with probability ``failure``."""
        return (
            upper_rate(self.false_alarms, self.outside, failure / 2),
            upper_rate(self.misses, self.inside, failure / 2),
        )


@dataclass(frozen=True)
class StepKind:
    """Steps with noise multiplier z on records sampled at rate q."""

    noise_multiplier: float
    sample_rate: float
    count: int


def log_ratio(y: FloatArray, noise_multiplier: float, sample_rate: float) -> FloatArray:
    """Return the log of (1-q) N(0, z²) + q N(1, z²) over N(0, z²), at y.

    In units of C a step releases N(1, z²) at a canary's coordinate if its batch has the canary, with
    probability q if it is in the data, else N(0, z²).
    """
    # N(1, z²) over N(0, z²) is e^((y - 1/2) / z²).
    with np.errstate(over="ignore"):
        exponent = (y - 0.5) / noise_multiplier**2
    stay = math.log1p(-sample_rate) if sample_rate < 1 else -math.inf
    return np.logaddexp(stay, math.log(sample_rate) + exponent)


def _rates(kinds: Sequence[StepKind], scale: float, threshold: float) -> tuple[float, float]:
    """Return false alarms and hits of the test ``(y - 1/2) / z² > threshold``, over all steps.

    At one sampling rate q the likelihood ratio 1 - q + q e^((y - 1/2) / z²) grows with that, so these
    tests are the most powerful ones (Neyman and Pearson).
    """
    steps = sum(kind.count for kind in kinds)
    alarms = hits = 0.0
    for kind in kinds:
        z, q = kind.noise_multiplier * scale, kind.sample_rate
        y = 0.5 + z * z * threshold
        alarm, share = float(ndtr(-y / z)), kind.count / steps
        alarms += share * alarm
        hits += share * ((1 - q) * alarm + q * float(ndtr((1 - y) / z)))
    return alarms, hits


def step_threshold(kinds: Sequence[StepKind]) -> float:
    """Choose the threshold at which the steps of a claimed run tell most, without looking at the run.

    A threshold chosen by the run's own values would not have the error rates of a fixed test.
    """

    def strength(threshold: float) -> float:
        alarms, hits = _rates(kinds, 1.0, threshold)
        # Hits above false alarms, in standard deviations of their difference.
        return (hits - alarms) / math.sqrt(alarms * (1 - alarms) + hits * (1 - hits) + 1e-6)

    return float(max(np.linspace(-1.0, 8.0, 181), key=strength))


def least_misses_in_steps(kinds: Sequence[StepKind], scale: float, alarms: float) -> float:
    """Return the least rate of misses at this rate of false alarms, at a step chosen at random.

    No test does better against steps with ``scale`` times the noise (Neyman and Pearson; the tester
    knows the step). All kinds must have the same sampling rate.
    """
    if alarms >= 1:
        return 0.0
    low, high = -1.0, 1.0
    while _rates(kinds, scale, low)[0] < alarms:
        low *= 2
    while _rates(kinds, scale, high)[0] > alarms:
        high *= 2
    root = brentq(lambda u: _rates(kinds, scale, u)[0] - alarms, low, high, xtol=1e-9)
    return 1 - _rates(kinds, scale, float(root))[1]


def least_misses_in_run(
    event: Callable[[float, float], AbstractEvent],
    kinds: Sequence[StepKind],
    scale: float,
    alarms: float,
) -> float:
    """Return the same for a whole run: exact for full batches, else a lower bound.

    The bound is by the accountant: (ε, δ) for every δ gives ``misses >= 1 - δ - e^ε alarms`` and
    ``misses >= e^-ε (1 - δ - alarms)`` (Dong, Roth and Su, arXiv:1905.02383v3, Proposition 2.4).
    """
    if all(kind.sample_rate == 1 for kind in kinds):
        # T Gaussian steps are one Gaussian test, N(μ, 1) against N(0, 1) with μ² = Σ 1/z_t².
        mu = math.sqrt(sum(kind.count / (scale * kind.noise_multiplier) ** 2 for kind in kinds))
        return float(ndtr(ndtri(1 - alarms) - mu))
    run = history(event, kinds, scale)
    accountant, least = PLDAccountant(rtol=1e-2), 0.0
    for delta in _DELTAS:
        epsilon = accountant.epsilon(run, delta)
        grown = math.exp(epsilon) * alarms if epsilon < 700 else math.inf  # e^710 is no float
        least = max(least, 1 - delta - grown, math.exp(-epsilon) * (1 - delta - alarms))
    return least


def history(
    event: Callable[[float, float], AbstractEvent], kinds: Sequence[StepKind], scale: float
) -> History:
    """Return the events of a run whose noise is ``scale`` times the declared one."""
    return [(event(scale * k.noise_multiplier, k.sample_rate), k.count) for k in kinds]


def largest_noise_scale(is_refuted: Callable[[float], bool], most: float) -> float:
    """Return the largest scale <= ``most`` that is not refuted; 0 if all are.

    A scale that is refuted must have only refuted ones above it.
    """
    if not is_refuted(most):
        return most
    if is_refuted(LEAST_SCALE):
        return 0.0
    low, high = math.log(LEAST_SCALE), math.log(most)
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (low, middle) if is_refuted(math.exp(middle)) else (middle, high)
    return math.exp(high)  # rounded to the side of more noise
