"""Poisson sampling: every record is in every batch independently with probability q."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dp.accounting.events import AbstractEvent, Gaussian, PoissonGaussian
from lightning_dp.sampling.base import AbstractSampling, BatchPlan, check_sizes

__all__ = ["Poisson"]


@dataclass(frozen=True)
class Poisson(AbstractSampling):
    """Each record enters each batch independently with probability q.

    q = batch_size · accumulate_grad_batches · world_size / N, at most 1, so that a batch has the
    size of the ordinary one on average, and an epoch has as many steps as before.

    - Each record is in a batch at most once; batches are independent of each other.
    - Drawing costs O(qN): a binomial count, then that many distinct positions.

    Example:
        >>> plan = Poisson().plan(
        ...     num_records=1000, batch_size=50, accumulate=2, world_size=1, loader_length=20
        ... )
        >>> plan.sample_rate, plan.steps_per_epoch, plan.expected_batch_size
        (0.1, 10, 100.0)
    """

    def plan(
        self,
        *,
        num_records: int,
        batch_size: int,
        accumulate: int,
        world_size: int,
        loader_length: int,
    ) -> BatchPlan:
        check_sizes(num_records, batch_size)
        return BatchPlan(
            num_records=num_records,
            # A batch larger than the training set is the training set, as in an ordinary loader.
            sample_rate=min(1.0, batch_size * accumulate * world_size / num_records),
            chunks_per_step=accumulate,
            steps_per_epoch=math.ceil(loader_length / accumulate),
        )

    def draw(
        self, shard_size: int, sample_rate: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        count = rng.binomial(shard_size, sample_rate)
        return rng.choice(shard_size, size=count, replace=False, shuffle=False)

    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        if sample_rate == 1:
            return Gaussian(noise_multiplier)
        return PoissonGaussian(noise_multiplier, sample_rate)
