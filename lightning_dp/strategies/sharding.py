"""Refusals of what private training with sharded parameters (FSDP2) cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from lightning_dp._checks import MisconfigurationError
from lightning_dp._shards import is_sharded
from lightning_dp.config import PrivacyConfig

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy

__all__ = ["check_settings", "check_shards", "is_model_parallel"]

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
    from lightning.pytorch.strategies import ModelParallelStrategy

    return isinstance(strategy, ModelParallelStrategy)


def check_settings(config: PrivacyConfig, *, several_optimizers: bool) -> None:
    """Refuse settings that need more than the entries of a gradient that a process has.

    Raises:
        MisconfigurationException: naming the setting, and the cure.
    """
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
    if several_optimizers:
        parts.append("A LightningModule with several optimizers")
    if parts:
        raise MisconfigurationError(_NOT_ENTRYWISE.format(parts[0]), topic="sharded")


def check_shards(strategy: ModelParallelStrategy, module: nn.Module, optimizer: Optimizer) -> None:
    """Refuse tensor parallelism, and trained parameters that are not sharded over all processes.

    Raises:
        MisconfigurationException: naming them, and the cure.
    """
    split = strategy.device_mesh["tensor_parallel"].size()
    if split != 1:
        text = _ONE_DIMENSION.format(split, strategy.world_size)
        raise MisconfigurationError(text, topic="sharded")
    moved = {id(param) for group in optimizer.param_groups for param in group["params"]}
    trained: dict[str, Any] = {
        name: param
        for name, param in module.named_parameters()
        if id(param) in moved and param.requires_grad
    }
    whole = [name for name, param in trained.items() if not is_sharded(param)]
    if whole:
        raise MisconfigurationError(_NOT_SHARDED.format(whole[:5]), topic="sharded")
    world = strategy.world_size
    sizes = {name: param.device_mesh.size() for name, param in trained.items()}
    apart = {name: size for name, size in sizes.items() if size != world}
    if apart:
        text = _NOT_ALL_RANKS.format(list(apart)[:5], min(apart.values()), world)
        raise MisconfigurationError(text, topic="sharded")
