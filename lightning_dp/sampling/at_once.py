"""Batches of tensor data sets, read with one call for each tensor and not one for each record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, _utils, default_collate

__all__ = ["TensorsAtOnce", "collates_as_torch", "read_at_once"]


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

    Args:
        loader: has a batch sampler. Other processes that read for it take nobody's time: it is left
            alone then.
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
