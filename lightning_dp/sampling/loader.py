"""The training loader of a private run: logical batches handed out as a fixed number of chunks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    TensorDataset,
    _utils,
    default_collate,
)

from lightning_dp._noise import random_generator
from lightning_dp.sampling.schemes import AbstractSampling, BatchPlan
from lightning_dp.sampling.units import RowsOfUnits

_Positions: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """A physical batch. ``size``, ``records`` and ``owners`` are sensitive, as is all about who is in it.

    Its size is the number of records of the logical batch in it, or users; 0 for a stand-in record, whose
    gradient is thrown away.
    """

    index: int  # in the epoch
    size: int
    first: bool  # a logical batch begins with it
    sample_rate: float  # q with which its logical batch was drawn
    step: int = 0  # of the run, that its logical batch was drawn for
    last: bool = True  # the logical batch ends with it
    records: Sequence[int] = field(default=(), repr=False)  # rows that are read, in order
    owners: Sequence[int] = field(default=(), repr=False)  # the unit of each row, if it has several

    @property
    def rows(self) -> int:
        """The rows of the logical batch in it."""
        return len(self.owners) or self.size

    @property
    def units(self) -> list[list[int]]:
        """The rows that are read of each unit; a stand-in is one."""
        if not self.owners:
            return [[record] for record in self.records]
        found: list[list[int]] = [[] for _ in range(self.size)]
        for record, owner in zip(self.records, self.owners, strict=True):
            found[owner].append(record)
        return found


class _BothWays(NamedTuple):
    """A batch, and a batch of each of its records alone."""

    together: Any
    alone: list[Any]


@dataclass(frozen=True)
class _EachAlone:
    """A collate function that also makes a batch of each record, of which no other is a part."""

    collate: Callable[[list[Any]], Any]

    def __call__(self, records: list[Any]) -> _BothWays:
        alone = [self.collate([copy.deepcopy(record)]) for record in records]  # it may empty them
        return _BothWays(self.collate(records), alone)


def _draw_alone(step: int, rate: float, rng: np.random.Generator) -> None:
    return None


class ChunkSampler(Sampler[list[int]]):
    """Record indices, chunk by chunk: each logical batch in exactly the planned number of chunks.

    - Rank r draws from its own shard {r, r + world_size, ...} with its own generator.
    - An empty chunk holds one stand-in record, so that user code always sees a batch of the usual
      structure and every rank makes the same number of steps.
    - Fresh entropy in every pass: batches are independent, so a resumed run is exact in
      distribution, and no sampler state (which would tell who was in a batch) is ever saved.

    Args:
        plan: how an epoch is cut.
        sampling: draws the records, or units, of each logical batch.
        rank, world_size: this process and how many there are.
        draw: draws the batch of a step that depends on those of others; None where it does not.
        rate: q at a step of the run, where it is not the plan's at all steps.
        first_step: the step of the run at which a pass begins; asked when its first batch is drawn.
        limit: chunks of an epoch that will be used (``limit_train_batches``). A logical batch cut
            short by it, or by a resume in its middle, is spread whole over the chunks that are left.
        seed: for tests.
        units: the rows of each unit; None where each row is one. A unit is never cut.
        secure: draw from a cipher.
    """

    def __init__(
        self,
        plan: BatchPlan,
        sampling: AbstractSampling,
        *,
        rank: int,
        world_size: int,
        limit: int,
        seed: int | None,
        draw: Callable[[int, float, np.random.Generator], _Positions | None] = _draw_alone,
        rate: Callable[[int], float] | None = None,
        first_step: Callable[[], int] = int,
        units: RowsOfUnits | None = None,
        secure: bool = False,
    ) -> None:
        self.resume_at = 0  # the chunk of the epoch with which the next pass begins
        self.pending: deque[Chunk] = deque()
        self._plan = plan
        self._sampling = sampling
        self._rank = rank
        self._world_size = world_size
        self._limit = limit
        self._seed = seed
        self._draw_in_block = draw
        self._rate = rate
        self._first_step = first_step
        self._units = units
        self._secure = secure
        self._passes = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave the sizes of batches out of copies and pickles."""
        return {**vars(self), "pending": deque()}

    def __len__(self) -> int:
        return self._plan.chunks_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        self.pending.clear()
        rng = random_generator(self._seed, 1, self._rank, self._passes, secure=self._secure)
        self._passes += 1
        position, self.resume_at = self.resume_at, 0
        step, stop = self._first_step(), max(len(self), position + 1)
        while position < stop:
            end = self._end_of_step(position)
            rate = self._plan.sample_rate if self._rate is None else self._rate(step)
            drawn, chunks = self._draw(step, rate, rng), end - position
            for offset, part in enumerate(self._cut(drawn, chunks, rng)):
                first, last = offset == 0, offset == chunks - 1
                size, owners = len(part), list[int]()
                if self._units is not None and size:
                    part, of_rows = self._units.draw(part, rng)
                    owners = of_rows.tolist()
                records = part.tolist() or [0]
                chunk = Chunk(position + offset, size, first, rate, step, last, records, owners)
                self.pending.append(chunk)
                yield list(records)
            position, step = end, step + 1

    def _cut(self, drawn: _Positions, chunks: int, rng: np.random.Generator) -> list[_Positions]:
        if chunks == 1 or self._sampling.cuts_by_place:
            return np.array_split(drawn, chunks)
        place = rng.integers(chunks, size=len(drawn))
        return [drawn[place == chunk] for chunk in range(chunks)]

    def _end_of_step(self, position: int) -> int:
        """Return where the logical batch that this chunk belongs to ends.

        A pass may begin behind the epoch's last chunk: Lightning, resumed from some checkpoints of
        an epoch's end, fetches one batch more, and steps on it.
        """
        chunks = self._plan.chunks_per_step
        end = position // chunks * chunks + chunks
        return min(end, self._limit) if position < self._limit else position + 1

    def _draw(self, step: int, rate: float, rng: np.random.Generator) -> _Positions:
        drawn = self._draw_in_block(step, rate, rng)
        if drawn is None:
            shard = range(self._rank, self._plan.num_records, self._world_size)
            drawn = self._sampling.draw(len(shard), rate, rng)
        return self._rank + self._world_size * drawn


def _admit_always() -> None:
    return None


class PrivateDataLoader(DataLoader[Any]):
    """The user's loader with its batches chosen by a :class:`ChunkSampler`.

    Dataset, collate function, workers and memory options stay. A run resumes mid-epoch without any
    state of the loader: batches are drawn independently, so where a pass begins carries no privacy,
    and it begins where the trainer says that it is. (A sampler whose batches depend on each other
    must keep its own position instead, and refuse a trainer that is elsewhere.)

    Args:
        loader: the user's loader, left untouched.
        sampler: chooses the chunks.
        position: the place in the epoch of the next chunk; asked when a pass draws its first one.
        admit: called before each chunk is read; raises if it may not be.
        each_alone: also make a batch of each record, by the same collate function.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        sampler: ChunkSampler,
        position: Callable[[], int] = int,
        admit: Callable[[], None] = _admit_always,
        *,
        each_alone: bool = False,
    ) -> None:
        super().__init__(
            loader.dataset,
            batch_sampler=sampler,
            num_workers=loader.num_workers,
            collate_fn=_EachAlone(loader.collate_fn) if each_alone else loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        self.collate_of_user = loader.collate_fn
        self._chunks = sampler
        self._position = position
        self._admit = admit
        self.current: Chunk | None = None
        self._alone: list[Any] = []

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._admit()  # before workers read ahead
        # Only now: Lightning makes iterators before it knows where it goes on.
        self._chunks.resume_at = self._position()
        at_once = read_at_once(self)
        for batch in super().__iter__() if at_once is None else at_once:
            self._alone = []
            if isinstance(batch, _BothWays):
                batch, self._alone = batch
            if batch is None or any(each is None for each in self._alone):
                raise TypeError(
                    "The collate_fn of the training loader returned None. Records of a private "
                    "batch cannot be left out on the way: return a batch for every list of records."
                )
            self.current = self._chunks.pending.popleft()
            yield batch
            del batch  # free while the next one is read
            self._admit()

    @property
    def alone(self) -> list[Any]:
        """A batch of each record, or unit, of the chunk; read once more if nobody wanted them before."""
        if not self._alone and self.current is not None:
            units = ([self.dataset[record] for record in unit] for unit in self.current.units)
            self._alone = [self.collate_of_user(unit) for unit in units]
        return self._alone

    def __getstate__(self) -> dict[str, Any]:
        """Leave the current chunk out of copies and pickles: its size tells who is in the batch."""
        return {**vars(self), "current": None, "_alone": []}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing; that the method exists tells Lightning that runs resume mid-epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the position that older checkpoints hold: the Trainer's is used."""


# -- tensors, read with one call for each of them and not one for each record ----------------------


def collates_as_torch() -> bool:
    """Tell whether nobody has taught ``default_collate`` further types."""
    makers = _utils.collate.default_collate_fn_map.values()
    return all(str(getattr(each, "__module__", "")).startswith("torch.") for each in makers)


class TensorsAtOnce(Dataset[Any]):
    """A ``TensorDataset``, or a ``Subset`` of one, that gives a batch for a list of records.

    The batch is, bit for bit, what ``default_collate`` makes of the records. It is left to do that where
    an index of a ``Subset`` is not a plain one (from the end, of bytes, a truth value).

    Args:
        dataset: the user's; its tensors are looked up in each batch.

    Example:
        >>> records = TensorsAtOnce(Subset(TensorDataset(torch.arange(5.0)), [4, 2, 0]))
        >>> records.__getitems__([0, 2])
        [tensor([4., 0.])]
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __getitems__(self, records: Sequence[int]) -> list[Tensor]:
        """Return their batch: what the loader asks a data set for that has this method."""
        dataset: Any = self._dataset
        rows: Sequence[Any] = records
        while isinstance(dataset, Subset):
            dataset, rows = dataset.dataset, [dataset.indices[row] for row in rows]
        assert isinstance(dataset, TensorDataset)
        index = torch.tensor(rows)
        if index.dtype != torch.int64 or index.min() < 0:
            batch: list[Tensor] = default_collate([self._dataset[record] for record in records])
            return batch
        return [each.index_select(0, index.to(each.device)) for each in dataset.tensors]


def _are_tensors(dataset: object) -> bool:
    """Tell whether records are rows of plain tensors; a subclass may do anything with them."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset and all(
        type(each) is Tensor and each.layout == torch.strided and not each.requires_grad
        for each in dataset.tensors
    )


def _as_it_is(batch: Any) -> Any:
    return batch


def read_at_once(loader: DataLoader[Any]) -> DataLoader[Any] | None:
    """Return a loader of the same batches that reads each at once; None where records may differ.

    Other processes that read for it take nobody's time: it is left alone then.
    """
    if loader.num_workers or loader.collate_fn is not default_collate or not collates_as_torch():
        return None
    if not _are_tensors(loader.dataset):
        return None
    return DataLoader(
        TensorsAtOnce(loader.dataset),
        batch_sampler=loader.batch_sampler,
        collate_fn=_as_it_is,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
    )
