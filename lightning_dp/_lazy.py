"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence


def names_from(package: str, *homes: str, modules: Sequence[str] = ()) -> Callable[[str], object]:
    """Return a ``__getattr__`` that finds the names in ``__all__`` of a package in its modules.

    The homes are searched in their order, so those that are quick to import come first.

    Args:
        package: its dotted name.
        homes: its modules in which the names are.
        modules: those that are found themselves.

    Example:
        >>> find = names_from("lightning_dp", "boundary", "schedules", modules=["metrics"])
        >>> find("Query").__module__, find("metrics").__name__
        ('lightning_dp.boundary', 'lightning_dp.metrics')
    """

    def find(name: str) -> object:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        public: Sequence[str] = vars(sys.modules[package])["__all__"]
        for home in homes if name in public else ():
            module = importlib.import_module(f"{package}.{home}")
            if hasattr(module, name):
                return vars(sys.modules[package]).setdefault(name, getattr(module, name))
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
