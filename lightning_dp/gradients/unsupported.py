"""Models and calls that no engine can take apart into records, and the cures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from lightning_dp._shards import is_sharded
from lightning_dp.gradients.base import ALONE, UnsupportedModelError

__all__ = [
    "is_flat_sharded",
    "is_fully_sharded",
    "refuse_complex",
    "refuse_sharded",
    "refuse_special",
    "refuse_without_records",
]


def refuse_sharded(module: nn.Module) -> None:
    """Refuse models of which each process holds a part: forward passes use other parameters.

    Raises:
        UnsupportedModelError: naming the parameters or modules, and the cure.
    """
    named = module.named_parameters()
    names = [name for name, param in named if type(param.data).__name__ == "DTensor"]
    names += [
        name
        for name, part in module.named_modules()
        if is_fully_sharded(part) or is_flat_sharded(part)
    ]
    if names:
        raise UnsupportedModelError(
            f"{_some(names)} of the model are sharded (fully_shard, FSDP or another use of DTensor): "
            "its layers use other tensors than its parameters, so per-record gradients cannot be "
            "computed this way. Shard it by fully_shard() in configure_model, under Lightning's "
            "ModelParallelStrategy and engine='layers', or leave it whole: strategy='ddp'.",
            topic="sharded",
        )


def is_fully_sharded(part: nn.Module) -> bool:
    """Tell whether ``fully_shard`` (FSDP2) shards a module."""
    return _is_of_fsdp("FSDPModule", part)


def is_flat_sharded(part: nn.Module) -> bool:
    """Tell whether a module is a ``FullyShardedDataParallel`` (FSDP1)."""
    return _is_of_fsdp("FullyShardedDataParallel", part)


def _is_of_fsdp(name: str, part: nn.Module) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)  # imported if it is one
    return kind is not None and isinstance(part, kind)


def refuse_special(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Refuse trained modules of TorchScript and parameters of special classes (quantised ones, say).

    Raises:
        UnsupportedModelError: naming them and the cure.
    """
    refuse_script(module)
    trained = {id(param) for param in params}
    found = {
        name: type(param.data).__name__
        for name, param in module.named_parameters()
        if id(param) in trained
        and not (is_lazy(param) or is_sharded(param))
        and type(param.data) is not Tensor
    }
    if found:
        kinds = sorted(set(found.values()))
        raise UnsupportedModelError(
            f"{_some(list(found))} are trained and of the class {', '.join(kinds)}, whose gradients per "
            "record are not known. Freeze them with requires_grad_(False) and train plain parameters "
            "next to them (LoRA), or make them plain tensors.",
            topic="special-parameters",
        )


def refuse_script(module: nn.Module) -> None:
    """Refuse trained modules of TorchScript: nothing sees into the graph that runs.

    Raises:
        UnsupportedModelError: naming one and the cure.
    """
    for name, part in module.named_modules():
        is_trained = any(param.requires_grad for param in part.parameters())
        if is_trained and isinstance(part, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{name or 'The module'} is a module of TorchScript (torch.jit), and hooks do not see "
                "into the graph that runs. Train the nn.Module it was made from, and script that after "
                "the fit; or freeze its parameters: for p in module.parameters(): "
                "p.requires_grad_(False).",
                topic="torchscript",
            )


def refuse_complex(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Refuse trained parameters with complex values: their gradients take conjugates, which no rule does.

    Raises:
        UnsupportedModelError: naming them and the cure.
    """
    trained = {id(param) for param in params}
    named = module.named_parameters()
    names = [name for name, param in named if id(param) in trained and param.is_complex()]
    if names:
        raise UnsupportedModelError(
            f"{_some(names)} are complex. Leave the engine at 'auto', or keep their real and imaginary "
            "parts in one real parameter, torch.view_as_real(weight), and use "
            "torch.view_as_complex(parameter) in forward().",
            topic="special-parameters",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"Parameters {[name or 'the module' for name in names[:5]]}{more}"


def _dimensions(layer: nn.Module) -> int:
    """Return how many dimensions the input has at least, of records in the first one."""
    if isinstance(layer, nn.Linear | nn.GroupNorm):
        return 2
    if isinstance(layer, _ConvNd | _ConvTransposeNd):
        return 2 + len(layer.kernel_size)
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return 1 + len(layer.normalized_shape)
    for kind, places in ((nn.InstanceNorm1d, 1), (nn.InstanceNorm2d, 2), (nn.InstanceNorm3d, 3)):
        if isinstance(layer, kind):
            return 2 + places
    if isinstance(layer, nn.RNNCellBase | nn.Bilinear):
        return 2
    return 1


def refuse_without_records(name: str, layer: nn.Module, given: Any) -> None:
    """Refuse a call whose input has no dimension for records.

    Args:
        name: of the layer in the model.
        layer: is called.
        given: its first input.

    Raises:
        UnsupportedModelError: naming the layer and the cure.
    """
    if isinstance(given, Tensor) and given.dim() < (least := _dimensions(layer)):
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) was called with a tensor of "
            f"{given.dim()} dimensions, where {least} are needed: the first one is of the records. "
            "Call it once with all records of the batch, without a loop over them; for one record, "
            f"with x.unsqueeze(0). {ALONE}",
            topic="rows-and-records",
        )
