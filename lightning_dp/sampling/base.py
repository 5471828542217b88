"""What a sampling scheme must say: whom it chooses, and which privacy event that is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_dp._validate import number
from lightning_dp.accounting.events import AbstractEvent

__all__ = ["AbstractSampling", "BatchPlan", "check_sizes"]


@dataclass(frozen=True)
class BatchPlan:
    """How one epoch is cut into noised steps. Public, and constant for a run.

    Args:
        num_records: N, records in the training set.
        sample_rate: q, the probability that a record is in one step's batch.
        chunks_per_step: physical batches that make up one logical batch, on each rank.
        steps_per_epoch: noised steps in one pass of the loader.
    """

    num_records: int
    sample_rate: float
    chunks_per_step: int
    steps_per_epoch: int

    @property
    def expected_batch_size(self) -> float:
        """B = q N, what a private mean divides by."""
        return self.sample_rate * self.num_records

    @property
    def chunks_per_epoch(self) -> int:
        return self.steps_per_epoch * self.chunks_per_step


class AbstractSampling(ABC):
    """Chooses the people of a batch and names the event that this choice makes, together.

    A subclass promises that :meth:`draw` contains each record of the shard at most once, and that
    :meth:`event` is never more private than what :meth:`draw` does.
    """

    @abstractmethod
    def plan(
        self,
        *,
        num_records: int,
        batch_size: int,
        accumulate: int,
        world_size: int,
        loader_length: int,
    ) -> BatchPlan:
        """The plan for a user's loader.

        Args:
            num_records: N over all ranks.
            batch_size: of the user's loader (one chunk on one rank).
            accumulate: the Trainer's ``accumulate_grad_batches``.
            world_size: number of ranks, each of which draws from its own shard.
            loader_length: batches in one epoch of the user's loader on one rank.
        """

    @abstractmethod
    def draw(
        self, shard_size: int, sample_rate: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """One batch from a shard: distinct positions in ``range(shard_size)``, in any order."""

    @abstractmethod
    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        """The privacy event of one Gaussian query with multiplier z on one such batch."""


def check_sizes(num_records: int, batch_size: float) -> None:
    """Refuse an empty training set and a batch size that is not a positive number."""
    if not number("num_records", num_records) >= 1:
        raise ValueError(f"The training set has {num_records} records; need at least 1.")
    if not number("batch_size", batch_size) >= 1:
        raise ValueError(f"The loader's batch_size={batch_size} must be at least 1.")
