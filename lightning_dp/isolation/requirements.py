"""Checks of the user's model and data, for every way to train: refusals name cause and cure."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_dp._refusals import Refusal
from lightning_dp.gradients.base import refuse_sharded
from lightning_dp.gradients.fix import is_constant, normalises_over_the_batch

__all__ = [
    "MisconfigurationError",
    "check_loader",
    "check_model",
    "check_training_step",
    "repeated_record",
]


class MisconfigurationError(Refusal, MisconfigurationException):
    """The model, its data or its Trainer cannot be trained privately as it is."""


def check_model(module: nn.Module, *, may_be_sharded: bool = False) -> None:
    """Refuse layers that mix the records of a batch, or write them into weights.

    And models of which each process holds a part, unless the strategy knows of it.
    """
    if not may_be_sharded:
        refuse_sharded(module)
    mixing = [
        name
        for name, part in module.named_modules()
        if normalises_over_the_batch(part) and not is_constant(part)
    ]
    if mixing:
        raise MisconfigurationError(
            f"Layers {mixing} normalise over the batch (BatchNorm, or InstanceNorm with running "
            "statistics): they mix records and keep statistics of the data, also without parameters. "
            "lightning_dp.fix(model) before fit puts GroupNorm in their place, and in a frozen "
            "pretrained backbone its statistics as constants; frozen and in eval() they may stay.",
            topic="batch-norm",
        )
    rescaled = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
    ]
    if rescaled:
        raise MisconfigurationError(
            f"Layers {rescaled} have max_norm set: their forward pass rescales the rows that a batch "
            "looks up, without noise, so the weights tell which rows the records use. Leave max_norm "
            "out, as lightning_dp.fix(model) does; max_grad_norm bounds what a record does.",
            topic="max-norm",
        )


def check_training_step(module: LightningModule) -> None:
    """Refuse a ``training_step`` that fetches its batches itself."""
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise MisconfigurationError(
            "training_step(dataloader_iter) fetches batches itself, so they cannot be charged "
            "before they are used. Write training_step(batch, batch_idx).",
            topic="data-loader",
        )


def check_loader(loader: object) -> DataLoader[Any]:
    """Return the loader, if its batches can be replaced by private ones."""
    if not isinstance(loader, DataLoader):
        raise MisconfigurationError(
            f"The training data comes from {type(loader).__name__}, not from a "
            "torch.utils.data.DataLoader, so its records cannot be sampled. Use a DataLoader.",
            topic="data-loader",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise MisconfigurationError(
            "The training set is an IterableDataset: records without an index cannot be sampled "
            "independently. Use a map-style dataset (__len__ and __getitem__), or sampling=FixedOrder().",
            topic="data-loader",
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise MisconfigurationError(
            f"{type(loader).__name__} overrides DataLoader.__iter__, and its batches would be lost. "
            "Use a plain DataLoader; put the work into the dataset or the collate_fn.",
            topic="data-loader",
        )
    if loader.batch_size is None:
        raise MisconfigurationError(
            "The training loader has batch_size=None or its own batch_sampler, so the expected "
            "batch size and the sampling rate are not known. Give DataLoader(batch_size=...).",
            topic="data-loader",
        )
    _check_sampler(loader)
    if len(loader.dataset) < 1:  # type: ignore[arg-type]
        raise MisconfigurationError("The training set is empty.", topic="data-loader")
    if (text := repeated_record(loader.dataset)) is not None:
        raise MisconfigurationError(text, topic="repeated-records")
    return loader


def repeated_record(dataset: object) -> str | None:
    """Return why a data set bounds no record, if it names one twice."""
    from lightning_dp.sampling.repeats import find_repeat

    if (repeat := find_repeat(dataset)) is None:
        return None
    return (
        f"Index {repeat.index} of {repeat.source} is reached {repeat.count} times in the training "
        "set: what one record can do would not be bounded by max_grad_norm. Name each record "
        "once; make variants of it (augmentation) at random inside __getitem__."
    )


def _check_sampler(loader: DataLoader[Any]) -> None:
    sampler, size = loader.sampler, len(loader.dataset)  # type: ignore[arg-type]
    plain = type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler)
    if isinstance(sampler, RandomSampler):
        plain = plain and not sampler.replacement
    # a sampler made for a part of the data set would train on that part only
    covered: Any = getattr(sampler, "dataset", sampler)
    plain = plain and size == len(covered)
    if not plain or type(loader.batch_sampler) is not BatchSampler:
        raise MisconfigurationError(
            f"The training loader chooses records with {type(sampler).__name__} and "
            f"{type(loader.batch_sampler).__name__}. Private batches are drawn by the sampling "
            "scheme, every record equally often: give shuffle=True and no sampler or batch_sampler.",
            topic="data-loader",
        )
