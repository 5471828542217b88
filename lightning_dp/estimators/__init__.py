"""Estimators: the questions asked of the data, and the gradients made from the answers."""

from lightning_dp.boundary import State
from lightning_dp.estimators.base import AbstractEstimator, Traits, share_of_noise
from lightning_dp.estimators.cubic_newton import CubicNewton
from lightning_dp.estimators.diff2 import Diff2
from lightning_dp.estimators.mean_gradient import MeanGradient
from lightning_dp.estimators.storm import Storm

__all__ = [
    "AbstractEstimator",
    "CubicNewton",
    "Diff2",
    "MeanGradient",
    "State",
    "Storm",
    "Traits",
    "share_of_noise",
]
