"""Differential privacy for an existing, unchanged PyTorch Lightning model.

``from lightning_dp import DifferentialPrivacy`` works, and so does every other name of ``__all__``:
each is imported when it is first asked for. ``import lightning_dp`` alone loads neither torch nor
Lightning, so that ``lightning_dp.accounting`` can be used without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = [
    "AbstractEstimator",
    "AbstractPostProcessor",
    "AbstractSampling",
    "AbstractSchedule",
    "BatchPlan",
    "Constant",
    "Cosine",
    "CubicNewton",
    "Diff2",
    "DifferentialPrivacy",
    "DynamicGD",
    "DynamicMomentum",
    "Exponential",
    "FromInfluence",
    "FullBatch",
    "LaplacianSmoothing",
    "MeanGradient",
    "Momentum",
    "Poisson",
    "Polynomial",
    "PrivacyConfig",
    "PrivacyWarning",
    "Query",
    "StepDecay",
    "Storm",
    "Term",
]

if TYPE_CHECKING:  # the same names for type checkers and editors, which do not run __getattr__
    from lightning_dp._warnings import PrivacyWarning
    from lightning_dp.boundary import Query, Term
    from lightning_dp.callbacks import DifferentialPrivacy
    from lightning_dp.config import PrivacyConfig
    from lightning_dp.estimators import AbstractEstimator, CubicNewton, Diff2, MeanGradient, Storm
    from lightning_dp.postprocessing import AbstractPostProcessor, LaplacianSmoothing, Momentum
    from lightning_dp.sampling import AbstractSampling, BatchPlan, FullBatch, Poisson
    from lightning_dp.schedules import (
        AbstractSchedule,
        Constant,
        Cosine,
        DynamicGD,
        DynamicMomentum,
        Exponential,
        FromInfluence,
        Polynomial,
        StepDecay,
    )
else:
    _HOMES = (  # searched in this order: what is quick to import comes first
        "_warnings",
        "boundary",
        "sampling",
        "estimators",
        "schedules",
        "postprocessing",
        "config",
        "callbacks",
    )

    def __getattr__(name: str) -> object:
        """Import a public name from its home when it is first asked for (PEP 562)."""
        for home in _HOMES if name in __all__ else ():
            module = importlib.import_module(f"lightning_dp.{home}")
            if name in module.__all__:
                return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module 'lightning_dp' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
