"""Plans, and samplers of chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats

from lightning_dp.sampling import AbstractSampling, BatchPlan, Poisson
from lightning_dp.sampling.loader import Chunk, ChunkSampler


@pytest.fixture
def plan_of() -> Callable[..., BatchPlan]:
    """The plan of a sampling scheme for 1000 records in batches of 50, or other sizes."""

    def plan(sampling: AbstractSampling, **changes: int) -> BatchPlan:
        arguments = {
            "num_records": 1000,
            "batch_size": 50,
            "accumulate": 1,
            "world_size": 1,
            "loader_length": 20,
        }
        return sampling.plan(**{**arguments, **changes})

    return plan


@pytest.fixture
def chunk_sampler() -> Callable[..., ChunkSampler]:
    """The sampler of a plan: Poisson with a seed, one rank and no limit, if not said otherwise."""

    def make(
        plan: BatchPlan,
        sampling: AbstractSampling | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        limit: int | None = None,
        seed: int | None = 0,
    ) -> ChunkSampler:
        return ChunkSampler(
            plan,
            Poisson() if sampling is None else sampling,
            rank=rank,
            world_size=world_size,
            limit=plan.chunks_per_epoch if limit is None else limit,
            seed=seed,
        )

    return make


@pytest.fixture
def one_pass() -> Callable[..., Any]:
    """Every chunk of an epoch with the records that the loader would fetch for it."""

    def walk(sampler: ChunkSampler) -> list[tuple[Chunk, list[int]]]:
        found = []
        for indices in sampler:
            found.append((sampler.pending.popleft(), indices))
        return found

    return walk


@pytest.fixture
def inclusion_p_value() -> Callable[..., float]:
    """The p-value of a rate, for draws whose row t says who was in batch t."""

    def p_value(is_in: np.ndarray, rate: float) -> float:
        draws, records = is_in.shape
        count = is_in.sum(0)
        statistic = ((count - draws * rate) ** 2 / (draws * rate * (1 - rate))).sum()
        return float(scipy.stats.chi2(records).sf(statistic))

    return p_value
