"""Parameters that are not whole plain tensors: the model uses other objects in their place."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dp.gradients.base import UnsupportedModelError

__all__ = ["refuse_sharded", "refuse_special"]


def refuse_sharded(module: nn.Module) -> None:
    """Refuse models of which each process holds a part: forward passes use other parameters.

    Raises:
        UnsupportedModelError: naming the parameters or modules, and the cure.
    """
    named = module.named_parameters()
    names = [name for name, param in named if type(param.data).__name__ == "DTensor"]
    names += [name for name, part in module.named_modules() if _is_fsdp(part)]
    if names:
        raise UnsupportedModelError(
            f"{_some(names)} of the model are sharded (fully_shard, FSDP or another use of DTensor): "
            "its layers use other tensors than its parameters, so no gradient per record can be had. "
            "Leave the sharding out, and use strategy='ddp' or one device."
        )


def _is_fsdp(part: nn.Module) -> bool:
    """Tell whether torch shards the module; then its package was imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    return isinstance(part, tuple(kind for kind in kinds if kind is not None))


def refuse_special(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Refuse trained parameters that are tensors of a class of their own (quantised ones, say).

    Raises:
        UnsupportedModelError: naming them and the cure.
    """
    refuse_sharded(module)
    trained = {id(param) for param in params}
    found = {
        name: type(param.data).__name__
        for name, param in module.named_parameters()
        if id(param) in trained and not is_lazy(param) and type(param.data) is not Tensor
    }
    if found:
        kinds = sorted(set(found.values()))
        raise UnsupportedModelError(
            f"{_some(list(found))} are trained and of the class {', '.join(kinds)}, whose gradients per "
            "record are not known. Freeze them with requires_grad_(False) and train plain parameters "
            "beside them (LoRA), or make them plain tensors."
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"Parameters {[name or 'the module' for name in names[:5]]}{more}"
