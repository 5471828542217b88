"""Sampling schemes whose batches depend on each other: in turns, by allocation, in a fixed order."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp._validate import flag, normalise, whole
from lightning_dp.accounting.events import (
    AbstractEvent,
    CyclicRound,
    FixedOrderPass,
    RandomAllocationEpoch,
)
from lightning_dp.noise import AbstractNoise, IndependentNoise
from lightning_dp.sampling.schemes import AbstractSampling, BatchPlan, Poisson

_EPOCHS = 4  # of which the allocation is there: loaders read ahead, and begin again

Draw: TypeAlias = Callable[[int, float, Generator], NDArray[np.int64]]
"""Positions in a shard, from the step of the run, q, and fresh randomness."""


class Window(NamedTuple):
    """The steps in a row that one charge covers.

    Args:
        noise: with its coefficients.
        number: of the charge in its block; 0 is the first one.
        length: as :meth:`AbstractBlockSampling.window`.
        steps: that are covered, at most ``length``.
    """

    noise: AbstractNoise
    number: int
    length: int
    steps: int


class AbstractBlockSampling(AbstractSampling):
    """Chooses batches of a block of steps, and names the event of several steps in a row.

    A subclass promises that no record takes part twice in any :meth:`window` steps in a row, and that
    charges 0, 1, ..., n, one at the first step and one after each window, are together never more private
    than what :meth:`begin` draws in these windows, with noise that remembers for at most
    :attr:`separation` steps. A later charge costs no less than an earlier one.
    """

    @abstractmethod
    def window(self, batches: BatchPlan) -> int:
        """Return the number of steps that one charge covers."""

    @abstractmethod
    def charge(self, noise_multiplier: float, sample_rate: float, window: Window) -> AbstractEvent:
        """Return the event of a charge.

        Args:
            noise_multiplier: z of each step.
            sample_rate: q, expected batch size over records.
            window: that it covers.
        """

    @abstractmethod
    def begin(self, batches: BatchPlan, shard: range, rng: Generator, start: int = 0) -> Draw:
        """Return what draws the batches of a new block. It is secret, and is not saved.

        Args:
            batches: of the run.
            shard: the records of this process, one of each ``step`` of the range.
            rng: of the block.
            start: the step of the run with which it begins.
        """

    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        """Return the event of a block of one step."""
        return self.charge(noise_multiplier, sample_rate, Window(IndependentNoise(), 0, 1, 1))

    def draw(self, shard_size: int, sample_rate: float, rng: Generator) -> NDArray[np.int64]:
        """Refuse to draw a batch by itself."""
        raise RefusedSetting(
            f"{self} has batches that depend on each other, so none is drawn by itself. Use it with a "
            "Trainer; federated clients and audits take sampling=Poisson() or FullBatch().",
            topic="fixed-order",
        )


@dataclass(frozen=True)
class CyclicPoisson(AbstractBlockSampling):
    """Records are divided into b parts at random; step t draws from part t mod b, at rate b·q.

    So a record takes part at most once in b steps in a row, which is what noise with b bands
    (:class:`~lightning_dp.noise.BandedNoise`) asks for, and its chance in a whole round is b·q: a round
    of b steps is one Gaussian release on one Poisson sample of that rate (Choquette-Choo et al. 2023,
    arXiv:2306.08153, Theorem 4), and is charged before its first record. A stop inside is paid in full.

    - Each record has a part by itself, uniformly at random, so that one record more or less leaves the
      parts of all others. They last for a fit, and are never saved: a run that is resumed draws others.
    - N·q records take part in a step on average, whatever their parts.

    Args:
        bands: b >= 1.

    Raises:
        ValueError: if ``bands`` is less than 1, or by :meth:`plan` if b·q is above 1.

    Example:
        >>> CyclicPoisson(8).plan(
        ...     num_records=1000, batch_size=50, accumulate=2, world_size=1, loader_length=20
        ... ).sample_rate
        0.1
    """

    bands: int = 8

    def __post_init__(self) -> None:
        normalise(self, whole, "bands")

    @property
    def separation(self) -> float:
        return self.bands

    def adapt(self, plan: BatchPlan, world_size: int) -> BatchPlan:
        if not self.bands * plan.sample_rate <= 1:
            raise RefusedSetting(
                f"sampling={self}: each step draws from a {self.bands}th of the {plan.num_records} "
                f"records, which is less than a batch of {plan.expected_batch_size:g}. Use at most "
                f"{int(1 / plan.sample_rate)} bands, or a smaller batch_size.",
                topic="fixed-order",
            )
        return plan

    def window(self, batches: BatchPlan) -> int:
        return self.bands

    def charge(self, noise_multiplier: float, sample_rate: float, window: Window) -> AbstractEvent:
        return CyclicRound(noise_multiplier, min(1.0, self.bands * sample_rate), window.steps)

    def begin(self, batches: BatchPlan, shard: range, rng: Generator, start: int = 0) -> Draw:
        part_of = rng.integers(self.bands, size=len(shard))
        parts = [np.flatnonzero(part_of == part) for part in range(self.bands)]

        def draw(step: int, rate: float, rng: Generator) -> NDArray[np.int64]:
            part = parts[step % self.bands]
            return part[Poisson().draw(len(part), min(1.0, self.bands * rate), rng)]

        return draw


@dataclass(frozen=True)
class RandomAllocation(AbstractBlockSampling):
    """Each record is in exactly one batch of an epoch of t steps, drawn uniformly for each epoch.

    So an epoch sees every record once, which Poisson batches do not. ε is close to theirs: in general a
    little lower where δ is small. An epoch is charged before its first record, and a stop inside is paid
    in full (:class:`~lightning_dp.accounting.events.RandomAllocationEpoch`).

    - Each record draws its step by itself, so that one more or less leaves all others where they are.
      Batches have N/t records on average, not exactly: equal ones, as shuffling makes, have no such ε.
    - Who is in which step is secret, and never saved: a run that is resumed begins a new epoch.
    - "add_remove" or "zero_out". Rényi accountants take an epoch for a full batch.

    Example:
        >>> RandomAllocation().plan(
        ...     num_records=1000, batch_size=60, accumulate=1, world_size=1, loader_length=17
        ... ).expected_batch_size
        58.8235294117647
    """

    has_pairs: ClassVar[bool] = False

    def adapt(self, plan: BatchPlan, world_size: int) -> BatchPlan:
        return replace(plan, sample_rate=1 / plan.steps_per_epoch)

    def window(self, batches: BatchPlan) -> int:
        return batches.steps_per_epoch

    def charge(self, noise_multiplier: float, sample_rate: float, window: Window) -> AbstractEvent:
        return RandomAllocationEpoch(noise_multiplier, window.length, window.steps)

    def begin(self, batches: BatchPlan, shard: range, rng: Generator, start: int = 0) -> Draw:
        steps, latest = batches.steps_per_epoch, -1
        places: dict[int, NDArray[np.int32]] = {}  # of the records in the latest epochs

        def draw(step: int, rate: float, of_step: Generator) -> NDArray[np.int64]:
            nonlocal latest
            epoch, place = divmod(step - start, steps)
            if epoch not in places:
                if epoch < latest:  # another allocation of it was not charged
                    raise RefusedRun(
                        f"Step {step} was asked for long after its epoch. Call fit again instead.",
                        topic="out-of-order",
                    )
                latest = epoch
                places[epoch] = rng.integers(steps, size=len(shard), dtype=np.int32)
                places.pop(epoch - _EPOCHS, None)
            return np.flatnonzero(places[epoch] == place)

        return draw


@dataclass(frozen=True)
class FixedOrder(AbstractBlockSampling):
    """Batches as a loader without shuffling gives them, in one order that every pass repeats.

    Which step uses whom may be known to everybody, so nothing is amplified: E passes with independent
    noise are √E/z-GDP, which is many times the noise of Poisson sampling. Noise that remembers makes up
    for most of it (:class:`~lightning_dp.noise.LambdaCGD`, :class:`~lightning_dp.noise.BandedNoise`).

    - Each record takes part once in a pass, and always at the same place, so its steps are exactly a
      pass apart, wherever epochs of the Trainer begin or end.
    - The guarantee is "zero_out": a record has no effect, and keeps its place. It is assumed that the
      order does not depend on the records, and that data set or stream give the same one in every
      pass: a shuffle buffer brings records back too soon, so that ε is more, and nothing notices it.
    - A pass is charged before its first record, and a stop inside is paid in full.

    Args:
        shuffle: draw the order once, at the start of each fit, and not take that of the data set.
            Refused without: a loader with ``shuffle=True``, which draws another order each epoch.

    Example:
        >>> FixedOrder().plan(
        ...     num_records=1000, batch_size=50, accumulate=2, world_size=1, loader_length=20
        ... ).steps_per_epoch
        10
    """

    cuts_by_place: ClassVar[bool] = True

    shuffle: bool = False

    def __post_init__(self) -> None:
        normalise(self, flag, "shuffle")

    @property
    def separation(self) -> float:
        return math.inf  # the charge counts the rows that columns share

    def adapt(self, plan: BatchPlan, world_size: int) -> BatchPlan:
        # A loader that gives all records to each process (of a stream, say) counts them all.
        records = math.ceil(plan.num_records / world_size)
        size = round(plan.expected_batch_size / world_size) if plan.sample_rate < 1 else records
        return replace(plan, steps_per_epoch=min(math.ceil(records / size), plan.steps_per_epoch))

    def window(self, batches: BatchPlan) -> int:
        return batches.steps_per_epoch

    def charge(self, noise_multiplier: float, sample_rate: float, window: Window) -> AbstractEvent:
        cost = window.noise.cost(window.number, window.length)
        return FixedOrderPass(noise_multiplier / math.sqrt(cost), window.steps)

    def begin(self, batches: BatchPlan, shard: range, rng: Generator, start: int = 0) -> Draw:
        passes = batches.steps_per_epoch
        order = rng.permutation(len(shard)) if self.shuffle else np.arange(len(shard))
        size = round(batches.expected_batch_size / shard.step)
        if batches.sample_rate == 1:  # a batch may be larger than the training set
            size = -(-len(shard) // passes)

        def draw(step: int, rate: float, rng: Generator) -> NDArray[np.int64]:
            place = step % passes
            return order[place * size : (place + 1) * size]

        return draw
