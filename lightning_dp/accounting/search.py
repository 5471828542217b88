"""The number of runs of a private search: random, since a fixed one would leak."""

from __future__ import annotations

import math
import secrets

import numpy as np
from scipy.optimize import brentq

from lightning_dp._validate import number

__all__ = ["check_distribution", "draw_number_of_runs", "success_rate"]

_MOST = 1e6  # runs on average
_LEAST_LOG_RATE = -700.0


def draw_number_of_runs(mean: float, shape: float) -> int:
    """Draw K, the number of runs of :class:`RepeatAndSelect`, from the operating system's entropy.

    ``shape = eta`` in (-1, inf): the truncated negative binomial distribution,
    ``P(K = k) = c (1 - gamma)^k prod_(l < k) (l + eta) / (l + 1)`` for k = 1, 2, ..., with gamma
    in (0, 1] such that ``E[K] = mean`` (Papernot and Steinke, arXiv 2110.03620v2, Definition 1). It is
    geometric for eta = 1 and logarithmic for eta = 0. ``shape = inf``: the Poisson distribution; then K
    may be 0, and what is released must not depend on the data (the weights before training).

    K is secret: it may not be logged, nor guessed from the time or the bill of the search.

    Args:
        mean: ``E[K]``, at least 1. The costs grow with its logarithm.
        shape: above -1. Smaller ones cost less privacy and make K more variable.

    Returns:
        K, at least 1; at least 0 for ``shape = inf``.

    Raises:
        ValueError: if an argument is out of range or NaN.

    Example:
        >>> draw_number_of_runs(mean=10.0, shape=1.0) >= 1
        True
    """
    mean, shape = check_distribution(mean, shape)
    if not mean <= _MOST:
        raise ValueError(f"mean={mean:g} is too large: at most {_MOST:g} runs can be made.")
    rng = np.random.Generator(np.random.PCG64DXSM(secrets.randbits(128)))
    if shape == math.inf:
        return int(rng.poisson(mean))
    gamma = success_rate(mean, shape)
    # Inversion: P(K = 1) = mean gamma^(eta + 1), and each term from the one before.
    rest, k, probability = float(rng.random()), 1, mean * gamma ** (shape + 1)
    while rest > probability and probability > 0:
        rest -= probability
        probability *= (1 - gamma) * (k + shape) / (k + 1)
        k += 1
    return k


def success_rate(mean: float, shape: float) -> float:
    """gamma in (0, 1] of the truncated negative binomial distribution with this mean.

    ``mean = eta (1 - gamma) / (gamma (1 - gamma^eta))``, for ``eta = 0``
    ``(1 / gamma - 1) / log(1 / gamma)``: falls from infinity to 1 as gamma grows to 1.
    """
    if mean == 1.0:
        return 1.0

    def excess(log_gamma: float) -> float:
        # log(1/gamma - 1) - log((1 - gamma^eta) / eta), without overflow for small gamma.
        others = -log_gamma + math.log(-math.expm1(log_gamma))
        power = shape * log_gamma
        if abs(power) < 1e-12:
            value = math.log(-log_gamma)
        elif power < 0:
            value = math.log(-math.expm1(power) / shape)
        else:
            value = power + math.log(-math.expm1(-power) / -shape)
        return others - value - math.log(mean)

    if excess(_LEAST_LOG_RATE) < 0:
        raise ValueError(f"mean={mean:g} is too large for shape={shape:g}; take a smaller mean.")
    if excess(-1e-12) > 0:
        return math.exp(-1e-12)  # smaller than the true one, so on the safe side
    return math.exp(float(brentq(excess, _LEAST_LOG_RATE, -1e-12, xtol=1e-15, rtol=1e-14)))


def check_distribution(mean: float, shape: float) -> tuple[float, float]:
    """Return legal parameters as floats, or raise."""
    mean, shape = number("mean", mean), number("shape", shape)
    if not 1 <= mean < math.inf:
        raise ValueError(
            f"mean must be finite and at least 1, got {mean}: it is the expected number of runs."
        )
    if not shape > -1:
        raise ValueError(
            f"shape must be above -1, got {shape}: 0 is logarithmic, 1 geometric, inf Poisson."
        )
    return mean, shape
