"""Refusals and warnings about Trainer, strategy, optimizer and settings, with cause and cure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

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
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import nn
from torch.optim import Optimizer

from lightning_dp._checks import MisconfigurationError, check_training_step
from lightning_dp._refusals import warn
from lightning_dp._world import is_sharded
from lightning_dp.config import PrivacyConfig
from lightning_dp.sampling import BatchPlan, Poisson
from lightning_dp.strategies.optimizers import Optimizers
from lightning_dp.strategies.update_guard import trained_by

if TYPE_CHECKING:
    from lightning_dp.strategies.step import PrivateStep

__all__ = [
    "check_estimator",
    "check_launcher",
    "check_sharding",
    "check_strategy",
    "check_trainer",
    "check_trainer_and_strategy",
    "is_model_parallel",
    "weak_settings",
]


_REFUSED_CALLBACKS: dict[type[Callback], str] = {
    LearningRateFinder: "it trains on the data outside the ledger; take the learning rate of "
    "python -m lightning_dp.plan, or compare some in trials of lightning_dp.search.Search",
    BatchSizeFinder: "it trains on the data outside the ledger; choose the logical batch by "
    "python -m lightning_dp.plan, and the largest physical one that fits by trying made-up records",
    GradientAccumulationScheduler: "it changes the sampling rate during the run; use a constant "
    "Trainer(accumulate_grad_batches=...)",
    StochasticWeightAveraging: "it makes an extra pass over the training data; use "
    "lightning.pytorch.callbacks.EMAWeightAveraging, which only averages weights",
    BaseFinetuning: "it changes which parameters are trained during the run; freeze them before "
    "fit with requires_grad_(False), and fit again for the next phase",
}


def check_trainer_and_strategy(trainer: Trainer) -> None:
    """Refuse a Trainer that cannot be made private at all."""
    if not isinstance(trainer, Trainer):  # of the other copy of the same classes
        raise MisconfigurationError(
            f"The Trainer comes from {type(trainer).__module__.split('.')[0]!r}, lightning-dp works "
            "with 'lightning'. Import everything from lightning.pytorch, nothing from "
            "pytorch_lightning.",
            topic="pytorch-lightning",
        )
    check_strategy(trainer.strategy)


def check_trainer(trainer: Trainer) -> None:
    """Refuse Trainer settings under which ε would not hold."""
    check_trainer_and_strategy(trainer)
    overfit_batches = trainer.overfit_batches  # type: ignore[attr-defined]
    if overfit_batches:
        raise MisconfigurationError(
            f"Trainer(overfit_batches={overfit_batches}) repeats the same batches, which is "
            "not private sampling. Use limit_train_batches, or a smaller data set.",
            topic="trainer-settings",
        )
    if trainer.precision == "16-mixed":
        raise MisconfigurationError(
            "Trainer(precision='16-mixed') scales the loss by a factor that reacts to un-noised "
            "gradients. Use precision='bf16-mixed'.",
            topic="trainer-settings",
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REFUSED_CALLBACKS.items():
            if isinstance(callback, kind):
                raise MisconfigurationError(
                    f"The callback {type(callback).__name__} cannot be used in private training: "
                    f"{reason}.",
                    topic="trainer-callbacks",
                )
    check_training_step(trainer.lightning_module)
    if trainer.gradient_clip_val:
        warn(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) acts on the gradient that is "
            "already private, noise included. The bound per record is max_grad_norm.",
            topic="gradient-edits",
        )


def check_strategy(strategy: Strategy) -> None:
    """Refuse strategies that shard parameters otherwise than FSDP2, or copy the running process."""
    kind = type(strategy).__name__
    # the second group derives from the first
    is_known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy) or is_model_parallel(
        strategy
    )
    if not is_known or isinstance(
        strategy, DeepSpeedStrategy | XLAStrategy | SingleDeviceXLAStrategy
    ):
        raise MisconfigurationError(
            f"The strategy {kind} is not supported. Use strategy='auto' on one device, strategy='ddp', "
            "or where a model does not fit on one device, ModelParallelStrategy(data_parallel_size=..., "
            "tensor_parallel_size=1) with fully_shard() in configure_model.",
            topic="strategy",
        )
    check_launcher(strategy)


def check_launcher(strategy: Strategy) -> None:
    """Refuse launchers that copy the running process."""
    if "MultiProcessing" in type(strategy.launcher).__name__:
        raise MisconfigurationError(
            "Launchers that spawn or fork (ddp_spawn, ddp_fork, ddp_notebook; a notebook takes one "
            "where there are several devices) leave the ledger of the child processes behind. Use "
            "strategy='ddp' in a script, or one process: Trainer(devices=1) with strategy='auto'.",
            topic="strategy",
        )


def check_estimator(
    config: PrivacyConfig, step: PrivateStep, module: LightningModule, optimizers: Optimizers
) -> None:
    """Refuse what the estimator or the engine cannot train, before anything is charged.

    Raises:
        MisconfigurationException: naming the cure.
    """
    estimator, is_automatic = config.resolved_estimator(), module.automatic_optimization
    engine, traits = config.engine, estimator.traits
    if traits.uses_hessian and not step.engine.watched.engine.has_products:
        raise MisconfigurationError(
            f"{estimator} needs Hessian-vector products, which this engine does not have: "
            f"{step.engine.choice.description}. Use engine='layers', and change a layer that it "
            "does not cover.",
            topic="hessian-products",
        )
    if optimizers.public and engine not in ("auto", "layers", "bookkeeping", "one_by_one"):
        raise MisconfigurationError(
            f"engine={engine!r} does not know that generated rows belong to records, nor which loss is "
            "public, as several optimizers need it. Use engine='layers'.",
            topic="several-optimizers",
        )
    if step.one_record and not is_automatic:
        raise MisconfigurationError(
            "engine='one_by_one' runs training_step once for each record, and manual optimization "
            "would step the optimizer each time. Use automatic optimization: return the loss, and "
            "leave manual_backward and the optimizer out of training_step.",
            topic="one-by-one",
        )
    if (traits.uses_hessian or traits.queries_per_step > 1) and not is_automatic:
        raise MisconfigurationError(
            f"{estimator} must run training_step several times on a batch, which manual optimization "
            "does not allow. Use automatic optimization.",
            topic="manual-optimization",
        )
    estimator.check(optimizers.private)


def weak_settings(config: PrivacyConfig, batches: BatchPlan) -> Iterator[tuple[str, str]]:
    """Yield topic and text of a warning for each setting under which ε says less than it seems to."""
    delta, records = config.target_delta, batches.num_records
    if not delta * records < 1:
        warning = (
            f"target_delta={delta:g} is not below 1/N = {1 / records:.3g} for the N = {records} "
            "records of the training set. At such a δ, a mechanism that publishes a record of one "
            "person in clear, chosen at random, is called private, whatever ε is. Choose δ well "
            f"below 1/N, {_well_below(records):g} say."
        )
        yield "delta-too-large", warning
    if isinstance(config.sampling, Poisson) and not batches.sample_rate < 1:
        warning = (
            f"The batch size (batch_size · accumulate_grad_batches · processes) reaches the {records} "
            "records of the training set, so each step uses all of them: sampling hides nobody, and a "
            "step costs as much ε as it can. If that is meant, say sampling=FullBatch(); else give "
            "the DataLoader a smaller batch_size."
        )
        yield "batch-size", warning


def _well_below(records: int) -> float:
    """Return a power of ten that is at most a tenth of 1/N."""
    return float(f"1e-{len(str(records)) + 1}")


# -- sharded parameters ----------------------------------------------------------------------------

_ONE_DIMENSION = (
    "ModelParallelStrategy(tensor_parallel_size={}) splits layers, so that a record's gradient is on "
    "several processes, and its norm on none. Shard over data-parallel ranks alone: "
    "ModelParallelStrategy(data_parallel_size={}, tensor_parallel_size=1)."
)
_NOT_SHARDED = (
    "{} are trained and not sharded: under ModelParallelStrategy nothing would add their gradients up "
    "over the ranks. Call fully_shard(self.model, mesh=self.device_mesh['data_parallel']) in "
    "configure_model, after its blocks; or use strategy='ddp' for a model that fits on one device."
)
_NOT_ALL_RANKS = (
    "{} are sharded over {} of {} processes: what the others add up of their records would not be in "
    "these, and they would train apart. Shard over all data-parallel ranks: fully_shard(layer, "
    "mesh=self.device_mesh['data_parallel']) in configure_model."
)
_NOT_ENTRYWISE = (
    "{} does not work on sharded parameters: it looks at more than one entry of a gradient at once, and "
    "each process has a part of them. Leave it out, or use strategy='ddp'."
)


def is_model_parallel(strategy: Strategy) -> TypeGuard[ModelParallelStrategy]:
    """Tell whether it is Lightning's strategy for FSDP2."""
    return isinstance(strategy, ModelParallelStrategy)


def check_sharding(
    strategy: Strategy, module: nn.Module, config: PrivacyConfig, optimizers: Optimizers
) -> None:
    """Refuse what private training with sharded parameters (FSDP2) cannot do.

    Raises:
        MisconfigurationException: naming the setting or the parameters, and the cure.
    """
    if is_model_parallel(strategy):
        _check_settings(config, optimizers)
        _check_shards(strategy, module, optimizers.private)


def _check_settings(config: PrivacyConfig, optimizers: Optimizers) -> None:
    """Refuse settings that need more than the entries of a gradient that a process has."""
    estimator = config.resolved_estimator()
    parts: list[Any] = [each for each in config.postprocessing if not each.is_entrywise]
    if not estimator.traits.is_entrywise:
        parts.append(estimator)
    if config.noise_schedule.chosen != "in advance":
        parts.append(f"noise_schedule={config.noise_schedule}")
    if config.count_clipped:
        parts.append("count_clipped=True")
    if config.engine not in ("auto", "layers", "bookkeeping", "ghost"):
        parts.append(f"engine={config.engine!r}")
    if optimizers.public:
        parts.append("A LightningModule with several optimizers")
    if parts:
        raise MisconfigurationError(_NOT_ENTRYWISE.format(parts[0]), topic="sharded")


def _check_shards(strategy: ModelParallelStrategy, module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse tensor parallelism, and trained parameters that are not sharded over all processes."""
    split = strategy.device_mesh["tensor_parallel"].size()
    if split != 1:
        text = _ONE_DIMENSION.format(split, strategy.world_size)
        raise MisconfigurationError(text, topic="sharded")
    moved = {id(param) for param in trained_by(optimizer)}
    named: Iterator[tuple[str, Any]] = module.named_parameters()
    trained = {name: param for name, param in named if id(param) in moved}
    whole = [name for name, param in trained.items() if not is_sharded(param)]
    if whole:
        raise MisconfigurationError(_NOT_SHARDED.format(whole[:5]), topic="sharded")
    world = strategy.world_size
    sizes = {name: param.device_mesh.size() for name, param in trained.items()}
    apart = {name: size for name, size in sizes.items() if size != world}
    if apart:
        text = _NOT_ALL_RANKS.format(list(apart)[:5], min(apart.values()), world)
        raise MisconfigurationError(text, topic="sharded")
