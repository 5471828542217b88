"""What clients share: a Poisson batch of their records, and its noised sum."""

from __future__ import annotations

import numpy as np

from lightning_dp.federated.base import Records
from lightning_dp.noise import NoiseSource, add_noise, random_generator
from lightning_dp.query import BoundedSum, Query, Release
from lightning_dp.sampling import AbstractSampling, Poisson
from lightning_dp.world import World

__all__ = ["bounded", "draw", "noise_source", "noised_sum"]

_POISSON = Poisson()


def draw(
    records: Records,
    rate: float,
    rng: np.random.Generator,
    sampling: AbstractSampling = _POISSON,
) -> list[int]:
    """The records of a batch: each with probability ``rate``, by default."""
    return [int(record) for record in sampling.draw(records.num_records, rate, rng)]


def noise_source(seed: int | None, *stream: int) -> NoiseSource:
    """Noise from the operating system; with a ``seed``, for tests, a function of seed and stream."""
    if seed is None:
        return NoiseSource()
    return NoiseSource(int(random_generator(seed, 2, *stream).integers(2**62)))


def bounded(records: Records, query: Query, drawn: list[int]) -> BoundedSum:
    """The answer of the records, checked to have the bound that was asked for."""
    total = records.bounded_sum(query, drawn)
    if total.clip_norm != query.clip_norm:
        raise RuntimeError(
            f"The answer is bounded by {total.clip_norm}, the query asked for {query.clip_norm}."
        )
    return total


def noised_sum(records: Records, query: Query, drawn: list[int], source: NoiseSource) -> Release:
    """The sum over the drawn records, with the noise of the query."""
    return add_noise(bounded(records, query, drawn), query.noise_multiplier, source, World())
