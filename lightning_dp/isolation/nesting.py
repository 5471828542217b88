"""Batches as nested containers: tensors and other leaves in dicts, lists, and users' own objects."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from enum import Enum
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "copied",
    "is_rows",
    "kinds_of_objects",
    "leaves",
    "map_leaves",
    "map_rows",
    "number_of_rows",
]

# Leaves that hold nothing in which a tensor could be.
_PLAIN = (
    *(Tensor, np.ndarray, np.generic, str, bytes, int, float, complex, type(None)),
    *(type, Enum, PurePath, date, torch.dtype, torch.device, torch.Size, nn.Module),
)
_LEAVES = frozenset((Tensor, int, float, bool, str, type(None)))
_LISTS = frozenset((list, tuple))
_DEPTH = 6  # of objects inside objects that are looked into for a tensor


def map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same nesting in new containers, with each leaf replaced; the batch is unchanged."""
    return _rebuilt(batch, lambda part: map_leaves(part, function), function)


def leaves(batch: Any) -> list[Any]:
    """Return the leaves in their order.

    Example:
        >>> leaves({"x": [1.0, "a"], "y": ()})
        [1.0, 'a']
    """
    found: list[Any] = []
    _collect(batch, found)
    return found


def _collect(part: Any, found: list[Any]) -> None:
    # Most parts are tensors, numbers or plain lists: at every step, that is told at once.
    inside = None if type(part) in _LEAVES else _held_by(part)
    if inside is None:
        found.append(part)
    else:
        for each in inside:
            _collect(each, found)


def copied(batch: Any) -> Any:
    """Return a batch in new containers, whose tensors and arrays can be changed in place."""

    def new(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return map_leaves(batch, new)


def map_rows(
    batch: Any, n: int, of_rows: Callable[[Any], Any], of_others: Callable[[Any], Any]
) -> Any:
    """Do the same with one function for what has one row per record, and one for other leaves.

    Args:
        batch: with n records.
        n: at least 1.
        of_rows: is given tensors and arrays of length n, and lists of n things that are no batches.
        of_others: is given all other leaves.
    """
    if is_rows(batch, n):
        return of_rows(batch)
    return _rebuilt(batch, lambda part: map_rows(part, n, of_rows, of_others), of_others)


def is_rows(part: Any, n: int) -> bool:
    """Tell whether a part of a batch is one thing per record."""
    if isinstance(part, Tensor | np.ndarray):
        return part.ndim > 0 and len(part) == n
    if type(part) not in (list, tuple) or len(part) != n:
        return False
    return not any(_holds_rows(each, n) for each in part)


def number_of_rows(batch: Any) -> int:
    """Return the length that most tensors have, else lists of plain leaves; 0 if there is none."""
    tensors: Counter[int] = Counter()
    lists: Counter[int] = Counter()

    def count(part: Any) -> None:
        if isinstance(part, Tensor | np.ndarray):
            if part.ndim:
                tensors[len(part)] += 1
            return
        parts = _parts(part)
        if type(part) in (list, tuple) and part and not any(_parts(each) for each in part):
            lists[len(part)] += not any(isinstance(each, Tensor | np.ndarray) for each in part)
        for each in parts:
            count(each)

    count(batch)
    common = (tensors or lists).most_common(1)
    return common[0][0] if common and common[0][1] else 0


def kinds_of_objects(batch: Any) -> tuple[str, ...]:
    """Return the names of the types in a batch that are neither containers nor plain values.

    What such objects hold is not looked into.

    Example:
        >>> from pathlib import Path
        >>> kinds_of_objects({"x": [1.0, "a"], "file": Path("a"), "shape": (1, 2), "seen": {1}})
        ('set',)
    """
    found = {type(leaf).__name__ for leaf in leaves(batch) if not isinstance(leaf, _PLAIN)}
    return tuple(sorted(found))


def _holds_rows(part: Any, n: int) -> bool:
    return is_rows(part, n) or any(_holds_rows(each, n) for each in _parts(part))


def _parts(batch: Any) -> Sequence[Any]:
    """Return what a container holds; nothing for a leaf."""
    return _held_by(batch) or ()


def _held_by(batch: Any) -> Sequence[Any] | None:
    """Return what a container holds; None for a leaf."""
    if type(batch) in _LISTS:
        return cast("list[Any] | tuple[Any, ...]", batch)
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return batch
    return list(vars(batch).values()) if _is_object_with_tensors(batch) else None


def _rebuilt(batch: Any, of_part: Callable[[Any], Any], of_leaf: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Mapping):
        new = copy.copy(batch)
        for key in batch:
            new[key] = of_part(batch[key])  # type: ignore[index]
        return new
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(of_part(each) for each in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(of_part(each) for each in batch)
    if _is_object_with_tensors(batch):
        new = copy.copy(batch)
        for name, value in vars(batch).items():
            object.__setattr__(new, name, of_part(value))  # also of a frozen dataclass: it is ours
        return new
    return of_leaf(batch)


def _is_object_with_tensors(part: Any, depth: int = _DEPTH) -> bool:
    """Tell whether it is an object of a user's class that holds tensors."""
    if isinstance(part, Tensor | np.ndarray | nn.Module | type) or not hasattr(part, "__dict__"):
        return False
    return any(_holds_tensor(value, depth) for value in vars(part).values())


def _holds_tensor(part: Any, depth: int) -> bool:
    if isinstance(part, Tensor | np.ndarray):
        return True
    if isinstance(part, Mapping):
        return any(_holds_tensor(each, depth) for each in part.values())
    if isinstance(part, list | tuple):
        return any(_holds_tensor(each, depth) for each in part)
    return depth > 0 and _is_object_with_tensors(part, depth - 1)
