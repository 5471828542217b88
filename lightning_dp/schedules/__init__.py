"""Noise schedules: shapes of the noise over steps, as pure functions of the step.

Also here: :func:`lightning_dp.schedules.fit.fit_exponential`, and the formulas of a paper for
comparison in :mod:`lightning_dp.schedules.paper`.
"""

from lightning_dp.schedules.adaptive import AbstractAdaptiveSchedule
from lightning_dp.schedules.base import AbstractSchedule
from lightning_dp.schedules.constant import Constant
from lightning_dp.schedules.cosine import Cosine
from lightning_dp.schedules.dynamic_gd import DynamicGD
from lightning_dp.schedules.dynamic_momentum import DynamicMomentum
from lightning_dp.schedules.exponential import Exponential
from lightning_dp.schedules.from_influence import FromInfluence
from lightning_dp.schedules.polynomial import Polynomial
from lightning_dp.schedules.step_decay import StepDecay

__all__ = [
    "AbstractAdaptiveSchedule",
    "AbstractSchedule",
    "Constant",
    "Cosine",
    "DynamicGD",
    "DynamicMomentum",
    "Exponential",
    "FromInfluence",
    "Polynomial",
    "StepDecay",
]
