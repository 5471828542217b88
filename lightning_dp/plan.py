"""The noise and the batches of every step, declared before the first one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from lightning_dp.accounting.base import FloatArray
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.pair_plan import AbstractPairPlan
from lightning_dp.estimators.base import AbstractEstimator, State
from lightning_dp.estimators.mean_gradient import MeanGradient
from lightning_dp.sampling.schemes import AbstractSampling, Poisson
from lightning_dp.schedules import AbstractAdaptiveSchedule, AbstractSchedule, Constant

__all__ = ["LaterSteps", "NoisePlan"]


@dataclass(frozen=True)
class NoisePlan:
    """z_t = scale · schedule(t) · relative noise(t), q_t = q · relative rate(t), for every step t.

    The relative ones are the estimator's; both are 1 where its steps are all alike.

    Args:
        scale: the noise multiplier where the shape is 1; 0 trains without privacy.
        shape: the noise schedule.
        sampling: the sampling scheme that turns (z_t, q_t) into a privacy event.
        sample_rate: q.
        estimator: what is asked at every step.

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
    estimator: AbstractEstimator = field(default_factory=MeanGradient)

    @property
    def is_constant(self) -> bool:
        """Whether every step makes the same event."""
        return isinstance(self.shape, Constant) and self.estimator.period == 1

    def noise_multiplier(self, step: int) -> float:
        """z_t. Raises ValueError if the shape is not positive and finite there."""
        return self.scale * self.relative_noise(step)

    def noise_multiplier_now(self, state: State, step: int) -> float:
        """z_t as chosen at run time; the planned one, unless the schedule is adaptive."""
        if isinstance(self.shape, AbstractAdaptiveSchedule):
            return self.scale * self._relative(self.shape.value(state, step), step)
        return self.noise_multiplier(step)

    def relative_noise(self, step: int) -> float:
        """z_t / scale."""
        try:
            value = self.shape(step)
        except OverflowError:
            value = math.inf
        return self._relative(value, step)

    def _relative(self, value: float, step: int) -> float:
        if not 0 < value < math.inf:
            raise ValueError(
                f"noise_schedule={self.shape} gives {value} at step {step}; "
                "a schedule must be positive and finite at every step."
            )
        return value * self.estimator.relative_noise(step)

    def rate(self, step: int) -> float:
        """q_t."""
        return min(1.0, self.sample_rate * self.estimator.relative_rate(step))

    def event(self, step: int) -> AbstractEvent:
        """The privacy event of step t as planned."""
        return self.event_of(self.noise_multiplier(step), step)

    def event_of(self, noise_multiplier: float, step: int) -> AbstractEvent:
        """The privacy event of step t with this noise multiplier."""
        return self.sampling.event(noise_multiplier, self.rate(step))

    def relative_noises(self, first: int, last: int) -> FloatArray:
        """z_t / scale of the steps ``first <= t < last``."""
        return np.array([self.relative_noise(step) for step in range(first, last)], dtype=float)

    def rates(self, first: int, last: int) -> FloatArray:
        """q_t of the steps ``first <= t < last``."""
        period = self.estimator.period
        kinds = np.array([self.rate(step) for step in range(first, min(last, first + period))])
        return np.resize(kinds, last - first)

    def later(self, step: int) -> LaterSteps:
        """The plan from a step on."""
        return LaterSteps(self, step)


@dataclass(frozen=True)
class LaterSteps(AbstractPairPlan):
    """The events of a plan from a step on, for accounting."""

    plan: NoisePlan
    step: int

    def __call__(self, step: int) -> AbstractEvent:
        return self.plan.event(self.step + step)

    def pairs(self, first: int, last: int) -> tuple[FloatArray, FloatArray]:
        """(z, q) of the steps ``first <= t < last``."""
        plan, first, last = self.plan, self.step + first, self.step + last
        if type(plan.sampling) is Poisson:  # whose event says what it is given; others may not
            return plan.scale * plan.relative_noises(first, last), plan.rates(first, last)
        pairs = np.array([plan.event(step).pair for step in range(first, last)], dtype=float)
        return pairs.reshape(-1, 2)[:, 0], pairs.reshape(-1, 2)[:, 1]
