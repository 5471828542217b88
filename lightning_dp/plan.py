"""The noise of every step, declared before the first one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.sampling.base import AbstractSampling
from lightning_dp.schedules.base import AbstractSchedule

__all__ = ["NoisePlan"]


@dataclass(frozen=True)
class NoisePlan:
    """z_t = scale · shape(t) under one sampling scheme: the plan of the guard mode ``fixed``.

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
        value = self.shape(step)
        if not 0 < value < math.inf:
            raise ValueError(
                f"noise_schedule={self.shape} gives {value} at step {step}; "
                "a schedule must be positive and finite at every step."
            )
        return self.scale * value

    def event(self, step: int) -> AbstractEvent:
        """The privacy event of step t."""
        return self.sampling.event(self.noise_multiplier(step), self.sample_rate)
