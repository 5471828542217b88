"""What cannot be trained privately is refused before the first step, with the cause and the cure."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_dp._warnings import warn
from lightning_dp.gradients.whole_parameters import refuse_sharded
from lightning_dp.sampling.repeats import find_repeat

__all__ = [
    "check_launcher",
    "check_loader",
    "check_model",
    "check_optimizers",
    "check_single_loader",
    "check_strategy",
    "check_trainer",
    "check_trainer_and_strategy",
    "check_training_mode",
    "check_training_step",
]

_REFUSED_CALLBACKS: dict[type[Callback], str] = {
    LearningRateFinder: "it trains on the data outside the ledger; choose the learning rate "
    "without it (on public data, or as a charged run of its own)",
    BatchSizeFinder: "it trains on the data outside the ledger; choose the batch size by hand",
    GradientAccumulationScheduler: "it changes the sampling rate during the run; use a constant "
    "Trainer(accumulate_grad_batches=...)",
    StochasticWeightAveraging: "it makes an extra pass over the training data; use "
    "lightning.pytorch.callbacks.EMAWeightAveraging, which only averages weights",
    BaseFinetuning: "it changes which parameters are trained during the run; freeze them before "
    "fit with requires_grad_(False), and fit again for the next phase",
}


def check_trainer_and_strategy(trainer: Trainer) -> None:
    """Refuse a Trainer that cannot be made private at all."""
    _check_origin(trainer)
    check_strategy(trainer.strategy)


def check_trainer(trainer: Trainer) -> None:
    """Refuse Trainer settings under which ε would not hold."""
    check_trainer_and_strategy(trainer)
    overfit_batches = trainer.overfit_batches  # type: ignore[attr-defined]
    if overfit_batches:
        raise MisconfigurationException(
            f"Trainer(overfit_batches={overfit_batches}) repeats the same batches, which is "
            "not private sampling. Use limit_train_batches, or a smaller data set."
        )
    if trainer.precision == "16-mixed":
        raise MisconfigurationException(
            "Trainer(precision='16-mixed') scales the loss by a factor that reacts to un-noised "
            "gradients. Use precision='bf16-mixed'."
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise MisconfigurationException(
                    f"The callback {type(callback).__name__} cannot be used in private training: "
                    f"{reason}."
                )
    check_training_step(trainer.lightning_module)
    if trainer.gradient_clip_val:
        warn(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) acts on the gradient that is "
            "already private, noise included. The bound per record is max_grad_norm."
        )


def _check_origin(trainer: object) -> None:
    """lightning.pytorch and pytorch_lightning are two copies of the same classes."""
    if not isinstance(trainer, Trainer):
        raise MisconfigurationException(
            f"The Trainer comes from {type(trainer).__module__.split('.')[0]!r}, lightning-dp works "
            "with 'lightning'. Import everything from lightning.pytorch, nothing from "
            "pytorch_lightning."
        )


def check_training_step(module: LightningModule) -> None:
    """Refuse a ``training_step`` that fetches its batches itself."""
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise MisconfigurationException(
            "training_step(dataloader_iter) fetches batches itself, so they cannot be charged "
            "before they are used. Write training_step(batch, batch_idx)."
        )


def check_strategy(strategy: Strategy) -> None:
    """Refuse strategies that shard parameters, or copy the running process."""
    kind = type(strategy).__name__
    # the second group derives from the first
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or isinstance(
        strategy, DeepSpeedStrategy | XLAStrategy | SingleDeviceXLAStrategy
    ):
        raise MisconfigurationException(
            f"The strategy {kind} is not supported: per-record gradients need whole parameters on "
            "each device. Use strategy='auto' on one device, or strategy='ddp'."
        )
    check_launcher(strategy)


def check_launcher(strategy: Strategy) -> None:
    """Refuse launchers that copy the running process."""
    if "MultiProcessing" in type(strategy.launcher).__name__:
        raise MisconfigurationException(
            "Launchers that spawn or fork (ddp_spawn, ddp_fork, ddp_notebook; a notebook takes one "
            "where there are several devices) leave the ledger of the child processes behind. Use "
            "strategy='ddp' in a script, or one process: Trainer(devices=1) with strategy='auto'."
        )


def check_loader(loader: object) -> DataLoader[Any]:
    """The loader, if batches of it can be replaced by private ones."""
    if not isinstance(loader, DataLoader):
        raise MisconfigurationException(
            f"The training data comes from {type(loader).__name__}, not from a "
            "torch.utils.data.DataLoader, so its records cannot be sampled. Use a DataLoader."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise MisconfigurationException(
            "The training set is an IterableDataset: records without an index cannot be sampled "
            "independently. Use a map-style dataset (__len__ and __getitem__)."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise MisconfigurationException(
            f"{type(loader).__name__} overrides DataLoader.__iter__, and its batches would be lost. "
            "Use a plain DataLoader; put the work into the dataset or the collate_fn."
        )
    if loader.batch_size is None:
        raise MisconfigurationException(
            "The training loader has batch_size=None or a batch_sampler of its own, so the expected "
            "batch size and the sampling rate are not known. Give DataLoader(batch_size=...)."
        )
    _check_sampler(loader)
    if len(loader.dataset) < 1:  # type: ignore[arg-type]
        raise MisconfigurationException("The training set is empty.")
    if (repeat := find_repeat(loader.dataset)) is not None:
        raise MisconfigurationException(
            f"Index {repeat.index} of {repeat.source} is reached {repeat.count} times in the training "
            "set: what one record can do would not be bounded by max_grad_norm. Name each record "
            "once; make variants of it (augmentation) at random inside __getitem__."
        )
    return loader


def _check_sampler(loader: DataLoader[Any]) -> None:
    sampler, size = loader.sampler, len(loader.dataset)  # type: ignore[arg-type]
    plain = type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler)
    if isinstance(sampler, RandomSampler):
        plain = plain and not sampler.replacement
    # a sampler made for a part of the data set would train on that part only
    covered: Any = getattr(sampler, "dataset", sampler)
    plain = plain and size == len(covered)
    if not plain or type(loader.batch_sampler) is not BatchSampler:
        raise MisconfigurationException(
            f"The training loader chooses records with {type(sampler).__name__} and "
            f"{type(loader.batch_sampler).__name__}. Private batches are drawn by the sampling "
            "scheme, every record equally often: give shuffle=True and no sampler or batch_sampler."
        )


def check_single_loader(loaders: object, ours: object) -> None:
    """Refuse lists and dicts of training loaders."""
    if loaders is not ours:
        raise MisconfigurationException(
            "train_dataloader gives several loaders (or one inside a list or dict). One ledger "
            "covers one data set: return a single DataLoader, for several sets over a ConcatDataset."
        )


def check_optimizers(optimizers: Sequence[Optimizer], module: LightningModule) -> None:
    """Refuse anything but one optimizer that steps once over parameters of this module."""
    if not optimizers or not optimizers[0].param_groups:
        raise MisconfigurationException(
            "configure_optimizers gives no optimizer, so nothing would be trained. Return one "
            "optimizer over the parameters to train."
        )
    if len(optimizers) != 1:
        raise MisconfigurationException(
            f"configure_optimizers gives {len(optimizers)} optimizers; private training needs "
            "exactly one. Put all parameters into parameter groups of one optimizer."
        )
    optimizer = optimizers[0]
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            "LBFGS evaluates the loss several times per step, each time on the data. "
            "Use SGD, Adam or another optimizer that evaluates it once."
        )
    own = {id(parameter) for parameter in module.parameters()}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(id(parameter) not in own for parameter in trained):
        raise MisconfigurationException(
            "The optimizer holds a parameter that is not a parameter of the LightningModule, so no "
            "gradient per record can be had for it. Register it on the module."
        )
    if not trained:
        raise MisconfigurationException(
            "The optimizer holds no trainable parameter (requires_grad is False everywhere)."
        )
    held = {id(parameter) for parameter in trained}
    left = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        warn(
            f"{len(left)} trainable parameters are in no parameter group of the optimizer and will "
            f"never move: {left[:5]}. Give them to the optimizer, or freeze them with "
            "requires_grad_(False), which also makes the steps cheaper."
        )


def check_model(module: nn.Module) -> None:
    """Refuse layers that mix the records of a batch, or write what they see into their weights.

    And models of which each process holds a part.
    """
    refuse_sharded(module)
    mixing = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
        or (isinstance(part, nn.modules.instancenorm._InstanceNorm) and part.track_running_stats)
    ]
    if mixing:
        raise MisconfigurationException(
            f"Layers {mixing} normalise over the batch (BatchNorm, or InstanceNorm with running "
            "statistics): they mix records and keep statistics of the data, also when frozen or "
            "without parameters. Use GroupNorm; in a frozen pretrained backbone use "
            "torchvision.ops.FrozenBatchNorm2d."
        )
    rescaled = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
    ]
    if rescaled:
        raise MisconfigurationException(
            f"Layers {rescaled} have max_norm set: their forward pass rescales the rows that a batch "
            "looks up, without noise, so the weights tell which rows the records use. Leave max_norm "
            "out; max_grad_norm bounds what a record does."
        )


def check_training_mode(module: nn.Module) -> None:
    """Refuse trainable layers in eval mode: hooks watch layers in training mode only."""
    resting = [
        name
        for name, part in module.named_modules()
        if not part.training and any(p.requires_grad for p in part.parameters(recurse=False))
    ]
    if resting:
        raise MisconfigurationException(
            f"Layers {resting[:5]} are trainable and in eval mode, so no gradient per record can be had "
            "for them (models loaded as pretrained often come like this). Call model.train() before "
            "fit, or freeze them with requires_grad_(False)."
        )
