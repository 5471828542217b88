"""The content of one object of a user's program: kept, compared, and put back into the same object."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import _lru_cache_wrapper
from itertools import islice
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_dp._generators import as_text, put_back, seed_own, state_of
from lightning_dp._lazy_copies import is_one_memory, lazily_copied

__all__ = [
    "Budget",
    "Held",
    "HeldArray",
    "HeldCache",
    "HeldItems",
    "HeldMapping",
    "HeldNames",
    "HeldRandom",
    "HeldSet",
    "HeldTensor",
    "Kind",
    "Names",
    "same_tensor",
]

Kind: TypeAlias = Literal["parameter", "buffer", "metric", "random", "attribute"]

_LONG = 20_000  # items from which on a container is not copied
_MANY = 256  # items of one container that are looked into
_LARGE = 64 << 20  # bytes of a tensor from which on it is not copied, unless it is a buffer
_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size}
)
_ABSENT = object()


@dataclass
class Budget:
    """The number of items that may still be looked into and copied."""

    objects: int
    nbytes: int


class Held(ABC):
    """The content of one object itself; objects inside it are parts, held separately.

    Args:
        owner: the object.
        kind: what it belongs to.
    """

    def __init__(self, owner: Any, kind: Kind) -> None:
        self.owner, self.kind = owner, kind
        self.parts: dict[Any, Held] = {}

    def inside(self) -> Iterable[tuple[Any, Any]]:
        """Return keys and objects that may be parts."""
        return ()

    def name_of(self, name: str, key: Any) -> str:
        """Return the dotted name of a part; keys of a user's containers may be data, and are no names."""
        return name

    @abstractmethod
    def put_back(self) -> None:
        """Make the object hold again what it held."""

    @abstractmethod
    def differs(self, other: Any) -> bool:
        """Compare with what another object of this kind held, parts left out."""

    def differing(self, other: Any, name: str) -> list[str]:
        """Return the dotted names of what differs, parts left out.

        Args:
            other: what another object of this kind held.
            name: of this object.
        """
        return [name] if self.differs(other) else []


class HeldTensor(Held):
    """The values of a tensor, or the tensor itself if no copy is wanted."""

    def __init__(self, owner: Tensor, kind: Kind, budget: Budget, copy: bool) -> None:
        super().__init__(owner, kind)
        self.shape = owner.shape
        self._needs_gradient = owner.requires_grad
        self._values: Tensor | None = None
        if kind in ("buffer", "parameter") or budget.nbytes >= owner.nbytes <= _LARGE:
            budget.nbytes -= owner.nbytes
            self._values = _copied(owner, kind) if copy else owner.detach()

    def put_back(self) -> None:
        owner, values = self.owner, self._values
        if values is None:
            return
        if owner.is_leaf and owner.requires_grad != self._needs_gradient:
            owner.requires_grad_(self._needs_gradient)
        with torch.no_grad():
            if owner.shape != values.shape or owner.dtype != values.dtype:
                owner.data = values.clone()
            # A tensor that is as it was is left alone: writing counts as a change for autograd.
            elif not same_tensor(owner.detach(), values):
                owner.detach().copy_(values)

    def drop(self) -> None:
        """Keep the values by reference only, from now on."""
        self._values = None

    def differs(self, other: Any) -> bool:
        mine, its = self._values, other._values
        if mine is None or its is None:
            return bool(self.owner.shape != other.owner.shape)
        return not same_tensor(mine, its)


class HeldArray(Held):
    """The values of a NumPy array."""

    def __init__(self, owner: np.ndarray[Any, Any], kind: Kind, budget: Budget) -> None:
        super().__init__(owner, kind)
        self._values: np.ndarray[Any, Any] | None = None
        if owner.dtype.kind in "biufcSU" and budget.nbytes >= owner.nbytes <= _LARGE:
            budget.nbytes -= owner.nbytes
            self._values = owner.copy()

    def put_back(self) -> None:
        if self._values is not None and self.owner.flags.writeable:
            np.copyto(self.owner, self._values)

    def differs(self, other: Any) -> bool:
        mine, its = self._values, other._values
        if mine is None or its is None:
            return bool(self.owner.shape != other.owner.shape)
        if mine.dtype != its.dtype or mine.shape != its.shape:
            return True
        return not np.array_equal(mine, its, equal_nan=mine.dtype.kind in "fc")


class HeldRandom(Held):
    """The state of a random generator that the module keeps."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner, "random")
        self._state = state_of(owner)
        self._digest = as_text(self._state)

    def put_back(self) -> None:
        put_back(self.owner, self._state)

    def reseed(self) -> None:
        """Begin with a new seed, from torch's global generator."""
        seed_own(self.owner, int(torch.randint(2**32, ())))

    def differs(self, other: Any) -> bool:
        return bool(self._digest != other._digest)


class HeldCache(Held):
    """The results that a function remembers (``functools.cache``); all are forgotten to go back."""

    def __init__(self, owner: _lru_cache_wrapper[Any], kind: Kind) -> None:
        super().__init__(owner, kind)
        self._misses = owner.cache_info().misses

    def put_back(self) -> None:
        if self.owner.cache_info().misses != self._misses:
            self.owner.cache_clear()
            self._misses = 0

    def differs(self, other: Any) -> bool:
        return False  # one results from others, which are looked at


class HeldItems(Held):
    """The items of a list, a deque or a tuple."""

    def __init__(self, owner: Any, kind: Kind) -> None:
        super().__init__(owner, kind)
        self._length = len(owner)
        self._items = list(owner) if self._length <= _LONG else None

    def inside(self) -> Iterable[tuple[Any, Any]]:
        return _no_atoms(enumerate(self._items or ()), self._items or ())

    def put_back(self) -> None:
        owner, items = self.owner, self._items
        if isinstance(owner, tuple):
            return
        if items is None:  # what was appended goes
            while len(owner) > self._length:
                owner.pop()
        elif not _are_same_objects(owner, items):
            kind = list if isinstance(owner, list) else deque
            kind.clear(owner)
            kind.extend(owner, items)

    def differs(self, other: Any) -> bool:
        if self._length != other._length or self._items is None or other._items is None:
            return bool(self._length != other._length)
        pairs = enumerate(zip(self._items, other._items, strict=True))
        return any(not _same(a, b) for i, (a, b) in pairs if i not in self.parts)


class HeldSet(Held):
    """The members of a set."""

    def __init__(self, owner: Any, kind: Kind) -> None:
        super().__init__(owner, kind)
        self._length = len(owner)
        self._members = list(owner) if self._length <= _LONG else None

    def put_back(self) -> None:
        members = self._members
        if members is not None and not _are_same_objects(self.owner, members):
            set.clear(self.owner)
            set.update(self.owner, members)

    def differs(self, other: Any) -> bool:
        mine, its = self._members, other._members
        if mine is None or its is None or self._length != other._length:
            return bool(self._length != other._length)
        if not (_are_atoms(mine) and _are_atoms(its)):
            return False  # only the number of objects can be compared
        return set(mine) != set(its)


class HeldMapping(Held):
    """The items of a dictionary, in their order.

    Args:
        has_names: True if its keys are names of modules, parameters or buffers.
    """

    def __init__(self, owner: dict[Any, Any], kind: Kind, *, has_names: bool = False) -> None:
        super().__init__(owner, kind)
        self._has_names, self._length = has_names, len(owner)
        self._items = dict(_kind_of(owner).items(owner)) if self._length <= _LONG else None

    def inside(self) -> Iterable[tuple[Any, Any]]:
        items = self._items or {}
        values = list(items.values())
        keys = items if self._has_names else range(len(values))
        return _no_atoms(zip(keys, values, strict=True), values)

    def name_of(self, name: str, key: Any) -> str:
        return _dotted(name, str(key)) if self._has_names else name

    def put_back(self) -> None:
        owner, items = self.owner, self._items
        if items is None or _are_same_items(owner, items):
            return
        kind = _kind_of(owner)
        kind.clear(owner)
        kind.update(owner, items)

    def differs(self, other: Any) -> bool:
        mine, its = self._items, other._items
        if mine is None or its is None or self._length != other._length:
            return bool(self._length != other._length)
        keys = list(mine)
        if not all(map(_same, keys, its)):
            return True
        places = keys if self._has_names else range(len(keys))
        values = zip(places, mine.values(), its.values(), strict=True)
        return any(not _same(a, b) for place, a, b in values if place not in self.parts)


@dataclass(frozen=True)
class Names:
    """A namespace of names and objects, such as the attributes of an object.

    Args:
        read: returns all of them.
        write, delete: change one.
    """

    read: Callable[[], Mapping[str, Any]]
    write: Callable[[str, Any], object]
    delete: Callable[[str], object]


class HeldNames(Held):
    """The values of the names of a namespace: attributes, global variables, variables of closures.

    Args:
        owner: whose names they are.
        names: how to get at them.
        hidden: names that are left out of names of parts.
    """

    def __init__(
        self, owner: Any, kind: Kind, names: Names, hidden: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(owner, kind)
        self._names, self._hidden = names, hidden
        self._kept = dict(names.read())

    def inside(self) -> Iterable[tuple[Any, Any]]:
        return [(name, value) for name, value in self._kept.items() if not _is_atom(value)]

    def name_of(self, name: str, key: Any) -> str:
        return name if key in self._hidden else _dotted(name, str(key))

    def put_back(self) -> None:
        now = dict(self._names.read())
        for name in now.keys() - self._kept.keys():
            self._names.delete(name)
        for name, value in self._kept.items():
            if now.get(name, _ABSENT) is not value:
                self._names.write(name, value)

    def differs(self, other: Any) -> bool:
        return bool(self.differing(other, ""))

    def differing(self, other: Any, name: str) -> list[str]:
        mine, its = self._kept, other._kept
        both = (key for key in mine if key in its and key not in self.parts)
        found = [self.name_of(name, key) for key in both if not _same(mine[key], its[key])]
        if mine.keys() != its.keys():  # a name that is in one only may be made from data
            found.append(_dotted(name, f"(names in {type(self.owner).__name__})"))
        return found


def _copied(owner: Tensor, kind: Kind) -> Tensor:
    """Return a copy: of a weight, which is seldom written to, one that takes memory then alone."""
    lazy = lazily_copied(owner) if kind == "parameter" else None
    return owner.detach().clone() if lazy is None else lazy


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """True if all entries are equal; NaN is equal to itself."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    if is_one_memory(a, b) or torch.equal(a, b):
        return True
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _dotted(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_atom(value: Any) -> bool:
    return type(value) in _ATOMS or isinstance(value, enum.Enum)


def _are_atoms(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= _ATOMS


def _same(a: Any, b: Any) -> bool:
    """Compare plain values; of other objects only the type counts."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if not _is_atom(a) or isinstance(a, enum.Enum):
        return True
    return bool(a == b or (a != a and b != b))


def _no_atoms(pairs: Iterable[tuple[Any, Any]], values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return those that may be parts, up to a limit; vocabularies, all plain values, cost little."""
    if _are_atoms(values):
        return []
    return list(islice(((key, value) for key, value in pairs if not _is_atom(value)), _MANY))


def _are_same_objects(now: Iterable[Any], then: list[Any]) -> bool:
    now = list(now)
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _kind_of(owner: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return the class whose methods run none of a subclass's code."""
    return OrderedDict if isinstance(owner, OrderedDict) else dict


def _are_same_items(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    items = list(_kind_of(now).items(now))
    pairs = zip(items, then.items(), strict=True)
    return len(items) == len(then) and all(
        a is key and b is value for (a, b), (key, value) in pairs
    )
