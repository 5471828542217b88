"""A whole copy of a model that is sharded over processes (FSDP2), for passes of one of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dp._shards import is_sharded
from lightning_dp.gradients.base import is_fully_sharded

__all__ = ["whole_copy"]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def whole_copy(module: LightningModule, *, is_wanted: bool) -> LightningModule | None:
    """Return a copy on the CPU with whole parameters and without torch's sharding; on one process.

    All processes call it together: one parameter after the other is gathered, and let go where no copy
    is wanted. Where it is, it takes the memory of all parameters once.

    Args:
        module: in which parts are sharded by ``fully_shard``.
        is_wanted: on this process.
    """
    memo: dict[int, Any] = {}
    for param in module.parameters():
        whole = _whole(param)
        if is_wanted and whole is not None:
            memo[id(param)] = whole
    if not is_wanted:
        return None
    sharded = [part for part in module.modules() if is_fully_sharded(part)]
    for part in sharded:
        memo[id(part)] = object.__new__(_class_before(part))
    for value in _meshes(module):
        memo[id(value)] = value
    trainer, module.trainer = module.trainer, None
    try:
        for part in sharded:
            memo[id(part)].__dict__.update(copy.deepcopy(dict(_own(part)), memo))
        copied = copy.deepcopy(module, memo)
    finally:
        module.trainer = trainer
    copied.trainer = trainer
    return copied


def _whole(param: Any) -> nn.Parameter | None:
    """Gather a sharded parameter."""
    if not is_sharded(param):
        return None
    return nn.Parameter(param.detach().full_tensor().cpu(), param.requires_grad)


def _class_before(part: nn.Module) -> type:
    """Return the class that a module had before ``fully_shard`` gave it a subclass of it."""
    return next(kind for kind in type(part).__mro__[1:] if kind.__name__ != "FSDPModule")


def _own(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's attributes without those of torch's sharding."""
    for name, value in vars(part).items():
        if name in _HOOKS:
            yield name, type(value)((k, v) for k, v in value.items() if not _is_of_sharding(v))
        elif not name.startswith("__composable_api"):
            yield name, value


def _is_of_sharding(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # some are wrapped
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed")


def _meshes(module: nn.Module) -> Iterator[DeviceMesh]:
    """Yield meshes of devices that parts of a model keep: they are of this process, and not copied."""
    for part in module.modules():
        for value in vars(part).values():
            found = value.values() if isinstance(value, Mapping) else (value,)
            yield from (each for each in found if isinstance(each, DeviceMesh))
