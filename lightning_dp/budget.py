"""The steps to come: their noise, how many of them a budget affords, and who guards it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp.accounting import (
    AbstractAccountant,
    AbstractEvent,
    History,
    StreamingRDPAccountant,
    affordable_steps,
    calibrate,
)
from lightning_dp.accounting.guards import AbstractGuard, FixedGuard, GDPGuard, RDPGuard
from lightning_dp.accounting.pair_plan import PlannedSteps
from lightning_dp.config import PrivacyConfig
from lightning_dp.plan import LaterSteps, NoisePlan
from lightning_dp.sampling import BatchPlan, Poisson
from lightning_dp.schedules import AbstractAdaptiveSchedule

__all__ = ["Budget", "events_from", "is_adaptive"]

_ENDLESS = 10**9  # steps searched for a budget's end when the Trainer has none


def is_adaptive(config: PrivacyConfig) -> bool:
    """Whether the noise is chosen at run time, without a plan that bounds it."""
    schedule = config.noise_schedule
    return isinstance(schedule, AbstractAdaptiveSchedule) and not schedule.is_envelope


def events_from(plan: NoisePlan, step: int) -> AbstractEvent | LaterSteps:
    """The events of a plan from this step on; one event if all are alike."""
    if plan.is_constant and math.isfinite(plan.scale):
        return plan.event(step)
    return plan.later(step)


@dataclass(frozen=True)
class Budget:
    """What a configuration, its batches and what was spent before say of the steps to come.

    Args:
        config: what the user said.
        batches: how batches are made.
        spent: everything that was charged before.
    """

    config: PrivacyConfig
    batches: BatchPlan
    spent: History

    def plan(self, scale: float) -> NoisePlan:
        """The plan whose noise multiplier is ``scale`` where the schedule's shape is 1."""
        config = self.config
        return NoisePlan(
            scale,
            config.noise_schedule,
            config.sampling,
            self.batches.sample_rate,
            config.resolved_estimator(),
        )

    def scale(self, planned_steps: float, step: int, epsilon: float) -> float:
        """The noise multiplier where the schedule's shape is 1: as given, or calibrated.

        Args:
            planned_steps: from ``step`` on; may be infinite.
            step: of the plan, the next one.
            epsilon: spent before.

        Raises:
            ValueError: if the noise must be calibrated and the number of steps is infinite.
        """
        config = self.config
        if config.noise_multiplier is not None:
            return float(config.noise_multiplier)
        assert config.target_epsilon is not None
        if not math.isfinite(planned_steps):
            raise ValueError(
                f"target_epsilon={config.target_epsilon} alone calibrates the noise for the steps "
                "of the run, and this Trainer has no last step: give Trainer(max_epochs=...) or "
                "Trainer(max_steps=...), or give noise_multiplier too."
            )
        # Calibration meets a target to one part in 1000; what is left below that is nothing.
        if not epsilon < 0.999 * config.target_epsilon or planned_steps < 1:
            return math.inf  # nothing is left, and no finite noise fits into it
        plan, end = self.plan(1.0), step + int(planned_steps)
        return calibrate(
            plan.relative_noises(step, end).tolist(),
            plan.rate(0) if plan.estimator.period == 1 else lambda later: plan.rate(step + later),
            int(planned_steps),
            config.target_epsilon,
            config.target_delta,
            relation=config.relation,
            accountant=self._planner(),
            spent=self.spent,
        )

    def _planner(self) -> AbstractAccountant:
        """The accountant that the noise is calibrated with: what the guard will enforce."""
        if is_adaptive(self.config) and self.batches.sample_rate < 1:
            return StreamingRDPAccountant()
        return self.config.accountant

    def affordable(
        self, plan: NoisePlan, step: int, planned_steps: float, *, is_calibrated: bool = False
    ) -> float:
        """Return how many steps of the plan, from this one on, the budget affords.

        Args:
            plan, step, planned_steps: which steps.
            is_calibrated: the plan's scale was calibrated just now, for exactly these steps.
        """
        config = self.config
        if not math.isfinite(plan.scale):
            return 0
        if config.target_epsilon is None or is_adaptive(config):
            return math.inf
        if is_calibrated and type(plan.sampling) is Poisson:  # whose events were calibrated with
            return planned_steps
        return self._affordable(plan, step, planned_steps, config.accountant)

    def _affordable(
        self, plan: NoisePlan, step: int, planned_steps: float, accountant: AbstractAccountant
    ) -> int:
        config = self.config
        assert config.target_epsilon is not None
        return affordable_steps(
            events_from(plan, step),
            int(min(planned_steps, _ENDLESS)),
            config.target_epsilon,
            config.target_delta,
            relation=config.relation,
            accountant=accountant,
            spent=self.spent,
        )

    def guard(
        self, plan: NoisePlan, step: int, planned_steps: float, affordable: float
    ) -> AbstractGuard:
        """``gdp`` for full batches, ``rdp`` for noise chosen at run time, else ``fixed``."""
        config, spent = self.config, self.spent
        if config.target_epsilon is None or not math.isfinite(plan.scale):
            return FixedGuard(affordable)
        budget = (config.target_epsilon, config.target_delta, config.relation, spent)
        full = plan.sample_rate == 1 and all(event.pair[1] == 1 for event, _ in spent)
        is_envelope = isinstance(plan.shape, AbstractAdaptiveSchedule) and not is_adaptive(config)
        if full and plan.scale > 0 and not is_envelope:  # an envelope is charged as planned
            return GDPGuard(*budget)
        if not is_adaptive(config):
            return FixedGuard(affordable)
        fits = self._affordable(plan, step, planned_steps, StreamingRDPAccountant())
        # The order is the optimum of all that fits; where nothing does, the first step's will do.
        return RDPGuard(*budget, PlannedSteps(plan.later(step)).first(max(1, fits)))
