"""Estimators: what is asked of the data at each step, and what is made of the answer."""

from lightning_dp.estimators.base import AbstractEstimator, State
from lightning_dp.estimators.mean_gradient import MeanGradient

__all__ = ["AbstractEstimator", "MeanGradient", "State"]
