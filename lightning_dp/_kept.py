"""Everything that a module keeps, found in one walk: each object is held once, wherever it is met."""

from __future__ import annotations

import argparse
import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import _lru_cache_wrapper, partial
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_dp._generators import OWN_GENERATORS
from lightning_dp._held import (
    Budget,
    Held,
    HeldArray,
    HeldCache,
    HeldItems,
    HeldMapping,
    HeldNames,
    HeldRandom,
    HeldSet,
    HeldTensor,
    Kind,
    Names,
)
from lightning_dp._user_code import Variables, is_library, own_functions, plain_function

__all__ = ["Walk"]

_DEPTH = 40  # of objects inside objects
_OBJECTS = 30_000  # that are looked into
_BYTES = 256 << 20  # of tensors and arrays that are copied, besides buffers and parameters
# Of torch's and Lightning's own attributes only those that belong to the model.
_OWN = frozenset({"training", "_buffers", "_parameters", "_modules", "_non_persistent_buffers_set"})
_INTERNAL = frozenset(vars(LightningModule())) - _OWN
_INTERNAL_OF_TORCH = frozenset(vars(nn.Module())) - _OWN
_INNER: dict[str, Kind] = {
    "_buffers": "buffer",
    "_parameters": "parameter",
    "_modules": "attribute",
}


class Walk:
    """One walk through everything that a module keeps.

    Args:
        parameters: ids of those whose values are held.
        copies: of buffers and parameters.
        left_out: the key of the parts of modules that are not looked into; None if all are.
    """

    def __init__(
        self, parameters: frozenset[int], copies: bool, left_out: str | None = None
    ) -> None:
        self.roots: dict[str, tuple[str, Held]] = {}
        self.known: dict[int | str, Held] = {}  # by the ids of objects, which they keep alive
        self._types: set[type] = set()
        self._parameters, self._copies, self._left_out = parameters, copies, left_out
        self._budget = Budget(_OBJECTS, _BYTES)
        self._work: deque[tuple[Held, int]] = deque()

    def take(self, key: str, name: str, thing: Any) -> None:
        """Begin at an object."""
        if (
            key not in self.roots
            and (held := self._held(thing, "attribute", 0, self._new)) is not None
        ):
            self.roots[key] = name, held

    def finish(self) -> None:
        """Look into everything that was found."""
        while self._work:
            held, depth = self._work.popleft()
            for key, thing in held.inside():
                is_of_torch = key in _INNER and isinstance(held.owner, nn.Module)
                if is_of_torch and key == self._left_out:
                    continue
                new = self._named if is_of_torch else self._new
                kind = held.kind if is_of_torch is False or held.kind == "metric" else _INNER[key]
                if (part := self._held(thing, kind, depth + 1, new)) is not None:
                    held.parts[key] = part

    def _held(
        self, thing: Any, kind: Kind, depth: int, new: Callable[[Any, Kind], Held | None]
    ) -> Held | None:
        """Return what holds an object's content; None if it is kept by reference."""
        if (known := self.known.get(id(thing))) is not None:
            return known
        if depth > _DEPTH or self._budget.objects <= 0:
            return None
        try:
            held = new(thing, kind)
        except Exception:  # an object that does not let itself be changed
            return None
        if held is not None:
            self.known[id(thing)] = held
            self._budget.objects -= 1
            self._work.append((held, depth))
        return held

    def _new(self, thing: Any, kind: Kind) -> Held | None:
        if isinstance(thing, nn.Parameter):
            if id(thing) not in self._parameters:
                return None
            return HeldTensor(thing, "parameter", self._budget, self._copies)
        if isinstance(thing, Tensor):
            return HeldTensor(thing, kind, self._budget, self._copies or kind != "buffer")
        if isinstance(thing, np.ndarray):
            return HeldArray(thing, kind, self._budget)
        if isinstance(thing, OWN_GENERATORS):
            return HeldRandom(thing)
        if isinstance(thing, list | tuple | deque):
            return HeldItems(thing, kind)
        if isinstance(thing, set):
            return HeldSet(thing, kind)
        if isinstance(thing, dict):
            return HeldMapping(thing, kind)
        if isinstance(thing, nn.Module):
            return self._module(thing, "metric" if isinstance(thing, Metric) else kind)
        if isinstance(thing, types.MethodType | partial):
            return self._bound(thing, kind)
        if isinstance(thing, _lru_cache_wrapper):
            self._function(plain_function(thing))
            return HeldCache(thing, kind)
        if isinstance(function := plain_function(thing), types.FunctionType):
            self._function(function)
            return None
        return self._object(thing, kind)

    def _named(self, thing: Any, kind: Kind) -> Held:
        return HeldMapping(thing, kind, has_names=True)

    def _module(self, module: nn.Module, kind: Kind) -> Held:
        self._class_of(type(module))
        for hook in _hooks_of(module):
            self._held(hook, kind, 1, self._new)
        own = vars(module)
        hidden = _INTERNAL if isinstance(module, LightningModule) else _INTERNAL_OF_TORCH

        def read() -> dict[str, Any]:
            return {name: value for name, value in own.items() if name not in hidden}

        names = Names(read, own.__setitem__, own.__delitem__)
        return HeldNames(module, kind, names, frozenset(_INNER))

    def _object(self, thing: Any, kind: Kind) -> Held | None:
        kept = type(thing)
        if isinstance(thing, type):
            self._class(thing)
            return None
        is_plain = isinstance(thing, argparse.Namespace | types.SimpleNamespace)
        if isinstance(thing, Dataset | DataLoader) or (is_library(kept) and not is_plain):
            return None
        self._class_of(kept)
        slots = [name for each in kept.__mro__ for name in _slots(each)]
        if not slots and not hasattr(thing, "__dict__"):
            return None
        own: dict[str, Any] = getattr(thing, "__dict__", {})

        def read() -> dict[str, Any]:
            found = {
                name: object.__getattribute__(thing, name) for name in slots if _has(thing, name)
            }
            return {**own, **found}

        write, delete = partial(object.__setattr__, thing), partial(object.__delattr__, thing)
        return HeldNames(thing, kind, Names(read, write, delete))

    def _bound(self, thing: Any, kind: Kind) -> Held:
        """Hold what is bound to a function: the object of a method, the arguments of a partial."""
        self._function(plain_function(thing))
        if isinstance(thing, types.MethodType):
            bound = {"self": thing.__self__}
        else:
            bound = {"args": thing.args, "keywords": thing.keywords}
        return HeldNames(thing, kind, _read_only(bound), frozenset(bound))

    def _class_of(self, kind: type) -> None:
        if kind not in self._types:
            self._types.add(kind)
            for each in kind.__mro__:
                self._class(each)

    def _class(self, kind: type) -> None:
        """Begin at what a user's class keeps for all its objects, and at what its functions use."""
        if is_library(kind) or (key := f"class {id(kind)}") in self.roots:
            return

        def read() -> dict[str, Any]:
            return {name: each for name, each in vars(kind).items() if _is_data(name, each)}

        names = Names(read, partial(type.__setattr__, kind), partial(type.__delattr__, kind))
        self._root(key, kind.__name__, HeldNames(kind, "attribute", names))
        for function in own_functions(kind):
            self._function(function)
        for name, value in list(vars(kind).items()):
            inner = getattr(value, "__func__", value)  # of a static method
            if isinstance(inner, _lru_cache_wrapper):
                self.take(f"{key} {name}", name, inner)

    def _function(self, function: types.FunctionType | None) -> None:
        """Begin at the variables outside of a user's function that it can reach."""
        if function is None or is_library(function):
            return
        if (key := f"function {id(function)}") in self.roots:
            return
        variables = Variables(function)
        names = Names(variables.read, variables.write, variables.delete)
        self._root(key, function.__qualname__, HeldNames(function, "attribute", names))

    def _root(self, key: str, name: str, held: Held) -> None:
        self.roots[key] = name, held
        self.known[key] = held
        self._work.append((held, 0))


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    """Yield what runs at the calls of a module, besides its own code."""
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        yield from vars(module).get(name, {}).values()


def _read_only(content: dict[str, Any]) -> Names:
    return Names(lambda: content, lambda name, value: None, lambda name: None)


def _slots(kind: type) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if name not in ("__dict__", "__weakref__"):
            yield name


def _has(thing: Any, name: str) -> bool:
    try:
        object.__getattribute__(thing, name)
    except AttributeError:
        return False
    return True


def _is_data(name: str, value: Any) -> bool:
    """Tell whether a class attribute is no method, property or machinery of classes."""
    return not (name.startswith(("__", "_abc_")) or hasattr(type(value), "__get__"))
