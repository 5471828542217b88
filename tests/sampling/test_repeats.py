"""A record that a nested data set names more than once is found; what names each once is not."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

from lightning_dp.sampling.repeats import find_repeat


class Numbers(Dataset[int]):
    """Record i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return range(self.count)[index]


class Transformed(Dataset[Any]):
    """Wrappers that people put around a split."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]


class Chosen(Dataset[Any]):
    """A ``Subset`` of the user's own making."""

    def __init__(self, dataset: Any, indices: Any) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]


class Augmented(Subset[Any]):
    """A subclass with an access of its own."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class ByName(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, name: str) -> int:
        return {"a": 0, "b": 1, "c": 2}[name]


ten = Numbers(10)
x, y = torch.randn(10, 3), torch.arange(10)

REPEATS: dict[str, tuple[Any, object, int]] = {
    "Subset": (Subset(ten, [1, 2, *[0] * 80]), 0, 80),
    "negative index": (Subset(ten, [9, 3, -1]), 9, 2),
    "tensor of indices": (Subset(ten, torch.tensor([4, 4])), 4, 2),
    "Subset of a Subset": (Subset(Subset(ten, [7, 8, 9]), [0, 1, 0]), 7, 2),
    "Subset of a Subset that repeats": (Subset(Subset(ten, [7, 8, 7]), [0, 2]), 7, 2),
    "ConcatDataset of one object": (ConcatDataset([ten] * 8), 0, 8),
    "added to itself": (ten + ten, 0, 2),
    "splits that overlap": (ConcatDataset([Subset(ten, [0, 1]), Subset(ten, [2, 1])]), 1, 2),
    "a split beside the whole": (ConcatDataset([Subset(ten, [6]), ten]), 6, 2),
    "deep": (Subset(ConcatDataset([ConcatDataset([ten, ten]), ten]), [3, 4, 13, 23]), 3, 3),
    "StackDataset": (StackDataset(Subset(ten, [0, 1, 0]), Numbers(3)), 0, 2),
    "StackDataset by name": (Subset(StackDataset(a=ten, b=Numbers(10)), [5, 5]), 5, 2),
    "subclass of Subset": (Augmented(ten, [2, 2]), 2, 2),
    "own Subset": (Chosen(ten, [2, 2]), 2, 2),
    "wrapped Subset": (Transformed(Subset(ten, [0, 0])), 0, 2),
    "two views of one set": (ConcatDataset([Transformed(ten), Transformed(ten)]), 0, 2),
    "names": (Subset(ByName(), ["a", "b", "a"]), "a", 2),
    "two TensorDatasets of the same tensors": (TensorDataset(x, y) + TensorDataset(x, y), 0, 2),
    "overlapping slices": (TensorDataset(x[:6], y[:6]) + TensorDataset(x[5:], y[5:]), 5, 2),
    "one row, expanded": (TensorDataset(x[:1].expand(80, 3), y[:1].expand(80)), 0, 80),
    "list": (Subset(["a", "b"], [1, 1]), 1, 2),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REPEATS)
def test_a_record_named_more_than_once_is_found(name):
    dataset, index, count = REPEATS[name]

    found = find_repeat(dataset)

    assert found is not None
    assert (found.index, found.count) == (index, count)


DISTINCT: dict[str, Any] = {
    "leaf": ten,
    "permutation": Subset(ten, torch.randperm(10).tolist()),
    "random_split, put together again": ConcatDataset(random_split(ten, [3, 3, 4])),
    "folds": ConcatDataset([Subset(ten, range(0, 5)), Subset(ten, range(-5, 0))]),
    "equal indices of different sets": ConcatDataset([Numbers(3), Numbers(3)]),
    "both parts of a stack from one set": StackDataset(ten, ten),
    "slices": TensorDataset(x[:5], y[:5]) + TensorDataset(x[5:], y[5:]),
    "one input, many targets": TensorDataset(x[:1].expand(10, 3), y),
    "rows without content": TensorDataset(torch.zeros(4, 0)),
    "equal content": ["a", "a", "b"],
    "names": Subset(ByName(), ["a", "c"]),
    "one index into two sets by name": ConcatDataset(
        [Subset(ByName(), ["a"]), Subset(ByName(), ["a"])]
    ),
    "pairs": Subset(ten, [(0, 1), (1, 0)]),  # type: ignore[list-item]
    "wrapped": Transformed(Transformed(TensorDataset(x, y))),
    "tensor": x,
    "nothing": Subset(ten, []),
}


@pytest.mark.parametrize("name", DISTINCT)
def test_records_named_once_are_left_in_peace(name):
    assert find_repeat(DISTINCT[name]) is None


def test_it_agrees_with_walking_through_random_nestings():
    """The oracle asks each row for its record; record i of set k is 100 k + i."""
    rng, found = random.Random(0), Counter[bool]()

    class Labelled(Numbers):
        def __init__(self, k: int) -> None:
            super().__init__(40)
            self.k = k

        def __getitem__(self, index: int) -> int:
            return 100 * self.k + super().__getitem__(index)

    leaves = [Labelled(k) for k in range(6)]

    def nest(depth: int) -> Any:
        if not depth:
            return rng.choice(leaves)
        if rng.random() < 0.4:
            return ConcatDataset([nest(depth - 1) for _ in range(rng.randint(1, 2))])
        inner = nest(depth - 1)
        chosen = [rng.randrange(-len(inner), len(inner)) for _ in range(rng.randint(1, 6))]
        return Subset(inner, chosen)

    for _ in range(400):
        dataset = nest(rng.randint(1, 4))
        counts = Counter(dataset[i] for i in range(len(dataset)))
        repeat = find_repeat(dataset)
        found[repeat is None] += 1
        if repeat is None:
            assert max(counts.values()) == 1
        else:
            assert repeat.count in {counts[100 * k + repeat.index] for k in range(6)} - {1}
    assert min(found.values()) > 50
