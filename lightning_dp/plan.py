"""The noise of every step, declared before the first one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.estimators.base import State
from lightning_dp.sampling.base import AbstractSampling
from lightning_dp.schedules.adaptive import AbstractAdaptiveSchedule
from lightning_dp.schedules.base import AbstractSchedule

__all__ = ["NoisePlan"]


@dataclass(frozen=True)
class NoisePlan:
    """z_t = scale · shape(t) under one sampling scheme, as declared before the first step.

    Args:
        scale: the noise multiplier where the shape is 1; 0 trains without privacy.
        shape: the noise schedule.
        sampling: the sampling scheme that turns z_t into a privacy event.
        sample_rate: q.

    Example:
        >>> from lightning_dp.sampling import Poisson
        >>> from lightning_dp.schedules import Constant
        >>> NoisePlan(1.5, Constant(), Poisson(), 0.01).event(step=7)
        PoissonGaussian(noise_multiplier=1.5, sample_rate=0.01)
    """

    scale: float
    shape: AbstractSchedule
    sampling: AbstractSampling
    sample_rate: float

    def noise_multiplier(self, step: int) -> float:
        """z_t. Raises ValueError if the shape is not positive and finite there."""
        try:
            value = self.shape(step)
        except OverflowError:
            value = math.inf
        return self._scaled(value, step)

    def noise_multiplier_now(self, state: State, step: int) -> float:
        """z_t as chosen at run time; the planned one, unless the schedule is adaptive."""
        if isinstance(self.shape, AbstractAdaptiveSchedule):
            return self._scaled(self.shape.value(state, step), step)
        return self.noise_multiplier(step)

    def _scaled(self, value: float, step: int) -> float:
        if not 0 < value < math.inf:
            raise ValueError(
                f"noise_schedule={self.shape} gives {value} at step {step}; "
                "a schedule must be positive and finite at every step."
            )
        return self.scale * value

    def event(self, step: int) -> AbstractEvent:
        """The privacy event of step t as planned."""
        return self.event_of(self.noise_multiplier(step))

    def event_of(self, noise_multiplier: float) -> AbstractEvent:
        """The privacy event of a step with this noise multiplier."""
        return self.sampling.event(noise_multiplier, self.sample_rate)
