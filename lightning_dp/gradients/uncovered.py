"""Layers that the book-keeping engine does not cover, and why."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp.gradients import opacus_layers
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.layers import Rule, any_layer, attention
from lightning_dp.gradients.layers.attention import multihead_attention

__all__ = ["is_compiled", "refuse_compiled", "refuse_options"]

_CURE = "Use engine='hooks', or change the layer."


def is_compiled(layer: nn.Module) -> bool:
    """Tell whether calls of this very module run a compiled graph."""
    in_place = getattr(layer, "_compiled_call_impl", None) is not None
    is_script = isinstance(layer, torch.jit.ScriptModule)
    return in_place or is_script or type(layer).__name__ == "OptimizedModule"


def refuse_compiled(name: str, layer: nn.Module) -> None:
    """Inside a compiled module hooks do not see the graph that is differentiated."""
    if is_compiled(layer):
        raise UnsupportedModelError(
            f"{name or 'The module'} is compiled, and hooks do not see into the graph that runs. Fit it "
            "without torch.compile and torch.jit, or freeze it with requires_grad_(False)."
        )


def refuse_options(name: str, layer: nn.Module, rule: Rule) -> None:
    """Options under which a layer's gradient is not what its rule says."""
    if isinstance(layer, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(layer, option):
                raise UnsupportedModelError(f"{name} (Embedding) has {option} set. {_CURE}")
    opacus_layers.refuse(name, layer, rule is not any_layer)
    hides_records = isinstance(layer, nn.RNNBase | nn.MultiheadAttention)
    if hides_records and rule is not multihead_attention:
        raise UnsupportedModelError(f"{name} ({type(layer).__name__}) hides its records. {_CURE}")
    if is_parametrized(layer):
        raise UnsupportedModelError(f"{name} ({type(layer).__name__}) is parametrized. {_CURE}")
    if rule is multihead_attention:
        attention.refuse(name, cast(nn.MultiheadAttention, layer))
        return
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    if rule is not any_layer and not names <= {"weight", "bias"}:
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) has parameters that its type does not: "
            f"{sorted(names - {'weight', 'bias'})}. {_CURE}"
        )
    if rule is any_layer and names and any(True for _ in layer.buffers(recurse=False)):
        raise UnsupportedModelError(f"{name} ({type(layer).__name__}) has buffers. {_CURE}")
