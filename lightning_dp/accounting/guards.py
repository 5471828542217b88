"""The budget's guards: before each step, they decide whether it still fits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.accounting.events import AbstractEvent, History
from lightning_dp.accounting.external import Declared
from lightning_dp.accounting.gdp import gdp_epsilon, mu_of_budget
from lightning_dp.accounting.rdp import OneOrderAccountant, RenyiCurve
from lightning_dp.accounting.steps import NO_NOISE, CheckedHistory, Steps, joined, merge


class AbstractGuard(ABC):
    """Keeps a budget: :meth:`fits` before each step, :meth:`book` after each charge.

    The three kinds are all there may be. "Stop when the accountant's ε exceeds the target" is not
    one of them: with noise chosen at run time it is not valid for any tight accountant.
    """

    name: str
    description: str
    order: float | None = None
    """The Rényi order that it counts at, which no later guard of the ledger may change."""

    @abstractmethod
    def fits(self, next_event: Callable[[], AbstractEvent]) -> bool:
        """Return whether the next step may be made; ``next_event`` gives its event."""

    @abstractmethod
    def book(self, event: AbstractEvent) -> None:
        """Count an event that was charged."""

    def skip(self) -> None:  # noqa: B027 (most guards count events, not places in a plan)
        """Count a step of the plan that made no query, so nothing was charged."""

    def charged(self, planned: Callable[[], float], chosen: float) -> float:
        """Return the noise multiplier that a step is charged with: the one ``chosen`` at run time."""
        return chosen

    def replanned(self, affordable: float) -> AbstractGuard:
        """Return the guard to go on with, after a charge was spent on nothing.

        Args:
            affordable: how many more steps of the plan the budget affords now.
        """
        return self

    @property
    def remaining(self) -> float:
        """The number of further steps that are sure to fit; infinite if not found in advance."""
        return math.inf

    @abstractmethod
    def claim(self, delta: float) -> float | None:
        """Return ε at δ that holds whatever noise is chosen at run time; None if the plan is fixed."""


class FixedGuard(AbstractGuard):
    """A plan declared in advance, of which the budget affords a number of steps found in advance.

    At run time the noise is at least the plan's and the sampling rate at most the plan's (the plan
    is an envelope: more noise is post-processing), and the planned events are what is charged. ε is
    the accountant's of the plan so far.

    Args:
        limit: how many steps of the plan may be made; may be infinite. One that asks nothing
            counts too: what was charged is then a part of what the budget affords.
    """

    name = "fixed"
    description = "fixed: the noise of every step was declared before the first one"

    def __init__(self, limit: float) -> None:
        self._remaining = limit

    @property
    def remaining(self) -> float:
        return self._remaining

    def fits(self, next_event: Callable[[], AbstractEvent]) -> bool:
        return self._remaining >= 1

    def book(self, event: AbstractEvent) -> None:
        self._remaining -= 1

    def skip(self) -> None:
        self._remaining -= 1

    def charged(self, planned: Callable[[], float], chosen: float) -> float:
        return planned()  # an envelope: the noise is never less

    def replanned(self, affordable: float) -> AbstractGuard:
        return FixedGuard(affordable)

    def claim(self, delta: float) -> float | None:
        return None


class GDPGuard(AbstractGuard):
    """Full batches: Σ Δ²/z_t² never exceeds the budget μ*², Δ = 1 (add/remove) or 2 (replace-one).

    The composition of Gaussian mechanisms with any noise, also noise chosen from what was released
    before, that keeps this sum below μ*² is μ*-GDP: no loss against a plan fixed in advance. The
    claim is ε(μ*, δ).

    Args:
        epsilon, delta: the budget.
        relation: the neighbouring relation.
        spent: what ran before, full batches only; anything else is refused.
    """

    name = "gdp"
    description = (
        "gdp: full batches, the sum of 1/z² is kept below the budget's; exact for any noise"
    )

    def __init__(self, epsilon: float, delta: float, relation: Relation, spent: History) -> None:
        self._factor = check_relation(relation)
        self.mu = mu_of_budget(epsilon, delta)
        self._spent = math.fsum(self._cost(event) * count for event, count in spent)

    def _cost(self, event: AbstractEvent) -> float:
        noise_multiplier, sample_rate = event.pair
        if sample_rate != 1:
            raise ValueError(f"The gdp guard counts full batches only, got {event}.")
        return math.inf if noise_multiplier < NO_NOISE else (self._factor / noise_multiplier) ** 2

    def fits(self, next_event: Callable[[], AbstractEvent]) -> bool:
        return self._spent + self._cost(next_event()) <= self.mu**2

    def book(self, event: AbstractEvent) -> None:
        self._spent += self._cost(event)

    def claim(self, delta: float) -> float | None:
        return gdp_epsilon(self.mu, delta)


class RDPGuard(AbstractGuard):
    """Noise chosen at run time under Poisson sampling: one Rényi order, fixed before the start.

    Refuses the step if Σ ρ_t(α*) + ρ_next(α*) > B, with B = ε - log(1 - 1/α*) + (log δ + log α*)/(α* - 1)
    (Canonne, Kamath and Steinke, arXiv:2004.00010v4, Proposition 12). α* is the optimum of the first
    plan: one that a later run chose could follow from what was released.
    δ is what declared guarantees leave of it.
    Costs 6 to 7.5 % more noise than a plan fixed in advance.

    Args:
        epsilon, delta: the budget.
        relation: the neighbouring relation.
        spent: what ran before.
        plan: what is expected to run and fits into the budget, all of it: for choosing the order.
        order: that of an earlier guard over the same ledger; None if this is the first one.
    """

    name = "rdp"

    def __init__(
        self,
        epsilon: float,
        delta: float,
        relation: Relation,
        spent: History,
        plan: History | Steps,
        order: float | None = None,
    ) -> None:
        self._relation = relation
        before = CheckedHistory.of(spent)
        self._declared = Declared.of(before, relation)
        expected = joined(before.steps, plan if isinstance(plan, Steps) else merge(plan))
        best = RenyiCurve(expected, relation, self._declared).best
        self.order = best(delta)[1] if order is None else order
        self._of_order = OneOrderAccountant(self.order)
        self.description = f"rdp: noise chosen at run time, Rényi order {self.order:g} fixed before"
        self._budget = epsilon - self._penalty(delta)
        self._spent = self._of_order.divergence(before, relation)

    def _rho(self, event: AbstractEvent) -> float:
        return self._of_order.divergence([(event, 1)], self._relation)

    def fits(self, next_event: Callable[[], AbstractEvent]) -> bool:
        return self._spent + self._rho(next_event()) <= self._budget

    def book(self, event: AbstractEvent) -> None:
        self._spent += self._rho(event)

    def claim(self, delta: float) -> float | None:
        return max(0.0, self._budget + self._penalty(delta))

    def _penalty(self, delta: float) -> float:
        """ε - ρ of the conversion from the order at δ, of which declared guarantees take a part."""
        left = self._declared.left_of(delta)
        return self._of_order.penalty(left) if left > 0 else math.inf
