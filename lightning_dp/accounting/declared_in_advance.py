"""Accountants of searches: what one trial may spend was declared before the first one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lightning_dp._validate import between, normalise, not_negative, whole
from lightning_dp.accounting.base import (
    AbstractAccountant,
    Relation,
    check_delta,
)
from lightning_dp.accounting.events import History, sampled_gaussian
from lightning_dp.accounting.gdp import mu_of_budget
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.accounting.rdp import RenyiCurve, penalty
from lightning_dp.accounting.steps import CheckedHistory

# Closer together where they are small, as for large budgets.
_ORDERS = np.concatenate(
    [np.arange(11, 100) / 10, np.unique(np.round(np.geomspace(10, 4096, 120)))]
)


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

    @property
    def name(self) -> str:
        """The name in reports."""
        return "RDP of one order"

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return rho(a) and the penalty; 0 for nothing."""
        curve = self._curve(history, relation)
        left = curve.declared.left_of(check_delta(delta))
        if curve.is_empty:
            return 0.0
        return max(0.0, self._rho(curve) + self.penalty(left)) if left > 0 else math.inf

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        """Return ``e^((a - 1) (rho(a) - epsilon + log(1 - 1/a)) - log a)``; 0 for nothing."""
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
    penalties = np.log1p(-1 / _ORDERS) - (math.log(delta) + np.log(_ORDERS)) / (_ORDERS - 1)
    return float(_ORDERS[np.argmin(_ORDERS * mu**2 / 2 + penalties)])


@dataclass(frozen=True)
class EnvelopeAccountant(AbstractAccountant):
    """:class:`PLDAccountant` for at most so many steps, none of which costs more than a declared one.

    More noise than declared is a post-processing, and the cost grows with the rate and the number of
    steps, so whatever is inside the envelope costs no more than all of it, next to anything else. For
    what is not inside, ε is infinite: a budget affords no such step.

    Args:
        noise_multiplier: the least noise of a step, above 0.
        sample_rate: the largest rate, in (0, 1].
        steps: the largest number of steps.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> declared = EnvelopeAccountant(noise_multiplier=1.0, sample_rate=0.01, steps=100)
        >>> histories = [[(PoissonGaussian(1.0, q), n)] for q, n in ((0.01, 100), (0.01, 101), (0.02, 9))]
        >>> [round(declared.epsilon(each, 1e-5), 2) for each in histories]
        [0.72, inf, inf]
    """

    is_its_own_guard: ClassVar[bool] = True

    noise_multiplier: float = 1.0
    sample_rate: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        normalise(self, between("(0, inf)"), "noise_multiplier")
        normalise(self, between("(0, 1]"), "sample_rate")
        normalise(self, whole, "steps")

    @property
    def name(self) -> str:
        """The name in reports."""
        return "PLD inside a declared envelope"

    def history(self) -> History:
        """Return the costliest history that is inside."""
        return [(sampled_gaussian(self.noise_multiplier, self.sample_rate), self.steps)]

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return ε of a history that is inside, else infinity."""
        if not self._holds(history):
            return math.inf
        return PLDAccountant().epsilon(history, delta, relation)

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        """Return δ of a history that is inside, else 1."""
        if not self._holds(history):
            return 1.0
        return PLDAccountant().delta(history, epsilon, relation)

    def _holds(self, history: History) -> bool:
        checked = CheckedHistory.of(history)
        steps = checked.steps
        return (
            not checked.external
            and steps.total <= self.steps
            and bool(np.all(steps.noise_multipliers >= self.noise_multiplier))
            and bool(np.all(steps.sample_rates <= self.sample_rate))
        )
