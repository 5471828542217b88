"""``nn.LayerNorm``, ``nn.GroupNorm``, ``nn.InstanceNorm1d`` to ``3d`` and ``nn.RMSNorm``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients.layers.base import AbstractForm, Call, Rows, Uses

__all__ = ["Scale", "group_norm", "instance_norm", "layer_norm", "rms_norm"]

_SLICE_ENTRIES = 1 << 17


@dataclass(frozen=True)
class Scale(AbstractForm):
    """Σ_t v_it u_it, entry by entry, over all dimensions that the parameter does not have.

    Args:
        sum_over: those dimensions; the first one, of the records, is not among them.
    """

    sum_over: tuple[int, ...]

    def rows(self, v: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        if not self.sum_over:
            return v * u
        size = max(1, _SLICE_ENTRIES // (u[:1].numel() or 1))  # products that stay in the cache
        parts = zip(torch.split(v, size), torch.split(u, size), strict=True)
        return torch.cat([(a * b).sum(self.sum_over) for a, b in parts])

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        total: Tensor = torch.tensordot(weights, self.rows(v, u), dims=1)
        return total


def layer_norm(layer: nn.LayerNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """Weight and bias of one call."""
    v = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    return _uses(layer, v, gradient, range(1, gradient.dim() - len(layer.normalized_shape)))


def rms_norm(layer: nn.RMSNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """The weight of one call."""
    shape = list(layer.normalized_shape)
    v = F.rms_norm(inputs, shape, eps=layer.eps)
    return _uses(layer, v, gradient, range(1, gradient.dim() - len(shape)))[:1]


def group_norm(layer: nn.GroupNorm, inputs: Tensor, gradient: Tensor) -> Uses:
    """Weight and bias of one call; one entry for each channel, the second dimension."""
    v = F.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return _uses(layer, v, gradient, range(2, gradient.dim()))


def instance_norm(
    layer: nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d,
    inputs: Tensor,
    gradient: Tensor,
) -> Uses:
    """Weight and bias of one call; one entry for each channel, the second dimension."""
    return _uses(layer, F.instance_norm(inputs, eps=layer.eps), gradient, range(2, gradient.dim()))


def _uses(layer: Any, v: Tensor, u: Tensor, sum_over: range) -> Uses:
    dimensions = tuple(sum_over)
    bias = u.sum(dimensions) if dimensions else u
    scale = Call(Scale(dimensions), v, u)
    return [(layer.weight, scale), (getattr(layer, "bias", None), Rows.call(bias))]
