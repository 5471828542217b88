"""The accountants of Opacus behind our interface: what benchmarks and tests compare with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from scipy.optimize import brentq

from lightning_dp._validate import not_negative
from lightning_dp.accounting.base import (
    AbstractAccountant,
    Relation,
    check_delta,
    check_relation,
)
from lightning_dp.accounting.events import History
from lightning_dp.accounting.steps import Steps, merge


@dataclass(frozen=True)
class OpacusRDPAccountant(AbstractAccountant):
    """``opacus.accountants.RDPAccountant`` with its default orders (1.1 to 63).

    Limits: loose when epsilon is small (the orders stop at 63) and 6 to 12 per cent above
    ``PLDAccountant`` otherwise; replace-one only for full batches.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> round(OpacusRDPAccountant().epsilon([(PoissonGaussian(1.0, 0.01), 1000)], 1e-5), 2)
        2.1
    """

    @property
    def name(self) -> str:
        """The name in reports."""
        return "Opacus RDP"

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return Opacus' epsilon; ``ValueError`` for subsampled steps under replace-one."""
        check_delta(delta)
        steps = _supported(merge(history), relation, self.name)
        if steps is None:
            return 0.0
        if steps.has_noiseless:
            return math.inf
        from opacus.accountants import RDPAccountant

        return _opacus_epsilon(RDPAccountant(), steps, relation, delta)

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        """Return the least delta at which Opacus' epsilon is at most ``epsilon``, by root finding."""
        return _delta_by_search(self, history, epsilon, relation)


@dataclass(frozen=True)
class OpacusPRVAccountant(AbstractAccountant):
    """``opacus.accountants.PRVAccountant``: numerical, for few distinct steps.

    Its upper end is returned. Memory grows with the number of distinct ``(z, q)`` (2.4 GB for 500);
    replace-one only for full batches.

    Args:
        eps_error: additive error of epsilon that Opacus may make.
        delta_error: additive error of delta, ``None`` for delta / 1000.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> round(OpacusPRVAccountant().epsilon([(PoissonGaussian(1.0, 0.01), 1000)], 1e-5), 1)
        1.8
    """

    eps_error: float = 0.01
    delta_error: float | None = None

    @property
    def name(self) -> str:
        """The name in reports."""
        return "Opacus PRV"

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return Opacus' epsilon; ``ValueError`` for subsampled steps under replace-one."""
        check_delta(delta)
        steps = _supported(merge(history), relation, self.name)
        if steps is None:
            return 0.0
        if steps.has_noiseless:
            return math.inf
        from opacus.accountants import PRVAccountant

        accountant = PRVAccountant()
        accountant.history = _opacus_history(steps, relation)
        return max(
            float(
                accountant.get_epsilon(
                    delta, eps_error=self.eps_error, delta_error=self.delta_error
                )
            ),
            0.0,
        )

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        """Return the least delta at which Opacus' epsilon is at most ``epsilon``, by root finding."""
        return _delta_by_search(self, history, epsilon, relation)


def _supported(steps: Steps, relation: Relation, name: str) -> Steps | None:
    """Return the steps, ``None`` if there are none, or raise for what Opacus cannot do."""
    check_relation(relation)
    if relation == "replace_one" and bool((steps.sample_rates < 1).any()):
        raise ValueError(
            f"{name} has no bound for replace-one with sample_rate < 1; use PLDAccountant()."
        )
    return steps if steps.counts.size else None


def _opacus_history(steps: Steps, relation: Relation) -> list[tuple[float, float, int]]:
    """The steps as Opacus keeps them."""
    z = steps.noise_multipliers / check_relation(relation)
    triples = zip(z.tolist(), steps.sample_rates.tolist(), steps.counts.tolist(), strict=True)
    return [(noise, rate, int(count)) for noise, rate, count in triples]


def _opacus_epsilon(accountant: Any, steps: Steps, relation: Relation, delta: float) -> float:
    """Ask an Opacus accountant."""
    accountant.history = _opacus_history(steps, relation)
    return max(float(accountant.get_epsilon(delta)), 0.0)


def _delta_by_search(
    accountant: AbstractAccountant, history: History, epsilon: float, relation: Relation
) -> float:
    """The least delta in [1e-12, 0.9] whose epsilon is at most ``epsilon``, rounded up, else 1."""
    epsilon = not_negative("epsilon", epsilon)
    check_relation(relation)
    steps = merge(history)
    if steps.counts.size == 0:
        return 0.0
    if steps.has_noiseless:
        return 1.0
    low, high = math.log(1e-12), math.log(0.9)

    def excess(log_delta: float) -> float:
        return accountant.epsilon(history, math.exp(log_delta), relation) - epsilon

    if excess(high) > 0:
        return 1.0
    if excess(low) <= 0:
        return math.exp(low)
    root = float(brentq(excess, low, high, xtol=1e-6, rtol=1e-6))
    while root < high and excess(root) > 0:
        root += 1e-6
    return min(math.exp(root), 1.0)
