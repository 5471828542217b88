"""``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d`` with any stride, padding, dilation and groups."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.gradients.layers.base import AbstractForm, Call, Uses
from lightning_dp.gradients.layers.bias import Bias

__all__ = ["Convolution", "convolution"]


_TOGETHER = 32
_PATCH_ENTRIES = 1 << 19
_FASTEST: dict[Any, bool] = {}  # whether matrix products are faster, for shapes that were seen


@dataclass(frozen=True)
class Convolution(AbstractForm):
    """The weight gradient of a convolution of (n, in, *size) with output gradient (n, out, *size).

    The records' gradients are those of one convolution with n times as many groups, one record
    after the other in the channels, or products with the patches of the input: whichever was
    faster on the first batch.
    """

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def rows(self, v: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        if self.writes_out(v, u):
            return self._matrix_products(v, u, out)
        return self._one_convolution(v, u)

    def writes_out(self, v: Tensor, u: Tensor) -> bool:
        """Whether matrix products are faster than one convolution; no rule is right everywhere."""
        fixed = v.device.type != "cpu" or torch.are_deterministic_algorithms_enabled()
        if fixed or self.groups > 1 or len(self.stride) != 2:
            return False
        key = (self, v.shape[1:], u.shape[2:])
        if key not in _FASTEST:
            times: dict[Any, float] = {}
            for way in (self._one_convolution, self._matrix_products) * 3:
                start = time.process_time()
                way(v, u)
                times[way] = min(times.get(way, math.inf), time.process_time() - start)
            _FASTEST[key] = times[self._matrix_products] < times[self._one_convolution]
        return _FASTEST[key]

    def _matrix_products(self, v: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """From all patches of the input, a few records at a time so that they stay in the cache."""
        entries = math.prod(self.weight_shape[1:])
        size = max(1, _PATCH_ENTRIES // (entries * math.prod(u.shape[2:])))
        total = u.new_empty(len(u), *self.weight_shape) if out is None else out
        as_matrices, u = total.view(len(u), -1, entries), u.flatten(2)
        options = (self.weight_shape[2:], self.dilation, self.padding, self.stride)
        for part in (slice(start, start + size) for start in range(0, len(u), size)):
            patches = F.unfold(v[part], *options)
            torch.bmm(u[part], patches.transpose(1, 2), out=as_matrices[part])
        return total

    def _one_convolution(self, v: Tensor, u: Tensor) -> Tensor:
        """As groups of one convolution, some records at a time: batches of every size stay fast."""
        parts = []
        for x, y in zip(torch.split(v, _TOGETHER), torch.split(u, _TOGETHER), strict=True):
            n = len(x)
            x, y = (part.reshape(1, -1, *part.shape[2:]) for part in (x, y))
            shape = (n * self.weight_shape[0], *self.weight_shape[1:])
            parts.append(self._backward(x, y, shape, n * self.groups))
        return torch.cat(parts).view(len(u), *self.weight_shape)

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


def convolution(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, inputs: Tensor, gradient: Tensor) -> Uses:
    """Weight and bias of one call."""
    padding, around = layer.padding, layer._reversed_padding_repeated_twice
    if isinstance(padding, str) or layer.padding_mode != "zeros":
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        inputs, padding = F.pad(inputs, around, mode=mode), (0,) * len(layer.stride)
    form = Convolution(
        tuple(layer.weight.shape), layer.stride, padding, layer.dilation, layer.groups
    )
    bias = Bias.call(gradient.flatten(2).sum(2))
    return [(layer.weight, Call(form, inputs, gradient)), (layer.bias, bias)]
