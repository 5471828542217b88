"""Records of a stream that has a length, found by their place in it."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_dp._refusals import RefusedRun

_KEPT = 4096  # records that were read last, at most: they may be looked at again
_END = object()
_MORE = (
    "The workers of {} gave more than its len() of {} records in a pass: some came twice, and what one "
    "of them can do would be more than ε says."
)


class Stream(Dataset[Any]):
    """An ``IterableDataset`` as records with places, for readers that ask in its order.

    Each pass iterates it once. A place before the last ones that were read begins it again, and reads
    up to there. It is assumed that every pass gives the same records in the same order.

    Workers read ahead, each what the stream gives *it*: blocks of records, which come in turn, in one
    order, too. That no two of them give the same record does not show, so a pass is counted: one that
    is read to its end, which it is not with ``drop_last`` or ``limit_train_batches``.

    Args:
        records: of a declared length; gives at least as many records.
        kept: so many of those that were read last are found without another pass.
        blocks: pickled lists of the records, as workers read them; None to read them here.

    Example:
        >>> class Numbers(IterableDataset):
        ...     def __len__(self):
        ...         return 3
        ...
        ...     def __iter__(self):
        ...         return iter([10, 20, 30])
        >>> stream = Stream(Numbers(), kept=1)
        >>> [stream[place] for place in (0, 1, 2, 0, 2, 2)]
        [10, 20, 30, 10, 30, 30]
    """

    fault: str | None = None
    """The reason for which nothing may be released: a pass gave more records than it says."""

    def __init__(
        self, records: IterableDataset[Any], kept: int, blocks: DataLoader[bytes] | None = None
    ) -> None:
        self.records, self._kept, self._blocks = records, kept, blocks
        self._restart()

    def _restart(self) -> None:
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._latest: deque[Any] = deque(maxlen=self._kept)

    def __len__(self) -> int:
        return len(self.records)  # type: ignore[arg-type]

    def __getitem__(self, place: int) -> Any:
        if place < self._next - len(self._latest):
            self._restart()
        while self._next <= place:
            if self._iterator is None:
                blocks = self._blocks
                self._iterator = chain.from_iterable(
                    [self.records] if blocks is None else map(pickle.loads, blocks)
                )
            try:
                self._latest.append(next(self._iterator))
            except StopIteration:
                raise RefusedRun(
                    f"{type(self.records).__name__} gave {self._next} records, and its len() is "
                    f"{len(self)}: the sampling rate would be another. Let __len__ return the number of "
                    "records in one pass, on all processes together.",
                    topic="fixed-order",
                ) from None
            self._next += 1
            if self._next == len(self):
                are_several = self._blocks is not None and self._blocks.num_workers > 1
                if are_several and next(self._iterator, _END) is not _END:
                    self.fault = _MORE.format(type(self.records).__name__, len(self))
                # This ends the workers, if they do not wait for the next pass.
                self._iterator = None
        return self._latest[place - self._next]

    def close(self) -> None:
        """End the workers; nothing is read any more."""
        self._blocks = None
        self._restart()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles (other processes that read): before the first record."""
        return {**vars(self), "_iterator": None, "_next": 0, "_latest": deque(maxlen=self._kept)}


def by_place(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the same batches of a stream with a length, whose records have places."""
    size = loader.batch_size or 1
    kept = max(size, min(2 * size, _KEPT))
    stays = not loader.num_workers
    blocks = None if stays else in_workers(loader, _pickled, loader.persistent_workers)
    return DataLoader(
        Stream(loader.dataset, kept, blocks),  # type: ignore[arg-type]
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        generator=loader.generator,
    )


def in_workers(
    loader: DataLoader[Any], collate: Callable[[list[Any]], Any], persistent: bool
) -> DataLoader[Any]:
    """Return what the workers of a loader make of blocks of records, of one after the other in turn."""
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size or 1,
        num_workers=loader.num_workers,
        collate_fn=collate,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=persistent,
    )


class _Pickler(pickle.Pickler):
    """Writes the entries that a tensor shows, and not all of the memory that it is a view of."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except (TypeError, RuntimeError):  # not of NumPy's types, or not dense
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


def _pickled(records: list[Any]) -> bytes:
    """Return records as bytes: tensors that processes share would each take an open file."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(records)
    return buffer.getvalue()
