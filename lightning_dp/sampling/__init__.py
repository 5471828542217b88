"""Sampling schemes: who is in a batch, and which privacy event that is."""

from lightning_dp.sampling.blocks import CyclicPoisson, FixedOrder
from lightning_dp.sampling.schemes import AbstractSampling, BatchPlan, FullBatch, Poisson
from lightning_dp.sampling.units import UserLevel

__all__ = [
    "AbstractSampling",
    "BatchPlan",
    "CyclicPoisson",
    "FixedOrder",
    "FullBatch",
    "Poisson",
    "UserLevel",
]
