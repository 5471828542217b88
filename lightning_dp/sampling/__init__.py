"""Sampling schemes: who is in a batch, and which privacy event that is."""

from lightning_dp.sampling.base import AbstractSampling, BatchPlan
from lightning_dp.sampling.full_batch import FullBatch
from lightning_dp.sampling.poisson import Poisson

__all__ = ["AbstractSampling", "BatchPlan", "FullBatch", "Poisson"]
