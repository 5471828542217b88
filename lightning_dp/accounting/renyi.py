"""Renyi divergences of subsampled Gaussian releases."""

import math

import numpy as np
from scipy.special import gammaln

from lightning_dp.accounting.base import FloatArray, Relation, Steps, check_relation
from lightning_dp.accounting.pmf import discretise, support
from lightning_dp.accounting.tilting import MomentTable

__all__ = ["renyi_divergence", "total_divergence"]

_CHUNK = 2_000_000
_LOG_TAIL = -200.0


def renyi_divergence(
    noise_multiplier: float, sample_rate: float, order: float, relation: Relation = "add_remove"
) -> float:
    """``rho(a)``: the Renyi divergence of order ``a`` of one subsampled Gaussian release.

    add/remove: ``rho(a) = log E_(x ~ N(0, z^2)) [((1-q) + q e^((2x - 1) / (2 z^2)))^a] / (a - 1)``
    (Mironov, Talwar and Zhang, arXiv 1908.10530v1, section 3: this direction is the larger one). For
    integer orders the binomial sum of equation (6) there, else the trapezoidal rule.
    replace-one: ``rho(a) = 2 a / z^2`` for q = 1, else an upper bound from the discretised profile.

    Args:
        noise_multiplier: ``z > 0``.
        sample_rate: ``q`` in (0, 1].
        order: ``a > 1``.
        relation: the neighbouring relation.

    Raises:
        ValueError: if an argument is out of range or NaN.

    Example:
        >>> renyi_divergence(noise_multiplier=2.0, sample_rate=1.0, order=8.0)
        1.0
    """
    if not order > 1:
        raise ValueError(f"order must be above 1, got {order}.")
    if not 0 < noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be finite and above 0, got {noise_multiplier}.")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}.")
    check_relation(relation)
    one = np.ones(1)
    steps = Steps(noise_multiplier * one, sample_rate * one, one)
    return float(total_divergence(steps, relation, np.array([order]))[0])


def total_divergence(steps: Steps, relation: Relation, orders: FloatArray) -> FloatArray:
    """``sum_t rho_t`` at each order."""
    z, q, counts = steps.noise_multipliers, steps.sample_rates, steps.counts
    full = q == 1.0
    factor = check_relation(relation)
    slope = 0.5 * factor**2 * float(np.sum(counts[full] / z[full] ** 2))
    total = slope * orders
    if full.all():
        return total
    z, q, counts = z[~full], q[~full], counts[~full]
    for i, order in enumerate(orders):
        if relation == "replace_one":
            logs = np.array(
                [_log_moment_replace_one(*pair, order) for pair in zip(z, q, strict=True)]
            )
        elif order == round(order):
            logs = _log_moment_integer(z, q, int(order))
        else:
            logs = _log_moment_fractional(z, q, float(order))
        total[i] += float(counts @ logs) / (order - 1)
    return total


def _log_moment_integer(z: FloatArray, q: FloatArray, order: int) -> FloatArray:
    """``log E[...]``, the binomial sum, for every (z, q)."""
    k = np.arange(order + 1.0)
    log_binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    result = np.empty(z.size)
    chunk = max(1, _CHUNK // k.size)
    for first in range(0, z.size, chunk):
        part = slice(first, first + chunk)
        rate, noise = q[part, None], z[part, None]
        terms = log_binomial + (order - k) * np.log1p(-rate) + k * np.log(rate)
        # E[...] - 1: as the binomial weights sum to 1, sum_k weight (e^(k(k-1)/2z^2) - 1).
        exponent = k * (k - 1) / (2 * noise**2)
        terms = terms[:, 2:] + exponent[:, 2:] + np.log(-np.expm1(-exponent[:, 2:]))
        top = terms.max(axis=1, keepdims=True)
        result[part] = np.logaddexp(0, top[:, 0] + np.log(np.exp(terms - top).sum(axis=1)))
    return result


def _log_moment_fractional(z: FloatArray, q: FloatArray, order: float) -> FloatArray:
    """``log E[...]`` by the trapezoidal rule, whose error falls exponentially with the spacing."""
    low, high = -12.0, 12.0 + order / float(z.min())
    spacing = min(0.1, 0.15 * float(z.min()))
    x = np.arange(low, high + spacing, spacing)
    result = np.empty(z.size)
    chunk = max(1, _CHUNK // x.size)
    for first in range(0, z.size, chunk):
        rate, noise = q[first : first + chunk, None], z[first : first + chunk, None]
        ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + x / noise - 0.5 / noise**2)
        exponent = order * ratio - 0.5 * x**2
        top = exponent.max(axis=1, keepdims=True)
        sums = np.exp(exponent - top).sum(axis=1) * spacing / math.sqrt(2 * math.pi)
        result[first : first + chunk] = np.maximum(top[:, 0] + np.log(sums), 0.0) + 1e-15
    return result


def _log_moment_replace_one(z: float, q: float, order: float) -> float:
    """An upper bound from the connected dots; at most e^-200 of the mass is left out."""
    h = sum(support(z, q, _LOG_TAIL, "replace_one")) / 16384
    pmf = discretise(z, q, h, _LOG_TAIL, "replace_one")
    return max(float(MomentTable(h, np.array([order - 1.0])).of(pmf)[0]), 0.0)
