"""Rényi divergence of subsampled Gaussian releases."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import bdtr, bdtrc, expit, gammaln

from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.accounting.steps import FloatArray, Steps

_CHUNK = 2_000_000  # entries of an array
_MOST_POINTS = 2**19  # of a quadrature; where it needs more, the sampling is not counted
_EXACT = 256  # so few distinct steps are summed one by one
_MANY = 512  # terms of a binomial sum, from which on most of them may be next to nothing ...
_NEXT_TO_NOTHING = math.log(1e-10)  # ... of all
_SMALL = 1e-5  # exponent, above its bound by half of this: orders are many where noise is large
_SPACING = 0.02  # relative distance of the noise multipliers between which is interpolated


def total_divergence(steps: Steps, relation: Relation, orders: FloatArray) -> FloatArray:
    """``sum_t rho_t(a)`` at each order a > 1, within about 1e-4 above it for many distinct steps.

    add/remove: ``rho(a) = log E_(x ~ N(0, z^2)) [((1-q) + q e^((2x - 1) / (2 z^2)))^a] / (a - 1)``
    (Mironov, Talwar and Zhang, arXiv 1908.10530v1, section 3: this direction is the larger one). For
    integer orders the binomial sum of equation (6) there, else the trapezoidal rule.
    replace-one: ``rho(a) = 2 a / z^2`` for q = 1, else by the trapezoidal rule.

    e^((a - 1) rho) is an f-divergence, so a step inside a cell of the module ``_grouping`` has at most
    the mean of its corners'.

    Example:
        >>> from lightning_dp.accounting import Gaussian
        >>> from lightning_dp.accounting.steps import merge
        >>> float(total_divergence(merge([(Gaussian(2.0), 1)]), "add_remove", np.array([8.0]))[0])
        1.0
    """
    full = steps.sample_rates == 1.0
    factor = check_relation(relation)
    squares = steps.counts[full] * (1 / steps.noise_multipliers[full]) ** 2
    total = 0.5 * factor**2 * float(np.sum(squares)) * orders
    if full.all():
        return total
    noise = np.minimum(steps.noise_multipliers[~full], 1e100)  # so that its square is a number
    sampled = Steps(noise, steps.sample_rates[~full], steps.counts[~full])
    from lightning_dp.accounting._composition import mixture_bound
    from lightning_dp.accounting._grouping import as_mixture

    mixture = as_mixture(sampled, relation, _SPACING, _EXACT)
    z, q = np.array(mixture.nodes, dtype=float).T
    for i, order in enumerate(orders):
        logs = _log_moments(z, q, float(order), relation)
        total[i] += float(mixture_bound(mixture, logs[:, None])[0]) / (order - 1)
    return total


def _log_moments(z: FloatArray, q: FloatArray, order: float, relation: Relation) -> FloatArray:
    """``(a - 1) rho(a)`` of every (z, q), q < 1; a node of rate 1 is read as the Gaussian it is."""
    result = 0.5 * check_relation(relation) ** 2 * order * (order - 1) * (1 / z) ** 2
    sampled = q < 1
    if relation != "replace_one" and order == round(order):
        # As e^x - 1 grows faster than x, a sum of terms up to x_a is at most q^2 (e^x_a - 1).
        last = order * (order - 1) / 2 * (1 / z) ** 2
        small = sampled & (last < _SMALL)
        result[small] = np.log1p(q[small] ** 2 * np.expm1(last[small]))
        sampled &= ~small
        if sampled.any():
            result[sampled] = _log_moment_integer(z[sampled], q[sampled], int(order))
        return result
    sampled &= _reach(z, order, relation) <= _MOST_POINTS * _spacing(z)
    if sampled.any():
        result[sampled] = _log_moment_by_quadrature(z[sampled], q[sampled], order, relation)
    return result


def _log_moment_integer(z: FloatArray, q: FloatArray, order: int) -> FloatArray:
    """``log E[...]``, the binomial sum, for every (z, q)."""
    result = np.empty(z.size)
    chunk = max(1, _CHUNK // (order + 1))
    for first in range(0, z.size, chunk):
        part = slice(first, first + chunk)
        rate, noise = q[part, None], z[part, None]
        total: FloatArray | None = None
        if order >= _MANY:
            total = _few_terms(rate, noise, order)
        if total is None:
            total = _log_terms(rate, noise, order, np.arange(2.0, order + 1))
        result[part] = np.logaddexp(0, total)
    return result


def _log_terms(q: FloatArray, z: FloatArray, order: int, k: FloatArray) -> FloatArray:
    """Return the logarithm of the sum of some terms, those of k, of ``E[...] - 1``."""
    log_binomial = gammaln(order + 1) - gammaln(k + 1) - gammaln(order - k + 1)
    terms = log_binomial + (order - k) * np.log1p(-q) + k * np.log(q)
    # As the binomial weights sum to 1, it is sum_k weight (e^(k(k-1)/2z^2) - 1).
    exponent = k * (k - 1) / (2 * z**2)
    terms = terms + exponent + np.log(-np.expm1(-exponent))
    top = terms.max(axis=1, keepdims=True)
    return np.asarray(top[:, 0] + np.log(np.exp(terms - top).sum(axis=1)))


def _few_terms(q: FloatArray, z: FloatArray, order: int) -> FloatArray | None:
    """Return a bound of ``log(E[...] - 1)`` by the terms around the mean; None if others matter.

    Of large orders they do where noise is small only. As ``k <= a``, the terms above K are at most those
    of ``E[e^(k t)]``, ``t = (a - 1) / 2z^2``: ``(1 - q + q e^t)^a`` times the tail of another binomial
    distribution. Those below K are at most a tail times their largest factor.
    """
    t = (order - 1) / (2 * z**2)
    tilted = expit(np.log(q) - np.log1p(-q) + t)
    low = max(2, math.floor((order * q - _width(order, q)).min()))
    high = min(order, math.ceil((order * tilted + _width(order, tilted)).max()))
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.log(np.expm1((low - 1) * (low - 2) / (2 * z**2)))
        below = factor + np.log(bdtr(low - 1, order, q))
        log_mean = order * np.logaddexp(np.log1p(-q), np.log(q) + t)
        above = log_mean + np.log(bdtrc(high, order, tilted))
    rest = np.logaddexp(below, above)[:, 0] + 1e-6  # for the rounding of the tails
    total = _log_terms(q, z, order, np.arange(float(low), high + 1.0))
    return np.logaddexp(total, rest) if np.all(rest < total + _NEXT_TO_NOTHING) else None


def _width(order: int, p: FloatArray) -> FloatArray:
    """Return how far from its mean a binomial number may be, but next to never is."""
    return np.asarray(10 * np.sqrt(order * p * (1 - p)) + 60)


def _reach(z: FloatArray, order: float, relation: Relation) -> FloatArray:
    """Width of the integrand: its peak is not beyond the order times the sensitivity."""
    return 24.0 + order * check_relation(relation) / z


def _spacing(z: FloatArray) -> FloatArray:
    return np.minimum(0.1, 0.15 * z)


def _log_moment_by_quadrature(
    z: FloatArray, q: FloatArray, order: float, relation: Relation
) -> FloatArray:
    """``log E[...]`` by the trapezoidal rule, whose error falls exponentially with the spacing.

    In units of z, and for replace-one with the density of the old record's batch in the place of
    N(0): ``E[(P / Q)^a]``, P and Q as in :func:`~lightning_dp.accounting._pmf.replacement_profile`.
    """
    least = z.min(keepdims=True)
    spacing = float(_spacing(least)[0])
    x = np.arange(-12.0, float(_reach(least, order, relation)[0]) - 12.0 + spacing, spacing)
    result = np.empty(z.size)
    chunk = max(1, _CHUNK // x.size)
    for first in range(0, z.size, chunk):
        rate, noise = q[first : first + chunk, None], z[first : first + chunk, None]
        with_record = np.logaddexp(np.log1p(-rate), np.log(rate) + x / noise - 0.5 / noise**2)
        exponent = order * with_record - 0.5 * x**2
        if relation == "replace_one":
            other = np.logaddexp(np.log1p(-rate), np.log(rate) - x / noise - 0.5 / noise**2)
            exponent -= (order - 1) * other
        top = exponent.max(axis=1, keepdims=True)
        sums = np.exp(exponent - top).sum(axis=1) * spacing / math.sqrt(2 * math.pi)
        result[first : first + chunk] = np.maximum(top[:, 0] + np.log(sums), 0.0) + 1e-15
    return result
