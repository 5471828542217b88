"""Copies of a model for one pass each, without the memory of a model for each."""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import to_uncompiled
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dp._fingerprint import fingerprint
from lightning_dp._held import same_tensor
from lightning_dp._lazy_copies import addresses_of, is_one_memory, is_plain, lazily_copied

__all__ = ["ModelCopies", "empty", "is_much", "may_be_written", "same_elsewhere", "state_of"]

_HALF = (torch.float16, torch.bfloat16)
_LARGE = 1 << 16  # entries
_MUCH = 64 << 20  # bytes of weights from which on freed memory is given back after each pass
_FEW_BYTES = 16 << 20  # of buffers that are compared after each pass
_ENTRIES = 4096  # that are looked at, each: at the beginning, at the end, and in between


class ModelCopies:
    """Deep copies of a model on the CPU, of which one is in use at a time: they share the weights.

    The weights are as the model's whenever a copy is made, whatever was written into those of the
    one before. A weight that is on the CPU is read from the model's own memory, and copied by whoever
    first writes to it, in any way that torch knows (into ``.data``, by an optimizer, through NumPy).
    Of other weights (on a device, of half precision, in a mapped file) one copy is read so by all; it
    is made again only if the model's own were written to: if autograd's counter of writes, or a look
    at some of their entries, shows it. Everything else of the model (buffers, attributes, hooks) is
    each copy's own.

    Args:
        module: keeps its values and its memory.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._shared: dict[int, _Shared] = {}

    def release(self) -> None:
        """Let the weights be the model's alone again, when no copy is in use any more."""
        self._shared.clear()
        if is_much(self._module):
            gc.collect()  # graphs of the passes, which hold weights
            _give_back()
        for param in self._module.parameters():
            if is_plain(param):
                param.data_ptr()  # whoever asks for it may write: torch ends the sharing

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
        """Return a parameter's present value in memory that is not copied for this copy."""
        converts = is_half and param.is_floating_point() and param.dtype != torch.float32
        if not converts and (lazy := lazily_copied(param)) is not None:
            return lazy
        if id(param) not in self._shared:
            dtype = torch.float32 if is_half and param.is_floating_point() else param.dtype
            self._shared[id(param)] = _Shared(param, dtype)
        return self._shared[id(param)].renewed()


def empty(module: nn.Module) -> None:
    """Free the memory of a copy: modules are full of cycles, and a dozen must not wait for gc."""
    gives_back = is_much(module)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.grad = None
        tensor.data = tensor.new_empty(0)
    if gives_back:
        _give_back()


def state_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights and buffers, by their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def may_be_written(module: nn.Module, copied: nn.Module) -> bool:
    """Tell whether weights or buffers of a copy may not be the model's, where that is seen at once."""
    now, own = dict(state_of(copied)), dict(state_of(module))
    buffers = [name for name, _ in module.named_buffers()]
    if now.keys() != own.keys() or sum(own[name].nbytes for name in buffers) > _FEW_BYTES:
        return True
    weights = own.keys() - set(buffers)
    if not all(is_one_memory(own[name], now[name]) for name in weights):
        return True
    return not all(same_elsewhere(own[name].detach(), now[name]) for name in buffers)


def same_elsewhere(own: Tensor, after: Tensor) -> bool:
    """True if a model's tensor and its copy's on the host are equal, also of another precision.

    A device tells by a number; what is on it is moved only where that number differs.
    """
    own = own.to(after.dtype)
    if own.device == after.device or own.shape != after.shape or own.layout != torch.strided:
        return same_tensor(own.cpu(), after)
    return int(fingerprint([own])) == int(fingerprint([after])) or same_tensor(own.cpu(), after)


def is_much(module: nn.Module) -> bool:
    """Tell whether a model is so large that freed memory is given back after each pass."""
    return sum(0 if is_lazy(param) else param.nbytes for param in module.parameters()) > _MUCH


def _give_back() -> None:
    """Return freed memory to the system; of other allocators than glibc's nothing is asked.

    What the passes of a probe left to it came on top of all that the fit needs.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return found


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
        """Return the values of the model, in memory that whoever writes first has copied."""
        value, own = self._param.detach(), self._tensor
        is_large = value.numel() > _LARGE
        if not is_large or self._state != self._counted() or not _look_same(value, own):
            own.copy_(value)
            self._state = self._counted()
        lazy = lazily_copied(own)
        return own if lazy is None else lazy

    def _counted(self) -> tuple[int, ...]:
        both = self._param.detach(), self._tensor
        versions = (0 if each.is_inference() else each._version for each in both)
        return (*versions, *addresses_of(both))


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
