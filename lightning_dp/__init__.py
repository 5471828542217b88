"""Differential privacy for an existing, unchanged PyTorch Lightning model.

The main door is ``lightning_dp.callbacks.DifferentialPrivacy``. This package itself imports
neither callbacks nor Lightning.
"""

from lightning_dp.config import PrivacyConfig
from lightning_dp.estimators import AbstractEstimator, MeanGradient
from lightning_dp.postprocessing import AbstractPostProcessor, Momentum
from lightning_dp.query import BoundedSum, Query, Release, Term
from lightning_dp.sampling import AbstractSampling, FullBatch, Poisson
from lightning_dp.schedules import AbstractSchedule, Constant

__all__ = [
    "AbstractEstimator",
    "AbstractPostProcessor",
    "AbstractSampling",
    "AbstractSchedule",
    "BoundedSum",
    "Constant",
    "FullBatch",
    "MeanGradient",
    "Momentum",
    "Poisson",
    "PrivacyConfig",
    "Query",
    "Release",
    "Term",
]
