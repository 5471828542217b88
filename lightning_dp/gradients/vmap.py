"""The private names of functorch that the engine "records" needs, and no other file of the package.

``torch.func.vmap`` is public, but not whether a tensor is inside of it, nor what stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["MISSING", "is_foreign", "is_sample", "level_of_samples", "outside", "rows", "wrapped"]

_functorch: Any = torch._C._functorch

_NAMES = (
    *("_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "get_unwrapped"),
    *("is_batchedtensor", "is_functorch_wrapped_tensor", "maybe_get_bdim", "maybe_get_level"),
    *("pop_dynamic_layer_stack", "push_dynamic_layer_stack"),
    "_set_vmap_fallback_warning_enabled",
)
MISSING = tuple(name for name in _NAMES if not hasattr(_functorch, name))
"""The names that this torch lacks; with any, the engine cannot be used."""

is_sample: Callable[[Tensor], bool] = getattr(_functorch, "is_batchedtensor", torch.is_tensor)
"""Return whether each sample has its own values of a tensor."""


@contextmanager
def level_of_samples(n: int) -> Iterator[int]:
    """Enter a level of vmap over n samples that draw different random numbers; yield its number."""
    _functorch._set_vmap_fallback_warning_enabled(False)  # of what is slow; an error for some
    level: int = _functorch._vmap_increment_nesting(n, "different")
    try:
        yield level
    finally:
        _functorch._vmap_decrement_nesting()


class outside:
    """Leave the innermost level for a while: tensors of all samples are ordinary ones there."""

    def __enter__(self) -> None:
        self._layer = _functorch.pop_dynamic_layer_stack()

    def __exit__(self, *_: object) -> None:
        _functorch.push_dynamic_layer_stack(self._layer)


def wrapped(tensor: Tensor, level: int) -> Tensor:
    """Return what one sample sees of a tensor of shape (n, ...): shape (...)."""
    seen: Tensor = _functorch._add_batch_dim(tensor, 0, level)
    return seen


def is_foreign(tensor: Tensor, level: int) -> bool:
    """Return whether a tensor is inside of another function transform than the level."""
    inside: bool = _functorch.is_functorch_wrapped_tensor(tensor)
    return inside and _functorch.maybe_get_level(tensor) != level


def rows(tensor: Tensor) -> Tensor:
    """Return the values of all samples, shape (n, ...), of a tensor that :func:`is_sample`."""
    behind: Tensor = _functorch.get_unwrapped(tensor)
    dim = _functorch.maybe_get_bdim(tensor)
    return behind if dim == 0 else behind.movedim(dim, 0)
