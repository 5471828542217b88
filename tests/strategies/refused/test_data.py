"""Training data whose records cannot be sampled privately."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


class Batches:
    """Batches that come from nowhere in particular."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[torch.zeros(24, 6), torch.zeros(24).long()]])


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(239, -1, -1))

    def __len__(self) -> int:
        return 240


class Shuffling(RandomSampler):
    """A subclass may choose anything."""


class Bucketed(BatchSampler):
    """A subclass may choose anything."""


class Prefetching(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return iter(list(super().__iter__()))


def plain(data: TensorDataset, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=24, **arguments)


LOADERS = {
    "IterableDataset": (
        lambda data: DataLoader(Stream(), batch_size=24),
        "IterableDataset.*map-style dataset",
    ),
    "iterable that is no DataLoader": (
        lambda data: Batches(),
        "Batches, not from a.*Use a DataLoader",
    ),
    "list of one": (lambda data: [plain(data)], "several loaders.*return a single DataLoader"),
    "list": (lambda data: [plain(data), plain(data)], "several loaders.*ConcatDataset"),
    "dict": (lambda data: {"a": plain(data), "b": plain(data)}, "several loaders.*ConcatDataset"),
    "CombinedLoader": (
        lambda data: CombinedLoader([plain(data), plain(data)], "max_size_cycle"),
        "several loaders.*ConcatDataset",
    ),
    "WeightedRandomSampler": (
        lambda data: plain(data, sampler=WeightedRandomSampler([1.0] * 240, 240)),
        "WeightedRandomSampler.*give shuffle=True and no sampler",
    ),
    "RandomSampler with replacement": (
        lambda data: plain(data, sampler=RandomSampler(data, replacement=True)),
        "RandomSampler.*every record equally often",
    ),
    "RandomSampler of a part": (
        lambda data: plain(data, sampler=RandomSampler(data, num_samples=120)),
        "RandomSampler.*every record equally often",
    ),
    "RandomSampler of another data set": (
        lambda data: plain(data, sampler=RandomSampler(range(100))),
        "RandomSampler.*every record equally often",
    ),
    "SequentialSampler of another data set": (
        lambda data: plain(data, sampler=SequentialSampler(range(100))),
        "SequentialSampler.*every record equally often",
    ),
    "SubsetRandomSampler": (
        lambda data: plain(data, sampler=SubsetRandomSampler(range(100))),
        "SubsetRandomSampler.*every record equally often",
    ),
    "own sampler": (lambda data: plain(data, sampler=Backwards()), "Backwards.*shuffle=True"),
    "subclass of RandomSampler": (
        lambda data: plain(data, sampler=Shuffling(data)),
        "Shuffling.*shuffle=True",
    ),
    "batch_sampler": (
        lambda data: DataLoader(data, batch_sampler=Bucketed(RandomSampler(data), 24, False)),
        "its own batch_sampler.*DataLoader\\(batch_size=",
    ),
    "plain BatchSampler": (
        lambda data: DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 24, False)),
        "its own batch_sampler.*DataLoader\\(batch_size=",
    ),
    "batch_size=None": (
        lambda data: DataLoader(data, batch_size=None),
        "batch_size=None.*DataLoader\\(batch_size=",
    ),
    "loader with its own iteration": (
        lambda data: Prefetching(data, batch_size=24),
        "Prefetching overrides DataLoader.__iter__.*Use a plain DataLoader",
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_that_cannot_be_sampled_is_refused(
    name, blobs, classifier, mlp, make_trainer, privacy, assert_refused
):
    make_loader, match = LOADERS[name]
    model, trainer = classifier(mlp()), make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(lambda: trainer.fit(model, make_loader(blobs)), match, model)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_ordinary_loaders_are_not_refused(
    shuffle, drop_last, blobs, classifier, mlp, make_trainer, privacy
):
    trainer = make_trainer(max_steps=2, callbacks=[privacy])

    trainer.fit(classifier(mlp()), plain(blobs, shuffle=shuffle, drop_last=drop_last))

    assert privacy.steps == trainer.global_step == 2


def two_rows(records: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    x, y = (torch.stack(part) for part in zip(*records, strict=True))
    return [x.repeat_interleave(2, 0), y.repeat_interleave(2)]


def one_row_for_all(records: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    x, y = (torch.stack(part) for part in zip(*records, strict=True))
    return [x.mean(0, keepdim=True), y[:1]]


def nothing(records: Any) -> None:
    return None


REPEATS = {
    "Subset": (lambda data: Subset(data, [*range(1, 160), *[0] * 80]), "Index 0 .* 80 times"),
    "ConcatDataset": (
        lambda data: ConcatDataset([data, *[Subset(data, [3])] * 79]),
        "Index 3 of TensorDataset is reached 80 times",
    ),
    "nested": (
        lambda data: random_split(ConcatDataset([data, data]), [480, 0])[0],
        "of TensorDataset is reached 2 times",
    ),
}


@pytest.mark.parametrize("name", REPEATS)
def test_a_record_that_counts_several_times_is_refused(
    name, blobs, classifier, mlp, make_trainer, privacy, assert_refused
):
    make, match = REPEATS[name]
    model, trainer = classifier(mlp()), make_trainer(max_epochs=1, callbacks=[privacy])

    assert_refused(
        lambda: trainer.fit(model, plain(make(blobs))), f"{match}.*Name each record once", model
    )


def test_an_empty_training_set_is_refused(classifier, mlp, make_trainer, privacy, assert_refused):
    model, trainer = classifier(mlp()), make_trainer(max_epochs=1, callbacks=[privacy])
    empty = DataLoader(TensorDataset(torch.zeros(0, 6), torch.zeros(0).long()), batch_size=24)

    assert_refused(lambda: trainer.fit(model, empty), "training set is empty", model)
