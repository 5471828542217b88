"""Tensor data sets are read batch by batch, and give the batches that torch's loader gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from lightning_dp.sampling.at_once import TensorsAtOnce, read_at_once

N = 30
TENSORS = {
    "images and labels": (torch.randn(N, 3, 4, 4), torch.arange(N)),
    "numbers": (torch.randn(N),),
    "half and truth": (torch.randn(N, 2).bfloat16(), torch.rand(N, 3) > 0.5),
    "columns": (torch.randn(5, N).T, torch.randn(N, 8)[:, ::2]),
    "nothing in a record": (torch.randn(N, 0), torch.randn(N, 2)),
}
BATCHES = [[3, 1, 2], [0], list(range(N)), [29, 29, 5]]
SUBSETS: dict[str, Any] = {
    "whole": lambda data: data,
    "list": lambda data: Subset(data, [*range(N - 1, -1, -1)]),
    "array": lambda data: Subset(data, np.arange(N)),
    "tensor": lambda data: Subset(data, torch.arange(N)),
    "from the end": lambda data: Subset(data, np.arange(N) - N),
    "bytes": lambda data: Subset(data, np.arange(N, dtype=np.uint8)),
    "nested from the end": lambda data: Subset(
        Subset(data, [*range(-N, 0)]), [*range(-1, -N - 1, -1)]
    ),
    "nested": lambda data: Subset(Subset(data, [*range(N - 1, -1, -1)]), [*range(N)]),
}


@pytest.mark.parametrize("chosen", SUBSETS)
@pytest.mark.parametrize("name", TENSORS)
def test_batches_are_those_of_torchs_loader(name: str, chosen: str) -> None:
    user = DataLoader(SUBSETS[chosen](TensorDataset(*TENSORS[name])), batch_sampler=BATCHES)
    at_once = read_at_once(user)
    assert at_once is not None
    for want, got in zip(user, at_once, strict=True):
        assert type(got) is type(want) is list
        for one, other in zip(want, got, strict=True):
            assert one.dtype == other.dtype and one.is_contiguous() and other.is_contiguous()
            assert torch.equal(one, other)
            assert not one.numel() or one.data_ptr() != other.data_ptr()


def test_tensors_are_looked_up_in_each_batch() -> None:
    data = TensorDataset(torch.zeros(3))
    records = TensorsAtOnce(data)
    data.tensors = (torch.ones(3),)
    assert records.__getitems__([1])[0].tolist() == [1.0]
    assert len(records) == 3


class Own(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class OwnSubset(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def collate(records: list[Any]) -> Any:
    return default_collate(records)


X = torch.randn(N, 2)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Own(X), {}),
        (OwnSubset(TensorDataset(X), range(N)), {}),
        (Subset(Own(X), range(N)), {}),
        (TensorDataset(X.clone().requires_grad_()), {}),
        (TensorDataset(X.to_sparse()), {}),
        (TensorDataset(torch.nn.Parameter(X)), {}),
        ([1.0, 2.0], {}),
        (TensorDataset(X), {"collate_fn": collate}),
        (TensorDataset(X), {"num_workers": 1}),
    ],
)
def test_all_else_is_read_record_by_record(dataset: Any, options: dict[str, Any]) -> None:
    assert read_at_once(DataLoader(dataset, batch_sampler=BATCHES, **options)) is None
