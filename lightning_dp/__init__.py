"""Differential privacy for an existing, unchanged PyTorch Lightning model.

The main door is ``lightning_dp.callbacks.DifferentialPrivacy``. This package itself imports
neither callbacks nor Lightning.
"""

from lightning_dp.boundary import Query, Term
from lightning_dp.config import PrivacyConfig
from lightning_dp.estimators import AbstractEstimator, CubicNewton, Diff2, MeanGradient
from lightning_dp.postprocessing import AbstractPostProcessor, LaplacianSmoothing, Momentum
from lightning_dp.sampling import AbstractSampling, FullBatch, Poisson
from lightning_dp.schedules import AbstractSchedule, Constant

__all__ = [
    "AbstractEstimator",
    "AbstractPostProcessor",
    "AbstractSampling",
    "AbstractSchedule",
    "Constant",
    "CubicNewton",
    "Diff2",
    "FullBatch",
    "LaplacianSmoothing",
    "MeanGradient",
    "Momentum",
    "Poisson",
    "PrivacyConfig",
    "Query",
    "Term",
]
