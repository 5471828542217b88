"""One public callable and good arguments for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Door:
    """A public callable with good arguments, and which of them are numbers, whole ones and flags."""

    call: Callable[..., Any]
    good: dict[str, Any]
    whole: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    others: dict[str, Any] = field(default_factory=dict)  # good arguments that are no numbers

    @property
    def name(self) -> str:
        return getattr(self.call, "__qualname__", "a door")
