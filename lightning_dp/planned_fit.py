"""A plan that was declared for one fit: how far the budget goes, and the mechanism of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.config import PrivacyConfig
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise_plan import Budget, costliest_events
from lightning_dp.plan.signal import SignalTracker

__all__ = ["PlannedFit"]

_COUNT_WEIGHT = 0.1  # κ: noise is 0.5 % longer with a count, whose own is 5 z/B of the share a step


@dataclass
class PlannedFit:
    """A plan that was declared, and the mechanism that makes its steps.

    Args:
        mechanism: makes the steps.
        end: the mechanism's step at which the plan ends; may be infinite.
        affordable_end: the one at which the budget does.
        is_under_way: the journal is open, and steps are made.
    """

    mechanism: Mechanism
    end: float
    affordable_end: float
    is_under_way: bool = True

    @classmethod
    def declare(
        cls,
        budget: Budget,
        ledger: Ledger,
        world: World,
        planned_steps: float,
        *,
        scale: float,
        is_calibrated: bool,
        state: dict[str, Any] | None,
    ) -> PlannedFit:
        """Find how far the budget goes, and make the mechanism.

        Args:
            budget: of the steps to come.
            ledger: charged before each of them.
            world: the processes of the job.
            planned_steps: noised steps that are still to be made; may be infinite.
            scale: the noise multiplier where the schedule's shape is 1.
            is_calibrated: it was calibrated just now, for exactly these steps.
            state: of the mechanism that these steps go on from; None if they begin.
        """
        config, step = budget.config, 0 if state is None else int(state["step"])
        plan = budget.plan(world.broadcast(scale))
        affordable = world.broadcast(
            budget.affordable(plan, step, planned_steps, is_calibrated=is_calibrated)
        )
        mechanism = Mechanism(
            plan=plan,
            postprocessing=tuple(config.postprocessing),
            ledger=ledger,
            guard=budget.guard(plan, step, planned_steps, affordable),
            num_records=budget.batches.num_records,
            noise=NoiseSource(config.seed, world.rank),
            world=world,
            signal=_tracker(config),
            count_weight=_COUNT_WEIGHT if config.count_clipped else 0.0,
            spares_memory=config.engine == "ghost",
        )
        if state is not None:
            mechanism.load_state_dict(state)
        return cls(mechanism, step + planned_steps, step + affordable)

    def replan(self, budget: Budget, world: World) -> None:
        """Find again how far the budget goes.

        Args:
            budget: of the steps to come.
            world: the processes of the job.
        """
        mechanism = self.mechanism
        left = self.end - mechanism.step
        affordable = world.broadcast(budget.affordable(mechanism.plan, mechanism.step, left))
        self.affordable_end = mechanism.step + affordable
        mechanism.guard = mechanism.guard.replanned(affordable)

    @property
    def remaining(self) -> float:
        """Steps of the plan that are left and that the budget affords."""
        left = max(0, min(self.end, self.affordable_end) - self.mechanism.step)
        return min(left, self.mechanism.guard.remaining)

    @cached_property
    def costliest(self) -> dict[str, Any] | None:
        """The most that a step costs, for a lost journal; None for noise chosen at run time."""
        plan = self.mechanism.plan
        if plan.shape.chosen == "at run time":
            return None
        return costliest_events(plan, self.mechanism.step, self.end)


def _tracker(config: PrivacyConfig) -> SignalTracker | None:
    """Return what follows the releases, where they are gradients and advice is wanted."""
    wanted = config.advice or config.count_clipped
    estimates = config.resolved_estimator().traits.estimates_gradient
    return SignalTracker() if wanted and estimates else None
