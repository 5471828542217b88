"""Sampling schemes: who is in a batch, which privacy event that is, and how batches are cut."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_dp._refusals import RefusedSetting
from lightning_dp._validate import (
    between,
    normalise,
    number,
    whole,
    whole_from_0,
)
from lightning_dp.accounting.events import (
    AbstractEvent,
    Gaussian,
    TruncatedGaussian,
    sampled_gaussian,
)


@dataclass(frozen=True)
class BatchPlan:
    """Division of an epoch into noised steps. Public, and constant for a run.

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

    def __post_init__(self) -> None:
        normalise(self, whole, "num_records", "chunks_per_step", of="BatchPlan")
        normalise(self, whole_from_0, "steps_per_epoch", of="BatchPlan")
        normalise(self, between("(0, 1]"), "sample_rate", of="BatchPlan")

    @property
    def expected_batch_size(self) -> float:
        """B = q N, what a private mean divides by."""
        return self.sample_rate * self.num_records

    @property
    def chunks_per_epoch(self) -> int:
        """Physical batches in one pass of the loader, on each rank."""
        return self.steps_per_epoch * self.chunks_per_step


class AbstractSampling(ABC):
    """Chooses the people of a batch and names the event that this choice makes, together.

    A subclass promises that :meth:`draw` contains each record of the shard at most once, and that
    :meth:`event` is never more private than what :meth:`draw` does.
    """

    has_pairs: ClassVar[bool] = True
    """True if the pair of its event is all that it costs (:attr:`AbstractEvent.is_pair`)."""
    cuts_by_place: ClassVar[bool] = False
    """True if a batch's records are cut into equal physical batches in their order.

    Else each record draws its own, so that no other one moves it to another: physical batches may be
    treated differently, by ``batch_idx`` or by random numbers of a whole batch.
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
        """Return the plan for a user's loader: as many steps, of as many records on average.

        Args:
            num_records: N over all ranks.
            batch_size: of the user's loader (one chunk on one rank).
            accumulate: the Trainer's ``accumulate_grad_batches``.
            world_size: number of ranks, each of which draws from its own shard.
            loader_length: batches in one epoch of the user's loader on one rank.
        """
        check_sizes(num_records, batch_size)
        plan = BatchPlan(
            num_records=num_records,
            # A batch larger than the training set is the training set, as in an ordinary loader.
            sample_rate=min(1.0, batch_size * accumulate * world_size / num_records),
            chunks_per_step=accumulate,
            steps_per_epoch=math.ceil(loader_length / accumulate),
        )
        return self.adapt(plan, world_size)

    def adapt(self, plan: BatchPlan, world_size: int) -> BatchPlan:
        """Return a plan for Poisson batches as this scheme has it; refuse one that it cannot keep to."""
        return plan

    def among(self, batches: BatchPlan, world_size: int) -> AbstractSampling:
        """Return the scheme with those public numbers of a run that its event needs."""
        return self

    @abstractmethod
    def draw(
        self, shard_size: int, sample_rate: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Draw one batch from a shard: distinct positions in ``range(shard_size)``, in any order."""

    @abstractmethod
    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        """Return the privacy event of one Gaussian query with multiplier z on one such batch."""

    @property
    def separation(self) -> float:
        """Steps from one in which a record takes part to the next such one, at least."""
        return 1


def check_sizes(num_records: int, batch_size: float) -> None:
    """Refuse an empty training set and a batch size that is not a positive number."""
    if not number("num_records", num_records) >= 1:
        raise ValueError(f"The training set has {num_records} records; need at least 1.")
    if not number("batch_size", batch_size) >= 1:
        raise ValueError(f"The loader's batch_size={batch_size} must be at least 1.")


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

    def draw(
        self, shard_size: int, sample_rate: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        # N independent coins with probability q: their number of heads is binomial, and given the
        # number, all sets of that size are equally likely.
        count = rng.binomial(shard_size, sample_rate)
        return rng.choice(shard_size, size=count, replace=False, shuffle=False)

    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        return _sampled_gaussian(noise_multiplier, sample_rate)


# The steps of a run are alike, as a rule.
_sampled_gaussian = lru_cache(maxsize=16, typed=True)(sampled_gaussian)


@dataclass(frozen=True)
class TruncatedPoisson(AbstractSampling):
    """Poisson batches of at most ``limit`` records a process: no step takes more memory.

    Of a sample that has more, ``limit`` records are chosen uniformly. Where that happens, one record
    more pushes another out, and the sum moves by up to 2 C: a step is charged as a known choice between
    noise z and z/2 (:class:`~lightning_dp.accounting.events.TruncatedGaussian`). Three standard
    deviations above the mean batch, √(N q), cost up to a few percent of ε, five next to nothing.

    N is taken for public, as it is in q. Several processes share out the records by their places, so that
    without one the others would move to another process and its limit: they need the relation
    "replace_one", of records. A physical batch has at most ⌈limit / accumulate_grad_batches⌉ records, or
    users.

    Args:
        limit: records of one process's logical batch, above its mean.
        num_records: from which a process draws, at most; a run fills it in.

    Raises:
        ValueError: if ``limit`` is less than 1, or by :meth:`plan` if it is not above the mean.

    Example:
        >>> sampling = TruncatedPoisson(limit=120)
        >>> plan = sampling.plan(
        ...     num_records=10_000, batch_size=100, accumulate=1, world_size=1, loader_length=100
        ... )
        >>> event = sampling.among(plan, world_size=1).event(1.0, plan.sample_rate)
        >>> round(event.chance_of_limit, 3)
        0.028
    """

    has_pairs: ClassVar[bool] = False
    cuts_by_place: ClassVar[bool] = True

    limit: int
    num_records: int | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        normalise(self, whole, "limit", *(["num_records"] if self.num_records is not None else []))

    def adapt(self, plan: BatchPlan, world_size: int) -> BatchPlan:
        mean = plan.expected_batch_size / world_size
        if not self.limit > mean:
            raise RefusedSetting(
                f"sampling={self}: a process draws {mean:g} records a step on average, so most batches "
                f"would be cut, at half the noise. Use a limit of {mean + 5 * math.sqrt(mean):.0f}, or "
                "a smaller batch_size.",
                topic="batch-limit",
            )
        return plan

    def among(self, batches: BatchPlan, world_size: int) -> AbstractSampling:
        return replace(self, num_records=math.ceil(batches.num_records / world_size))

    def draw(
        self, shard_size: int, sample_rate: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        drawn = Poisson().draw(shard_size, sample_rate, rng)
        if len(drawn) <= self.limit:
            return drawn
        return rng.choice(drawn, size=self.limit, replace=False, shuffle=False)

    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        if self.num_records is None:
            raise RefusedSetting(
                f"sampling={self}: what it costs depends on the number of records, which a Trainer's run "
                "fills in. Use it there; federated clients and audits take Poisson() or FullBatch().",
                topic="batch-limit",
            )
        return TruncatedGaussian(noise_multiplier, sample_rate, self.limit, self.num_records)


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

    cuts_by_place: ClassVar[bool] = True

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
            raise RefusedSetting(
                f"Trainer(accumulate_grad_batches={accumulate}) contradicts sampling=FullBatch(): "
                f"{num_records} records in chunks of {batch_size} make {chunks} chunks per step. "
                f"Leave it out, or set it to {chunks}.",
                topic="batch-size",
            )
        return BatchPlan(num_records, 1.0, chunks_per_step=chunks, steps_per_epoch=1)

    def draw(
        self, shard_size: int, sample_rate: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        return np.arange(shard_size)

    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        return Gaussian(noise_multiplier)
