"""Rényi differential privacy in one pass over the steps: quick, additive, looser than the PLD."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import bdtr, bdtrc, expit, gammaln

from lightning_dp._validate import between, normalise, not_negative
from lightning_dp.accounting._pmf import AllocationNode, SampledNode
from lightning_dp.accounting.base import (
    AbstractAccountant,
    Relation,
    check_delta,
    check_relation,
)
from lightning_dp.accounting.events import History
from lightning_dp.accounting.external import NOTHING, Declared
from lightning_dp.accounting.gdp import mu_of_budget
from lightning_dp.accounting.steps import CheckedHistory, FloatArray, Steps

_LARGEST_ORDER = 2.0**16
_RATIO = 1.2  # of a - 1 from an order to the next; what is between is looked at near the best one
_ALWAYS = 64.0  # orders up to here are always looked at
_AT_ONCE = 8  # orders
# Closer together where they are small, as for large budgets.
_BUDGET_ORDERS = np.concatenate(
    [np.arange(11, 100) / 10, np.unique(np.round(np.geomspace(10, 4096, 120)))]
)


@dataclass(frozen=True)
class StreamingRDPAccountant(AbstractAccountant):
    """Sums of Renyi divergences over a table of orders, converted to (epsilon, delta) at the end.

    ``epsilon = min_a sum_t rho_t(a) + log(1 - 1/a) - (log delta + log a) / (a - 1)`` (Canonne, Kamath
    and Steinke, arXiv 2004.00010v4, Proposition 12), ``rho_t(a)`` from ``total_divergence``, for
    declared guarantees from :class:`~lightning_dp.accounting.external.Declared`. The orders are 1.02
    to 65,536: a - 1 grows by a fifth, by a fiftieth near the best. Six to twelve per cent above
    :class:`PLDAccountant` for usual runs; its use is that it is additive: the guard for adaptive
    noise fixes one order and sums.

    Assumes Poisson sampling, independent for every event. Raises ``ValueError`` for illegal
    arguments.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> round(StreamingRDPAccountant().epsilon([(PoissonGaussian(1.0, 0.01), 1000)], 1e-5), 2)
        2.1
    """

    name = "streaming RDP"

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        return RenyiCurve.of(CheckedHistory.of(history), relation).epsilon(delta)

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        return RenyiCurve.of(CheckedHistory.of(history), relation).delta(epsilon)


@dataclass(frozen=True)
class RenyiCurve:
    """rho(a) of merged steps and declared guarantees, and the best (epsilon, delta) over the orders.

    The conversion is that of arXiv 2004.00010v4, Proposition 12. rho counts all but the δ of
    declared guarantees.
    """

    steps: Steps
    relation: Relation
    declared: Declared = NOTHING

    @classmethod
    def of(cls, history: CheckedHistory, relation: Relation) -> RenyiCurve:
        check_relation(relation)
        return cls(history.steps, relation, Declared.of(history, relation))

    @property
    def is_empty(self) -> bool:
        return self.steps.counts.size == 0 and self.declared.is_empty

    def at(self, orders: FloatArray) -> FloatArray:
        """rho at increasing orders above 1."""
        total = total_divergence(self.steps, self.relation, orders)
        return total + declared_divergence(self.declared, self.relation, orders)

    def epsilon(self, delta: float) -> float:
        """The least epsilon at delta."""
        check_delta(delta)
        return 0.0 if self.is_empty else max(self.best(delta)[0], 0.0)

    def best(self, delta: float) -> tuple[float, float]:
        """The least epsilon at delta over the orders, which may be below 0, and its order."""
        left = self.declared.left_of(check_delta(delta))
        if self.steps.has_noiseless or not left > 0:
            return math.inf, 2.0
        log_delta = math.log(left)

        def epsilon(orders: FloatArray) -> FloatArray:
            share = (log_delta + np.log(orders)) / (orders - 1)
            return np.asarray(self.at(orders) + np.log1p(-1 / orders) - share)

        return _least(epsilon)

    def delta(self, epsilon: float) -> float:
        """The least delta at epsilon."""
        epsilon = not_negative("epsilon", epsilon)
        if self.is_empty:
            return 0.0
        if self.steps.has_noiseless:
            return 1.0

        def log_delta(orders: FloatArray) -> FloatArray:
            exponent = (orders - 1) * (self.at(orders) - epsilon + np.log1p(-1 / orders))
            return np.asarray(exponent - np.log(orders))

        return self.declared.with_all(math.exp(min(_least(log_delta)[0], 0.0)))


def penalty(order: float, delta: float) -> float:
    """``epsilon - rho(a)`` at delta, of one order a."""
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def _least(value: Callable[[FloatArray], FloatArray]) -> tuple[float, float]:
    """The least value over the orders, and its order.

    Orders grow until the best one is behind; then its neighbours are looked at more closely. Any
    order gives a bound, so the shape of the curve decides only how tight it is.
    """
    orders, values = np.zeros(0), np.zeros(0)
    while orders.size < _TABLE.size:
        asked = _TABLE[orders.size : orders.size + _AT_ONCE]
        orders = np.append(orders, asked)
        values = np.append(values, value(asked))
        is_behind = int(np.argmin(values)) < orders.size - _AT_ONCE // 2
        if is_behind and orders[-1] >= _ALWAYS:
            break
    best = int(np.argmin(values))
    ends = orders[max(best - 1, 0)], orders[min(best + 1, orders.size - 1)]
    between = _rounded(1 + np.geomspace(ends[0] - 1, ends[1] - 1, 2 * _AT_ONCE + 1))
    found = value(between)
    if not found.min() < values[best]:
        return float(values[best]), float(orders[best])
    closest = int(np.argmin(found))
    return float(found[closest]), float(between[closest])


def _rounded(orders: FloatArray) -> FloatArray:
    """Above 10 whole numbers, whose divergence is a finite sum."""
    return np.unique(np.where(orders > 10, np.round(orders), orders))


_TABLE = _rounded(1 + 0.02 * _RATIO ** np.arange(math.log(_LARGEST_ORDER / 0.02, _RATIO)))


# -- one order, fixed in advance ---------------------------------------------------------------


@dataclass(frozen=True)
class OneOrderAccountant(AbstractAccountant):
    """Rényi accounting at one order a, fixed before anything runs, so that costs add up.

    ``epsilon = rho(a) + penalty``, ``penalty = log(1 - 1/a) - (log delta + log a) / (a - 1)`` (Canonne,
    Kamath and Steinke, arXiv 2004.00010v4, Proposition 12). rho of trainings that run one after
    another, or in turns, add up, also if each was chosen by the results of those before: what keeps
    ``sum rho`` below a bound that was fixed in advance is (ε, δ)-DP as a whole (Feldman and Zrnic,
    arXiv 2008.11193, for every such filter of one order).

    Args:
        order: a > 1.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> accountant, step = OneOrderAccountant(7.0), PoissonGaussian(2.0, 0.01)
        >>> one, two, four = (accountant.epsilon([(step, n)], 1e-5) for n in (500, 1000, 2000))
        >>> round((four - two) / (two - one), 9)
        2.0
    """

    is_its_own_guard: ClassVar[bool] = True

    order: float = 8.0

    def __post_init__(self) -> None:
        normalise(self, between("(1, 1e6]"), "order")

    name = "RDP of one order"

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        curve = self._curve(history, relation)
        left = curve.declared.left_of(check_delta(delta))
        if curve.is_empty:
            return 0.0
        return max(0.0, self._rho(curve) + self.penalty(left)) if left > 0 else math.inf

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        curve, a = self._curve(history, relation), self.order
        epsilon = not_negative("epsilon", epsilon)
        if curve.is_empty:
            return 0.0
        exponent = (a - 1) * (self._rho(curve) - epsilon + math.log1p(-1 / a)) - math.log(a)
        return curve.declared.with_all(math.exp(min(exponent, 0.0)))

    def divergence(self, history: History, relation: Relation) -> float:
        """Return rho(a) of a history."""
        return self._rho(self._curve(history, relation))

    def penalty(self, delta: float) -> float:
        """Return the difference of epsilon at delta and rho(a)."""
        return penalty(self.order, delta)

    @staticmethod
    def _curve(history: History, relation: Relation) -> RenyiCurve:
        return RenyiCurve.of(CheckedHistory.of(history), relation)

    def _rho(self, curve: RenyiCurve) -> float:
        if curve.is_empty:
            return 0.0
        if curve.steps.has_noiseless:
            return math.inf
        return float(curve.at(np.array([self.order]))[0])


def order_of_budget(epsilon: float, delta: float) -> float:
    """Return the best order for one Gaussian release that takes all of the budget.

    Example:
        >>> order_of_budget(3.0, 1e-5), order_of_budget(0.5, 1e-5)
        (7.1, 29.0)
    """
    mu = mu_of_budget(epsilon, delta)
    penalties = np.log1p(-1 / _BUDGET_ORDERS) - (math.log(delta) + np.log(_BUDGET_ORDERS)) / (
        _BUDGET_ORDERS - 1
    )
    return float(_BUDGET_ORDERS[np.argmin(_BUDGET_ORDERS * mu**2 / 2 + penalties)])


# -- the divergence of subsampled Gaussians ------------------------------------------------------

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
    sampled = steps.at(np.flatnonzero(~full))
    from lightning_dp.accounting._composition import mixture_bound
    from lightning_dp.accounting._grouping import as_mixture

    mixture = as_mixture(sampled, relation, _SPACING, _EXACT)
    z, q = np.array(mixture.nodes, dtype=float).T
    for i, order in enumerate(orders):
        logs = _log_moments(z, q, float(order), relation)
        total[i] += float(mixture_bound(mixture, logs[:, None])[0]) / (order - 1)
    return total


def declared_divergence(declared: Declared, relation: Relation, orders: FloatArray) -> FloatArray:
    """Return the divergence of declared guarantees, without what is lost, at each order above 1."""
    total = declared.rho * orders
    for node, count in declared.sampled:
        total = total + count * _of_sampled(node, relation, orders)
    for epsilon, count in declared.pure:
        total = total + count * _of_a_question(epsilon, orders)
    return np.asarray(total)


def _of_sampled(node: SampledNode, relation: Relation, orders: FloatArray) -> FloatArray:
    """Of an allocated epoch, as if it were told which step uses whom; else of a mixture, also convex."""
    if isinstance(node, AllocationNode):
        return np.asarray(orders / (2 * node.noise_multiplier**2))
    one = np.ones(1)
    steps = [Steps(z * one, node.sample_rate * one, one) for z in (2 * node.half, node.half)]
    rare, often = ((orders - 1) * total_divergence(each, relation, orders) for each in steps[::-1])
    with np.errstate(divide="ignore"):
        mixed = np.logaddexp(np.log(node.chance) + rare, np.log1p(-node.chance) + often)
    return np.asarray(mixed / (orders - 1))


def _of_a_question(epsilon: float, orders: FloatArray) -> FloatArray:
    """``log(p^a (1-p)^(1-a) + (1-p)^a p^(1-a)) / (a - 1)``, ``p = e^ε / (1 + e^ε)``.

    That of randomized response, which every ε-DP release is a post-processing of.
    """
    x = (orders - 1) * epsilon
    log_p = -math.log1p(math.exp(-epsilon))
    large = np.logaddexp(x + log_p, -x + log_p - epsilon)
    # log(cosh x + (2 p - 1) sinh x), without cancellation for small x.
    y = np.minimum(x, 1.0)
    small = np.log1p(2 * np.sinh(y / 2) ** 2 + (2 * expit(epsilon) - 1) * np.sinh(y))
    return np.asarray(np.where(x < 1, small, large) / (orders - 1))


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
