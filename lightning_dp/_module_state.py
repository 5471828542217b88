"""Snapshots of what a module keeps: buffers, attributes, global variables, closures, callbacks."""

from __future__ import annotations

import argparse
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_dp._held import (
    Budget,
    Held,
    HeldArray,
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

__all__ = ["Difference", "ModuleState"]

_DEPTH = 40  # of objects inside objects
_OBJECTS = 30_000  # that are looked into
_BYTES = 256 << 20  # of tensors and arrays that are copied, besides buffers and parameters
_FEW_BYTES = 64 << 20  # of frozen parameters that are copied in any case
# Of torch's and Lightning's own attributes only those that belong to the model.
_OWN = frozenset({"training", "_buffers", "_parameters", "_modules", "_non_persistent_buffers_set"})
_INTERNAL = frozenset(vars(LightningModule())) - _OWN
_INTERNAL_OF_TORCH = frozenset(vars(nn.Module())) - _OWN
_INNER: dict[str, Kind] = {
    "_buffers": "buffer",
    "_parameters": "parameter",
    "_modules": "attribute",
}


@dataclass(frozen=True)
class Difference:
    """A place where two states differ.

    Args:
        name: dotted, of modules, attributes and variables; never of keys or items of containers.
        kind: "parameter", "buffer", "metric" (anything in a torchmetrics part), "random" (a random
            generator) or "attribute" (of a module, a class, an object or a callback; a global
            variable, or a variable of a closure).
        is_resized: True for a tensor of another shape.
    """

    name: str
    kind: Kind
    is_resized: bool = False


class ModuleState:
    """A snapshot of what a module keeps, to be compared with another, or to go back to.

    It holds buffers and attributes of all submodules, and what is inside them, however nested;
    attributes of the user's own classes; global variables and variables of closures that their
    methods use; callbacks. None of the user's code runs while it is taken. What cannot be copied, or
    is too large to (data sets, containers of more than 20,000 items, tensors above 64 MiB that are
    no buffers), is kept by reference.

    Example:
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.seen = deque([1.0], maxlen=8)
        >>> model = Model()
        >>> before, seen = ModuleState.of(model), model.seen
        >>> model.seen.append(2.0)
        >>> [difference.name for difference in before.differences(ModuleState.of(model))]
        ['seen']
        >>> before.restore()
        >>> model.seen is seen, list(seen)
        (True, [1.0])
    """

    def __init__(self, roots: Mapping[str, tuple[str, Held]], parts: Iterable[Held]) -> None:
        self._roots, self._parts = dict(roots), list(parts)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        callbacks: Iterable[object] = (),
        *,
        parameters: bool = False,
        copies: bool = True,
        sharded: bool = False,
    ) -> ModuleState:
        """Take a snapshot.

        Args:
            module: the whole model.
            callbacks: of its Trainer; those that are Lightning's own are left out.
            parameters: also of the values of parameters. Frozen ones are kept by reference where
                they are many times those that are trained.
            copies: of buffers and parameters; without them the snapshot is good for comparing at
                once, not for going back to.
            sharded: parameters are left out: in their places torch puts whole ones and shards by turns,
                and it frees the memory of whole ones.
        """
        values = _copied(module) if parameters and not sharded else frozenset()
        walk = _Walk(values, copies, left_out="_parameters" if sharded else None)
        walk.take("", "", module)
        for number, callback in enumerate(callbacks):
            if not is_library(type(callback)):
                walk.take(f"callback {number}", type(callback).__name__, callback)
        walk.finish()
        return cls(walk.roots, walk.known.values())

    def holds(self, thing: object) -> bool:
        """Tell whether an object is among what the module keeps."""
        return any(part.owner is thing for part in self._parts)

    def drop_parameters(self) -> None:
        """Keep the values of parameters by reference only, from now on: they take memory."""
        for part in self._parts:
            if isinstance(part, HeldTensor) and part.kind == "parameter":
                part.drop()

    def restore(self) -> None:
        """Put everything back into the same objects: containers, values of tensors, names.

        What cannot be put back stays as it is; nothing is raised.
        """
        for part in self._parts:
            try:
                part.put_back()
            except Exception:  # an object that does not let itself be changed
                continue

    def left_outside(self) -> Iterator[Any]:
        """Yield what is kept by reference only, of what classes, global variables and closures hold."""
        outside = (held for _, held in self._roots.values())
        work = [held for held in outside if isinstance(held.owner, type | types.FunctionType)]
        met = set(map(id, work))
        while work:
            held = work.pop()
            yield from (thing for key, thing in held.inside() if key not in held.parts)
            new = [part for part in held.parts.values() if id(part) not in met]
            met.update(map(id, new))
            work += new

    def reseed(self) -> None:
        """Give every random generator among it a new seed, from torch's global one."""
        for part in self._parts:
            if isinstance(part, HeldRandom):
                part.reseed()

    @property
    def has_generators(self) -> bool:
        """True if a random generator is among what the module keeps."""
        return any(isinstance(part, HeldRandom) for part in self._parts)

    def drew(self, other: ModuleState) -> bool:
        """Tell whether a random generator is elsewhere in another state."""
        return any(each.kind == "random" for each in self.differences(other))

    def differences(self, other: ModuleState) -> tuple[Difference, ...]:
        """Return where this state and another one differ, of the same module or of a copy of it.

        Numbers and entries are compared exactly; NaN is equal to itself. Of what is kept by
        reference only the type counts.
        """
        found: dict[Difference, None] = {}
        met: set[tuple[int, int]] = set()
        pairs = [
            (held, other._roots[key][1], name)
            for key, (name, held) in self._roots.items()
            if key in other._roots
        ]
        work = deque(pairs)
        while work:
            mine, its, name = work.popleft()
            if (id(mine), id(its)) in met:
                continue
            met.add((id(mine), id(its)))
            for each in _differing(mine, its, name):
                found[Difference(each, mine.kind, _is_resized(mine, its))] = None
            work += [
                (part, its.parts[key], mine.name_of(name, key))
                for key, part in mine.parts.items()
                if key in its.parts
            ]
        return tuple(found)


def _differing(mine: Held, its: Held, name: str) -> list[str]:
    if type(mine) is not type(its) or type(mine.owner) is not type(its.owner):
        return [name]
    try:
        return mine.differing(its, name)
    except Exception:  # nothing can be said of objects that do not compare
        return []


def _is_resized(mine: Held, its: Held) -> bool:
    if not (isinstance(mine, HeldTensor) and isinstance(its, HeldTensor)):
        return False
    return mine.shape != its.shape


def _copied(module: nn.Module) -> frozenset[int]:
    """Return the ids of the parameters whose values are copied.

    A teacher has the size of the model, and training_step may move it; a frozen backbone under a few
    trained weights is larger, and nobody does.
    """
    trained = [param for param in module.parameters() if param.requires_grad]
    frozen = [param for param in module.parameters() if not param.requires_grad]
    room = 2 * sum(param.nbytes for param in trained) + _FEW_BYTES
    is_small = sum(param.nbytes for param in frozen) <= room
    return frozenset(map(id, [*trained, *(frozen if is_small else ())]))


class _Walk:
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
        if isinstance(thing, HeldRandom.KINDS):
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
