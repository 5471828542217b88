"""What each layer type does with its parameters: one function in one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_dp.gradients.layers.base import AbstractForm, Call, ParameterGradients
from lightning_dp.gradients.layers.convolution import convolution
from lightning_dp.gradients.layers.embedding import embedding
from lightning_dp.gradients.layers.linear import linear
from lightning_dp.gradients.layers.normalisation import (
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)

__all__ = ["RULES", "AbstractForm", "Call", "ParameterGradients", "Rule"]

# (layer, its input, the gradient of its output) -> every parameter with its use in this call;
# both tensors have records first.
Rule = Callable[[Any, Tensor, Tensor], list[tuple[nn.Parameter | None, Call]]]

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
}
