"""Differential privacy for an existing, unchanged PyTorch Lightning model.

``from lightning_dp import DifferentialPrivacy`` works, and so does every other name of ``__all__``:
each is imported when it is first asked for. ``import lightning_dp`` alone loads neither torch nor
Lightning, so that ``lightning_dp.accounting`` can be used without them. Its public modules
(``lightning_dp.accounting``, ``lightning_dp.audit``, ...) are found in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_dp._lazy import names_from

__version__ = "0.2.0"

__all__ = [
    "ZCDP",
    "About",
    "AbstractEstimator",
    "AbstractPostProcessor",
    "AbstractSampling",
    "AbstractSchedule",
    "AdaptiveQuantile",
    "ApproximateDP",
    "Automatic",
    "BandedNoise",
    "BatchPlan",
    "Checks",
    "Constant",
    "Cosine",
    "CubicNewton",
    "CyclicPoisson",
    "DPAdamW",
    "Diff2",
    "DifferentialPrivacy",
    "DynamicGD",
    "DynamicMomentum",
    "Exponential",
    "FixedOrder",
    "Flat",
    "FromInfluence",
    "FullBatch",
    "IndependentNoise",
    "LambdaCGD",
    "LaplacianSmoothing",
    "MeanGradient",
    "Momentum",
    "PLDAccountant",
    "PerGroup",
    "Poisson",
    "Polynomial",
    "PrivacyConfig",
    "PrivacyWarning",
    "Query",
    "RandomAllocation",
    "StepDecay",
    "Storm",
    "StreamingRDPAccountant",
    "Term",
    "TruncatedPoisson",
    "UserLevel",
    "Workload",
    "fix",
    "losses_of_records",
    "rows_of_records",
    "suggest_batches",
]

_MODULES = [
    *("accounting", "audit", "callbacks", "federated", "metrics", "plan", "plotting", "report"),
    *("search", "strategies"),
]

if TYPE_CHECKING:  # the same names for type checkers and editors, which do not run __getattr__
    from lightning_dp._refusals import PrivacyWarning
    from lightning_dp.accounting import ZCDP, ApproximateDP, PLDAccountant, StreamingRDPAccountant
    from lightning_dp.boundary import Query, Term
    from lightning_dp.callbacks import DifferentialPrivacy
    from lightning_dp.clipping import AdaptiveQuantile, Automatic, Flat, PerGroup
    from lightning_dp.config import About, Checks, PrivacyConfig
    from lightning_dp.estimators import AbstractEstimator, CubicNewton, Diff2, MeanGradient, Storm
    from lightning_dp.functional import losses_of_records
    from lightning_dp.gradients.batches import rows_of_records
    from lightning_dp.gradients.fix import fix
    from lightning_dp.noise import BandedNoise, IndependentNoise, LambdaCGD, Workload
    from lightning_dp.noise_plan import suggest_batches
    from lightning_dp.optimizers import DPAdamW
    from lightning_dp.postprocessing import AbstractPostProcessor, LaplacianSmoothing, Momentum
    from lightning_dp.sampling import (
        AbstractSampling,
        BatchPlan,
        CyclicPoisson,
        FixedOrder,
        FullBatch,
        Poisson,
        RandomAllocation,
        TruncatedPoisson,
        UserLevel,
    )
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
    __getattr__ = names_from(
        __name__,
        "_refusals",
        "accounting",
        "boundary",
        "sampling",
        "noise",
        "estimators",
        "schedules",
        "postprocessing",
        "clipping",
        "optimizers",
        "config",
        "noise_plan",
        "callbacks",
        "functional",
        "gradients.batches",
        "gradients.fix",
        modules=_MODULES,
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
