"""The table of layer types: the rule that tells how each of them uses its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from opacus.layers.dp_multihead_attention import SequenceBias
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_dp._norms import FixedNorm
from lightning_dp.gradients import opacus_layers
from lightning_dp.gradients.attention import multihead_attention, refuse_attention
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.convolution import convolution
from lightning_dp.gradients.embedding_bag import embedding_bag
from lightning_dp.gradients.forms import Uses
from lightning_dp.gradients.layers import (
    embedding,
    fixed_norm,
    group_norm,
    instance_norm,
    layer_norm,
    linear,
    rms_norm,
    sequence_bias,
)

__all__ = ["RULES", "Rule", "is_by_position", "refuse_options", "rule_of"]


_CURE = "Use engine='hooks', or change the layer."
_FIX = "lightning_dp.fix(model) puts a layer of Opacus in its place."

# (layer, its input, the gradient of its output) -> every parameter with its use in this call;
# the tensors have records first. That of nn.MultiheadAttention is also told of the call.
Rule = Callable[..., Uses]

RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding_bag,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.RMSNorm: rms_norm,
    FixedNorm: fixed_norm,
    nn.MultiheadAttention: multihead_attention,
    SequenceBias: sequence_bias,
}


def rule_of(layer: nn.Module, rules: Mapping[type[nn.Module], Rule] = RULES) -> Rule | None:
    """Return the rule of a layer's type, or of the one whose forward pass it inherits; else None."""
    for kind in type(layer).__mro__:
        if kind in rules and type(layer).forward is getattr(kind, "forward", None):
            return rules[kind]
    return None


def is_by_position(layer: nn.Module, dim: int, dimensions: int) -> bool:
    """Tell whether a layer treats each entry of a dimension of its input alike.

    Args:
        layer: has a rule.
        dim: the dimension.
        dimensions: how many the input has.
    """
    if isinstance(layer, nn.Embedding):
        return True
    if isinstance(layer, nn.Linear):
        return dim < dimensions - 1
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return dim < dimensions - len(layer.normalized_shape)
    return False


def refuse_options(name: str, layer: nn.Module, rule: Rule | None) -> None:
    """Refuse options under which a layer's gradient is not what its rule says.

    Args:
        name: of the layer in the model.
        layer: any layer.
        rule: of its type, if there is one.
    """
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(layer, option):
                raise UnsupportedModelError(
                    f"{name} ({type(layer).__name__}) has {option} set. {_CURE}",
                    topic="unsupported-layer",
                )
    opacus_layers.refuse(name, layer, rule is not None)
    hides_records = isinstance(layer, nn.RNNBase | nn.MultiheadAttention)
    if hides_records and rule is not multihead_attention:
        cure = _FIX if isinstance(layer, nn.RNNBase) else _CURE
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) hides its records. {cure}", topic="attention"
        )
    if is_parametrized(layer):
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) is parametrized. {_CURE}", topic="changed-layer"
        )
    if rule is multihead_attention:
        refuse_attention(name, cast(nn.MultiheadAttention, layer))
        return
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    if rule is None and own_parameters_are_trained(layer):
        raise UnsupportedModelError(
            f"{name or 'The module'} ({type(layer).__name__}) has own parameters "
            f"({sorted(names)}) and no rule is known of its type.",
            topic="unsupported-layer",
        )
    if rule is not None and not names <= {"weight", "bias"}:
        raise UnsupportedModelError(
            f"{name} ({type(layer).__name__}) has parameters that its type does not: "
            f"{sorted(names - {'weight', 'bias'})}. {_CURE}",
            topic="changed-layer",
        )


def own_parameters_are_trained(layer: nn.Module) -> bool:
    """Tell whether calls of the layer itself use trained parameters."""
    return any(param.requires_grad for param in opacus_layers.own_parameters(layer))
