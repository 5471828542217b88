"""Noise schedules: shapes of the noise over steps, as pure functions of the step."""

from lightning_dp.schedules.base import AbstractSchedule
from lightning_dp.schedules.constant import Constant
from lightning_dp.schedules.exponential import Exponential
from lightning_dp.schedules.step_decay import StepDecay

__all__ = ["AbstractSchedule", "Constant", "Exponential", "StepDecay"]
