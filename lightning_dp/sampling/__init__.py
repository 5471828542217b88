"""Sampling schemes: who is in a batch, and which privacy event that is."""

from lightning_dp.sampling.blocks import CyclicPoisson, FixedOrder, RandomAllocation
from lightning_dp.sampling.schemes import (
    AbstractSampling,
    BatchPlan,
    FullBatch,
    Poisson,
    TruncatedPoisson,
)
from lightning_dp.sampling.units import UserLevel

__all__ = [
    "AbstractSampling",
    "BatchPlan",
    "CyclicPoisson",
    "FixedOrder",
    "FullBatch",
    "Poisson",
    "RandomAllocation",
    "TruncatedPoisson",
    "UserLevel",
]
