"""Public attributes of a model that say that something new begins: phases, weights, counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from operator import is_
from types import NoneType
from typing import Any, TypeAlias

from torch import nn

__all__ = ["Phases"]

_Value: TypeAlias = bool | int | float | str | None
_Name: TypeAlias = tuple[int, str]

_PLAIN = (bool, int, float, str, NoneType)
_SEEN = 32  # values of one attribute that are kept apart


class Phases:
    """Tells when a model's public attributes say that something new begins.

    A text or a truth value is new when it was not seen before; a number, which may count steps,
    when it changes for the 1st, 2nd, 4th, 8th, … time.

    Args:
        module: whose attributes are seen now.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> phases = Phases(module)
        >>> module.phase = "warm"
        >>> phases.is_new(), phases.is_new()
        (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._plain = [_Plain() for _ in self._parts]
        self._seen: dict[_Name, set[str]] = {}
        self._changes: Counter[_Name] = Counter()
        self._last: dict[_Name, _Value] = {}
        self.is_new()

    def is_new(self) -> bool:
        """Look again; True if something new begins."""
        now = dict(self._attributes())
        if list(now) == list(self._last) and all(map(is_, now.values(), self._last.values())):
            return False  # the same objects in the same order, as nearly always
        changed = [name for name in now if not self._is_as_before(name, now[name])]
        self._last = now
        news = [self._note(name, now[name]) for name in changed]
        return any(news)

    def _is_as_before(self, name: _Name, value: _Value) -> bool:
        if name not in self._last:
            return False
        last = self._last[name]
        return last is value or repr(last) == repr(value)

    def _note(self, name: _Name, value: _Value) -> bool:
        if isinstance(value, bool | str | None):
            seen = self._seen.setdefault(name, set())
            is_new = repr(value) not in seen and len(seen) < _SEEN
            seen.add(repr(value))
            return is_new
        self._changes[name] += 1
        changes = self._changes[name] - 1  # the first was its value at the start
        return (changes & (changes - 1) == 0 and changes > 0) or changes == 0

    def _attributes(self) -> Iterator[tuple[_Name, _Value]]:
        for number, (part, plain) in enumerate(zip(self._parts, self._plain, strict=True)):
            values = vars(part)
            for name in plain.names_in(values):
                yield (number, name), values[name]


class _Plain:
    """The names of the public attributes of one module that have plain values: the same at most steps."""

    def __init__(self) -> None:
        self._all: list[str] = []
        self._types: list[type] = []
        self._names: list[str] = []

    def names_in(self, values: dict[str, Any]) -> list[str]:
        """Return those of attributes; names and types decide, so that equal ones are not looked at."""
        everything, types = list(values), list(map(type, values.values()))
        if everything != self._all or types != self._types:
            pairs = zip(everything, types, strict=True)
            self._names = [
                name for name, kind in pairs if issubclass(kind, _PLAIN) and name[0] != "_"
            ]
            self._all, self._types = everything, types
        return self._names
