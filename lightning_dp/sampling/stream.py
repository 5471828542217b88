"""Records of a stream that has a length, found by their place in it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_dp._refusals import RefusedRun

__all__ = ["Stream", "by_place"]

_KEPT = 4096  # records that were read last, at most: they may be looked at again


class Stream(Dataset[Any]):
    """An ``IterableDataset`` as records with places, for readers that ask in its order.

    Each pass iterates it once. A place before the last ones that were read begins it again, and reads
    up to there. It is assumed that every pass gives the same records in the same order.

    Args:
        records: of a declared length; gives at least as many records.
        kept: so many of those that were read last are found without another pass.

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

    def __init__(self, records: IterableDataset[Any], kept: int) -> None:
        self.records, self._kept = records, kept
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
        if self._iterator is None:
            self._iterator = iter(self.records)
        while self._next <= place:
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
        return self._latest[place - self._next]

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles (other processes that read): before the first record."""
        return {**vars(self), "_iterator": None, "_next": 0, "_latest": deque(maxlen=self._kept)}


def by_place(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of the same batches of a stream, whose records have places.

    Args:
        loader: of an ``IterableDataset`` with a length.
    """
    size = loader.batch_size or 1
    return DataLoader(
        Stream(loader.dataset, max(size, min(2 * size, _KEPT))),  # type: ignore[arg-type]
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
