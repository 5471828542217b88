"""``nn.LayerNorm``, ``nn.GroupNorm``, ``nn.InstanceNorm1d`` to ``3d`` and ``nn.RMSNorm``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients.layers.base import AbstractForm, Call
from lightning_dp.gradients.layers.bias import Bias

__all__ = ["Scale", "group_norm", "instance_norm", "layer_norm", "rms_norm"]

Uses = list[tuple[nn.Parameter | None, Call]]


@dataclass(frozen=True)
class Scale(AbstractForm):
    """Σ_t v_it u_it, entry by entry, for v and u of shape (n, T, *parameter shape)."""

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        return (v * u).sum(1)

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        return torch.tensordot(weights, (v * u).sum(1), dims=1)


def layer_norm(layer: nn.LayerNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """Weight and bias of one call."""
    normalised = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    u = _positions(gradient, layer.normalized_shape)
    scale = Call(Scale(), _positions(normalised, layer.normalized_shape), u)
    return [(layer.weight, scale), (layer.bias, Bias.call(u))]


def rms_norm(layer: nn.RMSNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """The weight of one call."""
    shape = list(layer.normalized_shape)
    v = _positions(F.rms_norm(inputs, shape, eps=layer.eps), tuple(shape))
    return [(layer.weight, Call(Scale(), v, _positions(gradient, tuple(shape))))]


def group_norm(layer: nn.GroupNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """Weight and bias of one call."""
    return _of_channels(layer, F.group_norm(inputs, layer.num_groups, eps=layer.eps), gradient)


def instance_norm(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d,
    inputs: Tensor,
    gradient: Tensor,
) -> Uses:
    """Weight and bias of one call."""
    return _of_channels(layer, F.instance_norm(inputs, eps=layer.eps), gradient)


def _of_channels(
    layer: nn.GroupNorm | nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d,
    normalised: Tensor,
    gradient: Tensor,
) -> Uses:
    """One weight and one bias for each channel, the second dimension."""
    n, channels = gradient.shape[:2]
    v, u = (part.reshape(n, channels, -1).transpose(1, 2) for part in (normalised, gradient))
    return [(layer.weight, Call(Scale(), v, u)), (layer.bias, Bias.call(u))]


def _positions(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(n, ..., *shape) as (n, T, *shape)."""
    return tensor.reshape(len(tensor), -1, *shape)
