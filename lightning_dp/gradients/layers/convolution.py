"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` with any stride, padding, dilation and groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients.layers.base import AbstractForm, Call
from lightning_dp.gradients.layers.bias import Bias

__all__ = ["Convolution", "convolution"]


@dataclass(frozen=True)
class Convolution(AbstractForm):
    """The weight gradient of a convolution of (n, in, *size) with output gradient (n, out, *size).

    The records' gradients are those of one convolution with n times as many groups, one record
    after the other in the channels.
    """

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        n = len(u)
        as_channels = [part.reshape(1, -1, *part.shape[2:]) for part in (v, u)]
        shape = (n * self.weight_shape[0], *self.weight_shape[1:])
        gradient = self._backward(*as_channels, shape, n * self.groups)
        return gradient.view(n, *self.weight_shape)

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        scaled = u * weights.view(-1, *[1] * (u.dim() - 1))
        return self._backward(v, scaled, self.weight_shape, self.groups)

    def _backward(self, v: Tensor, u: Tensor, shape: tuple[int, ...], groups: int) -> Tensor:
        weight = v.new_empty(1).expand(shape)  # only its shape is looked at
        gradient: Tensor = torch.ops.aten.convolution_backward(
            u, v, weight, None, self.stride, self.padding, self.dilation,
            False, [0] * len(self.stride), groups, [False, True, False],
        )[1]  # fmt: skip
        return gradient


def convolution(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, gradient: Tensor
) -> list[tuple[nn.Parameter | None, Call]]:
    """Weight and bias of one call."""
    padding, around = layer.padding, layer._reversed_padding_repeated_twice
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs, padding = F.pad(inputs, around, mode=mode), (0,) * len(layer.stride)
    form = Convolution(
        tuple(layer.weight.shape), layer.stride, padding, layer.dilation, layer.groups
    )
    bias = Bias.call(gradient.flatten(2).transpose(1, 2))
    return [(layer.weight, Call(form, inputs, gradient)), (layer.bias, bias)]
