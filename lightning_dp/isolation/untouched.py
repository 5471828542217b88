"""Does an object hold what it held? Told where all of it can be looked into, and nowhere else."""

from __future__ import annotations

import enum
import logging
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import _lru_cache_wrapper, partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dp._held import same_tensor
from lightning_dp._lazy_copies import addresses_of, is_plain, lazily_copied

__all__ = ["Untouched", "is_shared", "keeps_results"]

_ATOMS = frozenset(
    {object, type(None), bool, int, float, complex, str, bytes, type(...), range}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)
# What copies of an object share: deepcopy leaves it as it is.
_SHARED: tuple[type, ...] = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType),
    *(types.ModuleType, weakref.ReferenceType, logging.Logger, enum.Enum),
)
_TENSORS = Tensor, nn.Parameter


def _of_mapping(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return lambda thing: (*kind.keys(thing), *kind.values(thing))


_CONTENTS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    dict: _of_mapping(dict),
    OrderedDict: _of_mapping(OrderedDict),
    list: lambda thing: tuple(list.__iter__(thing)),
    tuple: lambda thing: tuple(tuple.__iter__(thing)),
    set: lambda thing: tuple(set.__iter__(thing)),
    frozenset: lambda thing: tuple(frozenset.__iter__(thing)),
    deque: lambda thing: tuple(deque.__iter__(thing)),
}


_NAMESPACES = object, types.SimpleNamespace  # hold names, and nothing else


def _layout(kind: type) -> tuple[int, int, int]:
    """Return what memory objects have, with the places of their names and of references to them."""
    return kind.__basicsize__, kind.__dictoffset__, kind.__weakrefoffset__


# Objects of a class statement's class hold what these hold, and names.
_LAYOUTS = {kind: _layout(type("Plain", (kind,), {})) for kind in (*_CONTENTS, *_NAMESPACES)}


class Untouched:
    """All that an object holds, and what is inside of that, to tell later whether anything changed.

    Containers and attributes must hold the very same objects, tensors the same values in the same
    form; nothing is put back.

    Args:
        thing: is looked through now.
        left_out: names of attributes that may change.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = Untouched(layer)
        >>> before.is_whole, before.is_so()
        (True, True)
        >>> layer.seen = 1
        >>> before.is_so()
        False
    """

    def __init__(self, thing: Any, left_out: frozenset[str] = frozenset()) -> None:
        self._left_out = left_out
        self._held: list[tuple[Any, Callable[[Any], tuple[Any, ...]], tuple[Any, ...]]] = []
        self._tensors: list[Tensor] = []
        self._values: list[Tensor] = []  # of these
        self._known: dict[int, Any] = {}  # by id, which they keep
        self._work = [thing]
        self.is_whole = True
        """False if something in it cannot be looked into; then nothing can be told."""
        while self._work and self.is_whole:
            self._look(self._work.pop())
        self._forms = [_form(tensor) for tensor in self._tensors]

    def is_so(self) -> bool:
        """Tell whether everything is as it was."""
        if not self.is_whole:
            return False
        for thing, contents, before in self._held:
            if not before and not thing:
                continue
            now = contents(thing)
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        return self._tensors_are_so()

    def _tensors_are_so(self) -> bool:
        if [_form(tensor) for tensor in self._tensors] != self._forms:
            return False
        now, before = addresses_of(self._tensors), addresses_of(self._values)
        for place, (a, b) in enumerate(zip(now, before, strict=True)):
            if a == b:
                continue  # one memory still: whoever writes gets another
            if not same_tensor(self._tensors[place].detach(), self._values[place]):
                return False
        return True

    def _look(self, thing: Any) -> None:
        if is_shared(thing) or id(thing) in self._known:
            return
        self._known[id(thing)] = thing
        if type(thing) in _TENSORS:
            self._add_tensor(thing)
        elif isinstance(thing, types.MethodType):
            self._work.append(thing.__self__)
        elif type(thing) is partial:
            self._work += [thing.func, thing.args, thing.keywords]
        elif (kind := _built_in(type(thing))) in _NAMESPACES:
            self._add(vars(thing), self._attributes_of(thing))
        elif kind in _CONTENTS:
            self._add(thing, _CONTENTS[kind])
            if own := getattr(thing, "__dict__", None):
                self._add(own, _CONTENTS[dict])
        else:
            self.is_whole = False

    def _attributes_of(self, thing: Any) -> Callable[[Any], tuple[Any, ...]]:
        left_out = self._left_out
        if not left_out or not isinstance(thing, nn.Module):
            return _CONTENTS[dict]

        def kept(own: dict[str, Any]) -> tuple[Any, ...]:
            items = [item for item in own.items() if item[0] not in left_out]
            return tuple([each for item in items for each in item])

        return kept

    def _add(self, thing: Any, contents: Callable[[Any], tuple[Any, ...]]) -> None:
        now = contents(thing)
        self._held.append((thing, contents, now))
        self._work += now

    def _add_tensor(self, tensor: Tensor) -> None:
        if vars(tensor) or tensor.grad is not None or not is_plain(tensor) or not tensor.is_leaf:
            self.is_whole = False
            return
        values = lazily_copied(tensor)
        self._tensors.append(tensor)
        self._values.append(tensor.detach().clone() if values is None else values)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(tensor, name):
                self._held.append((hooks, _CONTENTS[dict], _CONTENTS[dict](hooks)))


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a tensor is besides its values."""
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return (
        *(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype),
        *(tensor.requires_grad, tensor.grad is None, len(vars(tensor))),
        *map(id, hooks),
    )


def _built_in(kind: type) -> type | None:
    """Return the class of Python's own of which a class is made; None if its objects hold more."""
    base = next(each for each in kind.__mro__ if each in _LAYOUTS)
    return base if kind is base or _layout(kind) == _LAYOUTS[base] else None


def is_shared(thing: Any) -> bool:
    """Tell whether a thing is a plain value, or what an object and its copies have in common."""
    return type(thing) in _ATOMS or isinstance(thing, _SHARED)


def keeps_results(kinds: Iterable[type]) -> bool:
    """Tell whether a function of some classes remembers what it returned, by ``functools.cache``."""
    return any(
        isinstance(_unwrapped(value), _lru_cache_wrapper)
        for kind in kinds
        for value in list(vars(kind).values())
    )


def _unwrapped(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value
