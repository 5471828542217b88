"""Renyi differential privacy in one pass over the steps: quick, additive, looser than the PLD."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_dp.accounting.base import (
    AbstractAccountant,
    FloatArray,
    History,
    Relation,
    Steps,
    check_delta,
    check_entry,
    check_epsilon,
    check_relation,
    merge,
)
from lightning_dp.accounting.number_of_runs import success_rate
from lightning_dp.accounting.renyi import total_divergence
from lightning_dp.accounting.repeat_and_select import RepeatAndSelect

_FRACTIONAL = np.array([1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.65, 1.8])
_INTEGERS = np.unique(np.concatenate((np.arange(2.0, 33.0), np.round(np.geomspace(34, 512, 22)))))
_LARGEST_ORDER = 2.0**16
_Divergence = Callable[[FloatArray], FloatArray]
_Converter = Callable[[FloatArray, FloatArray], FloatArray]


@dataclass(frozen=True)
class StreamingRDPAccountant(AbstractAccountant):
    """Sums of Renyi divergences over a table of orders, converted to (epsilon, delta) at the end.

    ``epsilon = min_a sum_t rho_t(a) + log(1 - 1/a) - (log delta + log a) / (a - 1)`` (Canonne, Kamath
    and Steinke, arXiv 2004.00010v4, Proposition 12), ``rho_t(a)`` from ``renyi_divergence``, or for
    :class:`RepeatAndSelect` from Theorems 2 and 6 of Papernot and Steinke. The
    orders are 1.02 to 512, doubled up to 65,536 as long as the last one is the best. Six to twelve
    per cent above :class:`PLDAccountant` for usual runs; its use is that it is additive: the guard
    for adaptive noise fixes one order and sums.

    Assumes Poisson sampling, independent for every event. Raises ``ValueError`` for illegal
    arguments.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> round(StreamingRDPAccountant().epsilon([(PoissonGaussian(1.0, 0.01), 1000)], 1e-5), 2)
        2.11
    """

    @property
    def name(self) -> str:
        """What a report prints."""
        return "streaming RDP"

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return the best epsilon over the orders; see the class."""
        log_delta = math.log(check_delta(delta))
        check_relation(relation)
        curve = RenyiCurve.of(history, relation)
        if curve.is_empty:
            return 0.0
        if curve.has_noiseless:
            return math.inf

        def convert(orders: FloatArray, rho: FloatArray) -> FloatArray:
            return np.asarray(
                rho + np.log1p(-1 / orders) - (log_delta + np.log(orders)) / (orders - 1)
            )

        return max(_least(curve.at, convert), 0.0)

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        """Return the best delta over the orders; see the class."""
        epsilon = check_epsilon(epsilon)
        check_relation(relation)
        curve = RenyiCurve.of(history, relation)
        if curve.is_empty:
            return 0.0
        if curve.has_noiseless:
            return 1.0
        return math.exp(min(_least(curve.at, _log_delta_at(epsilon)), 0.0))


@dataclass(frozen=True)
class RenyiCurve:
    """rho(a) of a checked history: Gaussians, and searches with the curve of one run of each."""

    steps: Steps
    relation: Relation
    searches: tuple[tuple[RepeatAndSelect, RenyiCurve, int], ...]

    @classmethod
    def of(cls, history: History, relation: Relation) -> RenyiCurve:
        entries = [check_entry(entry) for entry in history]
        gaussians = [(e, n) for e, n in entries if not isinstance(e, RepeatAndSelect)]
        searches = [
            (event, cls.of(event.runs, relation), count)
            for event, count in entries
            if isinstance(event, RepeatAndSelect) and count
        ]
        # The best of runs that ask nothing of the data asks nothing either.
        asking = tuple(search for search in searches if not search[1].is_empty)
        return cls(merge(gaussians), relation, asking)

    @property
    def is_empty(self) -> bool:
        return self.steps.counts.size == 0 and not self.searches

    @property
    def has_noiseless(self) -> bool:
        return self.steps.has_noiseless or any(run.has_noiseless for _, run, _ in self.searches)

    def at(self, orders: FloatArray) -> FloatArray:
        """rho at increasing orders above 1."""
        total = total_divergence(self.steps, self.relation, orders)
        for event, run, count in self.searches:
            bound = _poisson_search if event.shape == math.inf else _negative_binomial_search
            # Renyi divergences grow with the order, so a bound holds for smaller orders, too.
            values = bound(event, run, orders)
            total = total + count * np.minimum.accumulate(values[::-1])[::-1]
        return total


def _negative_binomial_search(
    event: RepeatAndSelect, run: RenyiCurve, orders: FloatArray
) -> FloatArray:
    """Theorem 2 of arXiv 2110.03620v2: with rho(a) of one run, gamma and eta of K, any b >= 1,

    ``rho(a) + log(E K) / (a - 1) + (1 + eta) ((1 - 1/b) rho(b) + log(1/gamma) / b)``.
    """
    log_rate = -math.log(success_rate(event.mean, event.shape))

    def convert(b: FloatArray, rho: FloatArray) -> FloatArray:
        return np.asarray((1 - 1 / b) * rho + log_rate / b)

    # log_rate is the value at b = 1.
    extra = (1 + event.shape) * min(log_rate, _least(run.at, convert) if log_rate else 0.0)
    return np.asarray(run.at(orders) + math.log(event.mean) / (orders - 1) + extra)


def _poisson_search(event: RepeatAndSelect, run: RenyiCurve, orders: FloatArray) -> FloatArray:
    """Theorem 6 of arXiv 2110.03620v2, with the case K = 0 written out.

    With rho(a) of one run, delta(a) its delta at ``epsilon = log(1 + 1 / (a - 1))`` and mean m:
    ``log(e^-m + m e^((a - 1) (rho(a) + m delta(a)))) / (a - 1)``. The theorem leaves out e^-m, the
    part of the outputs with K = 0, which are the same for both data sets.
    """
    known: dict[float, float] = {}

    def at(asked: FloatArray) -> FloatArray:
        missing = np.array([a for a in asked if a not in known])
        if missing.size:
            known.update(zip(missing.tolist(), run.at(missing).tolist(), strict=True))
        return np.array([known[a] for a in asked])

    rho = at(orders)
    deltas = [
        math.exp(min(_least(at, _log_delta_at(math.log1p(1 / (a - 1)))), 0.0)) for a in orders
    ]
    exponent = math.log(event.mean) + (orders - 1) * (rho + event.mean * np.array(deltas))
    return np.asarray(np.logaddexp(-event.mean, exponent) / (orders - 1))


def _log_delta_at(epsilon: float) -> _Converter:
    """Renyi divergences to log delta (arXiv 2004.00010v4, Proposition 12)."""

    def convert(orders: FloatArray, rho: FloatArray) -> FloatArray:
        return np.asarray((orders - 1) * (rho - epsilon + np.log1p(-1 / orders)) - np.log(orders))

    return convert


def _least(divergence: _Divergence, convert: _Converter) -> float:
    """The least converted value over the orders, extended while the last is the best."""
    orders = np.concatenate((_FRACTIONAL, _INTEGERS))
    best = math.inf
    while True:
        values = convert(orders, divergence(orders))
        at = int(np.argmin(values))
        best = min(best, float(values[at]))
        if at < orders.size - 1 or orders[-1] >= _LARGEST_ORDER:
            return best
        orders = orders[-1] * np.array([1.41, 2.0]).round(2)
        orders = np.round(orders)
