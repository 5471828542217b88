"""Libraries that are imported when a model is made: the names of all cases are known without them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Library"]


class Library:
    """Stands for a module, which it imports when something of it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)
