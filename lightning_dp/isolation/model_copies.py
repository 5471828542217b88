"""Copies of a model for one pass each, without the memory of a model for each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

__all__ = ["ModelCopies"]

_HALF = (torch.float16, torch.bfloat16)


class ModelCopies:
    """Deep copies of a model on the CPU, of which one is in use at a time: they share the weights.

    The weights are as the model's whenever a copy is made, whatever was written into those of the
    one before. Everything else of the model (buffers, attributes, hooks) is each copy's own.

    Args:
        module: is not touched.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._shared: dict[int, Tensor] = {}

    def make(self, memo: dict[int, Any] | None = None) -> LightningModule:
        """Return a copy; those of before must not be used any more.

        Args:
            memo: of ``copy.deepcopy``, with what else has its copy already.
        """
        params = [param for param in self._module.parameters() if type(param) is nn.Parameter]
        is_half = any(param.dtype in _HALF for param in params)
        memo = {} if memo is None else memo
        for param in params:
            shared = nn.Parameter(self._weight(param, is_half), param.requires_grad)
            memo[id(param)] = shared
        return copy.deepcopy(self._module, memo)

    def _weight(self, param: nn.Parameter, is_half: bool) -> Tensor:
        """Return the shared memory of a parameter, with its present value."""
        value = param.detach()
        if id(param) not in self._shared:
            dtype = torch.float32 if is_half and value.is_floating_point() else value.dtype
            self._shared[id(param)] = torch.empty_like(value, dtype=dtype, device="cpu")
        return self._shared[id(param)].copy_(value)
