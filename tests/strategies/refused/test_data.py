"""Training data whose records cannot be sampled privately, and who may ask the private loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
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

from lightning_dp.callbacks import DifferentialPrivacy
from tests.zoo import private


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
def test_a_loader_that_cannot_be_sampled_is_refused(name, blobs, classifier, mlp, refuses):
    make_loader, match = LOADERS[name]
    refuses(classifier(mlp()), match, make_loader(blobs))


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
def test_a_record_that_counts_several_times_is_refused(name, blobs, classifier, mlp, refuses):
    make, match = REPEATS[name]
    refuses(classifier(mlp()), f"{match}.*Name each record once", plain(make(blobs)))


def test_an_empty_training_set_is_refused(classifier, mlp, refuses):
    empty = DataLoader(TensorDataset(torch.zeros(0, 6), torch.zeros(0).long()), batch_size=24)
    refuses(classifier(mlp()), "training set is empty", empty)


# -- the private loader serves the training steps alone; whoever else asks it reads no record ----


ASKERS: dict[str, Callable[[L.Trainer], Any]] = {
    "for": lambda trainer: [len(batch) for batch in trainer.train_dataloader],
    "list": lambda trainer: list(trainer.train_dataloader),
    "next": lambda trainer: next(iter(trainer.train_dataloader)),
    "two iterators": lambda trainer: next(
        zip(iter(trainer.train_dataloader), iter(trainer.train_dataloader), strict=True)
    ),
    "map": lambda trainer: list(map(len, trainer.train_dataloader)),
    "a CombinedLoader over it": lambda trainer: list(CombinedLoader(trainer.train_dataloader)),
    "Lightning's CombinedLoader": lambda trainer: next(iter(trainer.fit_loop._combined_loader)),
    "the loop's iterator": lambda trainer: next(trainer.fit_loop._combined_loader),
    "the loop's fetcher": lambda trainer: next(trainer.fit_loop._data_fetcher),
    "a shallow copy": lambda trainer: list(copy.copy(trainer.train_dataloader)),
}
HOOKS = [
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_optimizer_step",
    "on_validation_start",
    "on_validation_batch_end",
    "on_train_epoch_end",
    "on_train_end",
]


class Asks(L.Callback):
    """Asks the training loader at a moment of the second epoch, or of the first where it must."""

    def __init__(self, hook: str, ask: Callable[[L.Trainer], Any], data: Any) -> None:
        self.ask, self.data, self.read = ask, data, 0
        setattr(self, hook, self._asked)

    def _asked(self, trainer: L.Trainer, *_: Any) -> None:
        before = len(self.data.asked)
        try:
            self.ask(trainer)
        finally:
            self.read += len(self.data.asked) - before


@pytest.fixture
def data(blobs, recorded):
    return recorded(*blobs.tensors)


@pytest.fixture
def unprobed() -> DifferentialPrivacy:
    return private()


@pytest.mark.parametrize("asker", ASKERS)
def test_a_hook_that_asks_the_training_loader_is_refused_before_a_record_is_read(
    asker, data, classifier, mlp, refuses
):
    asks = Asks("on_train_start", ASKERS[asker], data)
    match = "test_data.*from the Trainer's training loader.*Use public data"
    refuses(classifier(mlp()), match, DataLoader(data, 24), [asks])
    assert asks.read == len(data.asked) == 0


@pytest.mark.parametrize("hook", HOOKS)
def test_no_hook_of_a_fit_gets_a_batch(hook, data, classifier, mlp, make_trainer, unprobed):
    asks = Asks(hook, ASKERS["next"], data)
    trainer = make_trainer(max_epochs=1, callbacks=[unprobed, asks], num_sanity_val_steps=0)

    with pytest.raises(Exception, match="from the Trainer's training loader"):
        trainer.fit(classifier(mlp()), DataLoader(data, 24), DataLoader(data, 240))

    assert asks.read == 0


def test_workers_do_not_read_ahead_for_whoever_is_refused(
    data, classifier, mlp, make_trainer, unprobed
):
    loader = DataLoader(data, 24, num_workers=1, multiprocessing_context="fork")
    asks = Asks("on_train_start", ASKERS["next"], data)
    trainer = make_trainer(max_epochs=1, callbacks=[unprobed, asks])

    with pytest.raises(Exception, match="from the Trainer's training loader"):
        trainer.fit(classifier(mlp()), loader)

    assert trainer.train_dataloader._iterator is None


def test_the_loader_is_refused_after_the_fit_too(data, classifier, mlp, make_trainer, unprobed):
    model, trainer = classifier(mlp()), make_trainer(max_steps=2, callbacks=[unprobed])
    trainer.fit(model, DataLoader(data, 24))
    data.asked.clear()
    private = trainer.train_dataloader

    for use in (
        lambda: list(private),
        lambda: trainer.validate(model, private, verbose=False),
        lambda: trainer.predict(model, private),
    ):
        # Lightning itself cannot give it to predict
        with pytest.raises(Exception, match=r"from the Trainer|PrivateDataLoader"):
            use()
    assert data.asked == []
