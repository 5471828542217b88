"""What each layer type does with its parameters: one function in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from opacus.layers.dp_multihead_attention import SequenceBias
from torch import nn

from lightning_dp.gradients.layers.any_layer import any_layer
from lightning_dp.gradients.layers.attention import multihead_attention
from lightning_dp.gradients.layers.base import (
    AbstractForm,
    Call,
    Rows,
    Uses,
)
from lightning_dp.gradients.layers.convolution import convolution
from lightning_dp.gradients.layers.embedding import embedding
from lightning_dp.gradients.layers.linear import linear
from lightning_dp.gradients.layers.normalisation import (
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)
from lightning_dp.gradients.layers.parameter_gradients import Memory, ParameterGradients
from lightning_dp.gradients.layers.sequence_bias import sequence_bias

__all__ = [
    "RULES",
    "AbstractForm",
    "Call",
    "Memory",
    "ParameterGradients",
    "Rows",
    "Rule",
    "Uses",
    "any_layer",
    "rule_of",
]

# (layer, its input, the gradient of its output) -> every parameter with its use in this call;
# the tensors have records first. That of nn.MultiheadAttention is also told of the call.
Rule = Callable[..., Uses]

RULES: Mapping[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: convolution,
    nn.Embedding: embedding,
    nn.LayerNorm: layer_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm1d: instance_norm,
    nn.InstanceNorm2d: instance_norm,
    nn.InstanceNorm3d: instance_norm,
    nn.RMSNorm: rms_norm,
    nn.MultiheadAttention: multihead_attention,
    SequenceBias: sequence_bias,
}


def rule_of(layer: nn.Module, rules: Mapping[type[nn.Module], Rule] = RULES) -> Rule:
    """The rule of a layer's type, or of the one whose forward pass it inherits."""
    for kind in type(layer).__mro__:
        if kind in rules and type(layer).forward is getattr(kind, "forward", None):
            return rules[kind]
    return any_layer
