"""Copies of tensors that take no memory until somebody writes, and tensors that are one memory."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

__all__ = [
    "addresses_of",
    "are_shared",
    "is_held_elsewhere",
    "is_one_memory",
    "is_plain",
    "lazily_copied",
]

# Names of torch that it does not promise to keep: without them nothing is shared.
_NAMES = "_data_address", "_is_cow_tensor", "_storage_Use_Count"
_SHARES = hasattr(torch, "_lazy_clone") and all(hasattr(torch._C, name) for name in _NAMES)


def lazily_copied(tensor: Tensor) -> Tensor | None:
    """Return a copy that takes no memory until it, or the original, is written to; None if none can be.

    Whoever writes first has the values copied, in any way that torch knows: in place, into ``.data``,
    by an optimizer, through a view, by a new NumPy array. An array that was made of the tensor's
    memory before writes into both; :func:`is_held_elsewhere` tells if there may be one.

    Example:
        >>> weight = torch.zeros(3)
        >>> before = lazily_copied(weight)
        >>> is_one_memory(weight, before), weight.add_(1).tolist(), before.tolist()
        (True, [1.0, 1.0, 1.0], [0.0, 0.0, 0.0])
    """
    if not _SHARES or not is_plain(tensor) or tensor.is_inference():
        return None
    try:
        return torch._lazy_clone(tensor.detach())
    except RuntimeError:  # memory that is not torch's own: NumPy's, a mapped file, shared memory
        return None


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Tell whether another tensor, an array or a graph has the same memory.

    Example:
        >>> weight = torch.zeros(3)
        >>> is_held_elsewhere(weight)
        False
        >>> array = weight.numpy()
        >>> is_held_elsewhere(weight)
        True
    """
    storage = tensor.untyped_storage()  # which holds it once more, as the tensor does
    return not _SHARES or torch._C._storage_Use_Count(storage._cdata) > 2


def is_one_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of one shape are the same entries of the same memory, and so equal."""
    return _SHARES and is_plain(a) and is_plain(b) and _place(a) == _place(b)


def addresses_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return where entries begin; data_ptr(), which allows to write, would end the sharing."""
    if not _SHARES or {torch.strided}.union(map(attrgetter("layout"), tensors)) != {torch.strided}:
        return tuple(map(Tensor.data_ptr, tensors))
    return tuple(map(torch._C._data_address, tensors))  # type: ignore[attr-defined]


def are_shared(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Tell of each whether the next one who may write gets other memory: there was a lazy copy."""
    if not _SHARES:
        return (False,) * len(tensors)
    return tuple(map(torch._C._is_cow_tensor, tensors))  # type: ignore[attr-defined]


def _place(tensor: Tensor) -> tuple[object, ...]:
    return addresses_of([tensor]), tensor.storage_offset(), tensor.stride(), tensor.dtype


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is nothing but numbers in the memory of the CPU, as they are."""
    return (
        not is_lazy(tensor)
        and type(tensor.data) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg())
    )
