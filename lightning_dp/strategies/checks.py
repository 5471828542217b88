"""Refusals and warnings about Trainer, strategy, optimizer and settings, with cause and cure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torchmetrics import Metric

from lightning_dp._refusals import warn
from lightning_dp._world import is_sharded
from lightning_dp.config import PrivacyConfig
from lightning_dp.functional import has_float64
from lightning_dp.isolation.requirements import MisconfigurationError, check_training_step
from lightning_dp.isolation.state import is_public_metric, logged_in_training
from lightning_dp.optimizers import NOISE_VARIANCE
from lightning_dp.plan.suggestion import default_delta
from lightning_dp.postprocessing import NoiseFilter
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import BatchPlan, Poisson
from lightning_dp.strategies.update_guard import trained_by

if TYPE_CHECKING:
    from lightning_dp.strategies.step import PrivateStep

__all__ = [
    "Monitors",
    "Optimizers",
    "check_estimator",
    "check_launcher",
    "check_sharding",
    "check_strategy",
    "check_trainer",
    "check_trainer_and_strategy",
    "find_optimizers",
    "is_model_parallel",
    "weak_settings",
]


_REFUSED_CALLBACKS: dict[type[Callback], str] = {
    LearningRateFinder: "it trains on the data outside the ledger; take the learning rate of "
    "python -m lightning_dp.plan, or compare some in trials of lightning_dp.search.Search",
    BatchSizeFinder: "it trains on the data outside the ledger; choose the logical batch by "
    "python -m lightning_dp.plan, and the largest physical one that fits by trying synthetic records",
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


def check_trainer(trainer: Trainer, config: PrivacyConfig) -> None:
    """Refuse Trainer settings under which ε would not hold."""
    check_trainer_and_strategy(trainer)
    overfit_batches = trainer.overfit_batches  # type: ignore[attr-defined]
    if overfit_batches:
        raise MisconfigurationError(
            f"Trainer(overfit_batches={overfit_batches}) repeats the same batches, which is "
            "not private sampling. Use limit_train_batches, or a smaller data set.",
            topic="trainer-settings",
        )
    if trainer._detect_anomaly:
        raise MisconfigurationError(
            "Trainer(detect_anomaly=True) ends a fit at the first record whose gradient is NaN, and so "
            "tells of it without noise; such a record contributes zero. Look for it on public data.",
            topic="trainer-settings",
        )
    if trainer.precision == "16-mixed" and (
        type(trainer.precision_plugin) is not MixedPrecision
        or is_model_parallel(trainer.strategy)
        or config.engine == "hooks"
    ):
        raise MisconfigurationError(
            "Trainer(precision='16-mixed') works with Lightning's own MixedPrecision, on whole models "
            "and with every engine except 'hooks': the loss scale must be constant, since one that "
            "follows overflows reacts to un-noised gradients. Use precision='bf16-mixed'.",
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
    if traits.uses_hessian and not step.engine.passes.engine.has_products:
        raise MisconfigurationError(
            f"{type(estimator).__name__} needs Hessian-vector products, which this engine does not have: "
            f"{step.engine.choice.description}. Use engine='auto'.",
            topic="hessian-products",
        )
    if optimizers.public and engine not in ("auto", "layers", "bookkeeping", "one_by_one"):
        raise MisconfigurationError(
            f"engine={engine!r} does not support several optimizers: generated rows belong to records, "
            "and some losses are public. Use engine='layers'.",
            topic="several-optimizers",
        )
    if optimizers.public and config.has_several_rows:
        raise MisconfigurationError(
            "unit and augmentations put several rows of one unit into a batch, and with several "
            "optimizers generated rows belong to single records. Train with one optimizer, or leave "
            "them out.",
            topic="several-optimizers",
        )
    device = step.params[0].device.type
    if config.secure_noise and not has_float64(device):
        raise MisconfigurationError(
            f"secure_noise=True adds noise in float64, which {device} does not have. Leave it out, or "
            "train on the CPU: Trainer(accelerator='cpu').",
            topic="secure-noise",
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
    if any(NOISE_VARIANCE in group for group in optimizers.private.param_groups):
        _check_noise_variance(config, module, type(optimizers.private).__name__)


def _check_noise_variance(config: PrivacyConfig, module: LightningModule, optimizer: str) -> None:
    """Refuse what makes the noise in p.grad unknown to an optimizer that subtracts it."""
    unknown = NoiseFilter(config.resolved_estimator(), config.postprocessing).part_without_variance
    if config.checks.gradient_edits is not None:
        unknown = f"gradient_edits={config.checks.gradient_edits!r}"
    if config.noise.bands > 1:
        unknown = f"noise={config.noise}, which is not independent between steps"
    value = module.trainer.gradient_clip_val
    if value or is_overridden("configure_gradient_clipping", module):
        unknown = f"clipping of the private gradient (gradient_clip_val={value})"
    if unknown is not None:
        raise MisconfigurationError(
            f"{optimizer} needs the variance of the noise in the private gradient, which is not known "
            f"behind {unknown}. Leave that out, or use torch.optim.AdamW.",
            topic="optimizer",
        )


def weak_settings(config: PrivacyConfig, batches: BatchPlan) -> Iterator[tuple[str, str]]:
    """Yield topic and text of a warning for each setting under which ε says less than it seems to."""
    delta, records, unit = config.target_delta, batches.num_records, config.unit_word
    if not delta * records < 1:
        warning = (
            f"target_delta={delta:g} is not below 1/N = {1 / records:.3g} for the N = {records} "
            f"{unit}s of the training set. At such a δ, a mechanism that publishes a {unit}'s data in "
            "clear, chosen at random, is called private, whatever ε is. Choose δ well "
            f"below 1/N, {default_delta(records):g} say."
        )
        yield "delta-too-large", warning
    if isinstance(config.sampling, Poisson) and not batches.sample_rate < 1:
        warning = (
            f"The batch size (batch_size · accumulate_grad_batches · processes) reaches the {records} "
            f"{unit}s of the training set, so each step uses all of them: sampling hides none, and a "
            "step costs as much ε as it can. If that is meant, say sampling=FullBatch(); else give "
            "the DataLoader a smaller batch_size."
        )
        yield "batch-size", warning


# -- optimizers ------------------------------------------------------------------------------------

_WHICH = (
    "configure_optimizers gives {} optimizers. Say which one is trained on the records, by its place "
    "among them, DifferentialPrivacy(private_optimizer={}), or by a module whose parameters it holds: "
    "private_optimizer={!r}. The others are public, and may use released and synthetic values only (a "
    "generator's optimizer next to a private discriminator's). If all are trained on the records, put "
    "all parameters into parameter groups of one optimizer."
)
_DISJOINT = (
    "The private optimizer and a public one both hold the parameters {}. What a public optimizer "
    "moves must be no part of what is trained on the records: give each parameter to one optimizer."
)
_SEVERAL_PROCESSES = (
    "configure_optimizers gives {} optimizers, and there are {} processes. Each of them would step the "
    "public ones on other random numbers, so that their weights would drift apart. Use one process: "
    "Trainer(devices=1)."
)


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of a fit.

    Args:
        private: its gradients are clipped per record and noised; each of its steps is charged.
        public: the others, in their order.
        description: for the report; None if there are no others.
    """

    private: Optimizer
    public: tuple[Optimizer, ...] = ()
    description: str | None = None

    @property
    def public_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the public ones move."""
        return tuple(p for each in self.public for p in trained_by(each))


def find_optimizers(
    optimizers: Sequence[Optimizer],
    module: LightningModule,
    named: int | str | None,
    processes: int = 1,
) -> Optimizers:
    """Find the private optimizer among them; refuse what cannot be trained.

    Args:
        optimizers: what ``configure_optimizers`` gave.
        module: whose parameters they hold.
        named: ``private_optimizer``: the place, or the dotted path of a module.
        processes: of the job.

    Raises:
        MisconfigurationException: with the cure.
    """
    if not optimizers or not optimizers[0].param_groups:
        raise MisconfigurationError(
            "configure_optimizers gives no optimizer, so nothing would be trained. Return one "
            "optimizer over the parameters to train.",
            topic="optimizer",
        )
    place = _place(optimizers, module, named)
    private = optimizers[place]
    public = tuple(each for each in optimizers if each is not private)
    if public and processes > 1:
        raise MisconfigurationError(
            _SEVERAL_PROCESSES.format(len(optimizers), processes), topic="several-optimizers"
        )
    if isinstance(private, LBFGS):
        raise MisconfigurationError(
            "LBFGS evaluates the loss several times per step, each time on the data. "
            "Use SGD, Adam or another optimizer that evaluates it once.",
            topic="optimizer",
        )
    own = {id(parameter) for parameter in module.parameters()}
    if any(id(parameter) not in own for each in optimizers for parameter in trained_by(each)):
        raise MisconfigurationError(
            "The optimizer holds a parameter that is not a parameter of the LightningModule, so its "
            "per-record gradients cannot be computed. Register it on the module.",
            topic="optimizer",
        )
    if not trained_by(private):
        raise MisconfigurationError(
            "The optimizer holds no trainable parameter (requires_grad is False everywhere).",
            topic="optimizer",
        )
    names = {id(p): name for name, p in module.named_parameters()}
    mine = {id(p) for group in private.param_groups for p in group["params"]}
    theirs = {id(p) for each in public for group in each.param_groups for p in group["params"]}
    if both := sorted(names.get(each, "?") for each in mine & theirs):
        raise MisconfigurationError(_DISJOINT.format(both[:5]), topic="several-optimizers")
    _warn_of_left(module, mine | theirs)
    return Optimizers(private, public, _described(optimizers, place, module) if public else None)


def _place(
    optimizers: Sequence[Optimizer], module: LightningModule, named: int | str | None
) -> int:
    if named is None:
        if len(optimizers) > 1:
            last = len(optimizers) - 1
            held = _parts_held(optimizers[last], module)
            raise MisconfigurationError(
                _WHICH.format(len(optimizers), last, held[0] if held else "net"),
                topic="several-optimizers",
            )
        return 0
    if isinstance(named, int):
        if not 0 <= named < len(optimizers):
            raise MisconfigurationError(
                f"private_optimizer={named}: configure_optimizers returned {len(optimizers)} optimizers. "
                f"Use 0 to {len(optimizers) - 1}.",
                topic="several-optimizers",
            )
        return named
    try:
        part = module.get_submodule(named)
    except AttributeError:
        raise MisconfigurationError(
            f"private_optimizer={named!r} must name a module of {type(module).__name__}. It has "
            f"{[name for name, _ in module.named_children()]}.",
            topic="several-optimizers",
        ) from None
    wanted = {id(p) for p in part.parameters() if p.requires_grad}
    places = [i for i, each in enumerate(optimizers) if wanted & {id(p) for p in trained_by(each)}]
    moved = {id(p) for i in places for p in trained_by(optimizers[i])}
    if len(places) != 1 or not wanted <= moved:
        raise MisconfigurationError(
            f"private_optimizer={named!r} must be a module all of whose trainable parameters are in "
            f"one optimizer; {len(places)} hold some of them. Give the optimizer's index in "
            f"configure_optimizers: private_optimizer={places[0] if places else 0}.",
            topic="several-optimizers",
        )
    return places[0]


def _warn_of_left(module: LightningModule, held: set[int]) -> None:
    left = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        warn(
            f"{len(left)} trainable parameters are in no parameter group of the optimizer and will "
            f"never move: {left[:5]}. Give them to the optimizer, or freeze them with "
            "requires_grad_(False), which also makes the steps cheaper.",
            topic="optimizer",
        )


def _described(optimizers: Sequence[Optimizer], place: int, module: LightningModule) -> str:
    """Return which of them is private, in words."""

    def words(optimizer: Optimizer) -> str:
        return f"{type(optimizer).__name__} of {', '.join(_parts_held(optimizer, module)) or '?'}"

    others = "; ".join(words(each) for i, each in enumerate(optimizers) if i != place)
    return (
        f"{words(optimizers[place])} (number {place} of {len(optimizers)}); public, on released and "
        f"synthetic values alone as far as the checks of isolation see: {others}"
    )


def _parts_held(optimizer: Optimizer, module: LightningModule) -> list[str]:
    """Return the names of the module's children that the optimizer holds parameters of."""
    held = {id(p) for p in trained_by(optimizer)}
    named = module.named_parameters()
    return list(dict.fromkeys(name.partition(".")[0] for name, p in named if id(p) in held))


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
    if config.counts_clipped:
        parts.append(
            "count_clipped=True" if config.count_clipped else f"clipping={config.clipping}"
        )
    if config.secure_noise:
        parts.append("secure_noise=True")
    if config.has_several_rows:
        parts.append("unit=UserLevel(...) or augmentations > 1")
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


# -- metrics of the training data --------------------------------------------------------------------

_CURE = (
    "It carries no noise, and what follows it steers the next steps by the records past ε. Follow a "
    "metric of public validation data, or take a schedule that is fixed in advance (StepLR, "
    "CosineAnnealingLR, OneCycleLR)."
)


class Monitors:
    """Refuses schedulers that follow a metric of the training data; says which callbacks act on one.

    Metrics of the training data are those that are logged while training: Lightning keeps them
    apart from those of validation. Which a name is shows when it is logged for the first time, so
    :meth:`check` is to be called before anything could follow it; it costs a comparison.

    Args:
        trainer: whose schedulers, callbacks and metrics.
        run: whose report says what is not covered.
    """

    def __init__(self, trainer: Trainer, run: PrivateRun) -> None:
        self._trainer = trainer
        self._run = run
        self._logged = 0  # metrics that were known at the last look
        self._said: set[str] = set()

    def begin(self) -> None:
        """Check what is known before the first step; without validation, all metrics are training's."""
        by_hand = next(self._stepped_by_hand(), None)
        if not self._trainer.enable_validation:
            if by_hand is not None:
                raise MisconfigurationError(
                    f"The module steps a {by_hand} itself, and without validation it can only be by "
                    f"a metric of the training data. {_CURE}",
                    topic="schedulers",
                )
            self._refuse_schedulers(lambda name: not is_public_metric(name))
        for name, part in self._trainer.lightning_module.named_modules():
            if isinstance(part, Metric) and part.state_dict():
                self._note(f"what the metric {name!r} counted, saved in checkpoints without noise")
        self.check()

    def check(self) -> None:
        """Look again if something was logged for the first time.

        Raises:
            MisconfigurationException: if a scheduler follows a metric of the training data.
        """
        results: Any = self._trainer.fit_loop.epoch_loop._results
        if len(results) == self._logged:
            return
        self._logged, names = len(results), logged_in_training(self._trainer)
        self._refuse_schedulers(names.__contains__)
        for who, does, name in self._acting():
            if name in names:
                self._note(f"{who}: {does}, without noise")
                self._warn_once(
                    f"{who} uses a metric of the training data: {does}. It carries no noise and ε does "
                    "not cover it; the report says so. Use a metric of public validation data, "
                    "'privacy/epsilon', or none."
                )

    def _refuse_schedulers(self, is_of_training: Callable[[str], bool]) -> None:
        for config in self._trainer.lr_scheduler_configs:
            name = config.monitor
            if config.reduce_on_plateau and name and is_of_training(name):
                raise MisconfigurationError(
                    f"The scheduler {type(config.scheduler).__name__} follows {name!r}, a metric of "
                    f"the training data. {_CURE}",
                    topic="schedulers",
                )

    def _stepped_by_hand(self) -> Iterator[str]:
        """Yield the kinds of plateau schedulers that Lightning does not step."""
        module = self._trainer.lightning_module
        returned = [config.scheduler for config in self._trainer.lr_scheduler_configs]
        stepped = {id(each) for each in returned} if module.automatic_optimization else set()
        for scheduler in (*returned, *vars(module).values()):
            if isinstance(scheduler, ReduceLROnPlateau) and id(scheduler) not in stepped:
                yield type(scheduler).__name__

    def _acting(self) -> Iterator[tuple[str, str, str]]:
        """Yield a callback with its argument, what it does with a metric, and the metric's name."""
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            kind = type(callback).__name__
            if isinstance(monitor := getattr(callback, "monitor", None), str):
                does = (
                    "what it decides (when training stops, which weights are kept) tells about the "
                    "records, and its scores are saved in checkpoints"
                )
                yield f"{kind}(monitor={monitor!r})", does, monitor
            if isinstance(filename := getattr(callback, "filename", None), str):
                for name in re.findall(r"{([^{}:!]+)", filename):
                    yield f"{kind}(filename={filename!r})", "values are in file names", name

    def _note(self, text: str) -> None:
        if text not in self._run.not_covered:
            self._run.not_covered = (*self._run.not_covered, text)

    def _warn_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            if self._trainer.is_global_zero:
                warn(message, topic="schedulers")
