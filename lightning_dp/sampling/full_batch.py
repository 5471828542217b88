"""Full batches: every record in every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dp.accounting.events import AbstractEvent, Gaussian
from lightning_dp.sampling.base import AbstractSampling, BatchPlan, check_sizes

__all__ = ["FullBatch"]


@dataclass(frozen=True)
class FullBatch(AbstractSampling):
    """One step per epoch on all N records, handed out in chunks of the loader's batch size.

    The composition of such steps is exactly μ-GDP with μ² = Σ 1/z_t². The number of chunks is
    set as the Trainer's ``accumulate_grad_batches`` for the fit.

    Example:
        >>> plan = FullBatch().plan(
        ...     num_records=1000, batch_size=300, accumulate=1, world_size=1, loader_length=4
        ... )
        >>> plan.chunks_per_step, plan.steps_per_epoch, plan.sample_rate
        (4, 1, 1.0)
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
        chunks = math.ceil(math.ceil(num_records / world_size) / batch_size)
        if accumulate not in (1, chunks):
            raise ValueError(
                f"Trainer(accumulate_grad_batches={accumulate}) contradicts sampling=FullBatch(): "
                f"{num_records} records in chunks of {batch_size} make {chunks} chunks per step. "
                f"Leave it out, or set it to {chunks}."
            )
        return BatchPlan(num_records, 1.0, chunks_per_step=chunks, steps_per_epoch=1)

    def draw(
        self, shard_size: int, sample_rate: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        return np.arange(shard_size)

    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        return Gaussian(noise_multiplier)
