"""Copies of a model for one pass each, without the memory of a model for each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import Tensor, nn

__all__ = ["ModelCopies"]

_HALF = (torch.float16, torch.bfloat16)
_LARGE = 1 << 16  # entries
_ENTRIES = 4096  # that are looked at, each: at the beginning, at the end, and in between


class ModelCopies:
    """Deep copies of a model on the CPU, of which one is in use at a time: they share the weights.

    The weights are as the model's whenever a copy is made, whatever was written into those of the
    one before. Large ones are copied again only if autograd's counter of writes, or a look at some of
    their entries, shows a difference. Everything else of the model (buffers, attributes,
    hooks) is each copy's own.

    Args:
        module: is not touched.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._shared: dict[int, _Shared] = {}

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
        made = copy.deepcopy(self._module, memo)
        _uncompile(made)
        return made

    def _weight(self, param: nn.Parameter, is_half: bool) -> Tensor:
        """Return the shared memory of a parameter, with its present value."""
        if id(param) not in self._shared:
            dtype = torch.float32 if is_half and param.is_floating_point() else param.dtype
            self._shared[id(param)] = _Shared(param, dtype)
        return self._shared[id(param)].renewed()


class _Shared:
    """The values of one weight, in memory that copies share.

    Args:
        param: of the model.
        dtype: of the copies.
    """

    def __init__(self, param: nn.Parameter, dtype: torch.dtype) -> None:
        self._param = param
        self._tensor = torch.empty_like(param.detach(), dtype=dtype, device="cpu")
        self._state: tuple[int, ...] = ()  # when both were the same

    def renewed(self) -> Tensor:
        """Return the memory of the copies, with the values of the model."""
        value, own = self._param.detach(), self._tensor
        is_large = value.numel() > _LARGE
        if not is_large or self._state != self._counted() or not _look_same(value, own):
            own.copy_(value)
            self._state = self._counted()
        return own

    def _counted(self) -> tuple[int, ...]:
        both = self._param, self._tensor
        return tuple(0 if each.is_inference() else each._version for each in both) + tuple(
            each.data_ptr() for each in both
        )


def _look_same(value: Tensor, own: Tensor) -> bool:
    """Compare some entries, since writes into ``.data`` are not counted."""
    flat, other = value.reshape(-1), own.reshape(-1)
    ends = slice(None, _ENTRIES), slice(-_ENTRIES, None), slice(None, None, len(flat) // _ENTRIES)
    return all(torch.equal(other[part], flat[part].to(other)) for part in ends)


def _uncompile(copied: LightningModule) -> None:
    """Let a copy of a model run its own code, where Lightning compiled the whole of the original.

    The compiled functions are attributes of the LightningModule, and a copy has those of the
    original, which run it instead.
    """
    for part in copied.modules():
        if isinstance(part, LightningModule) and part._compiler_ctx is not None:
            to_uncompiled(part)
