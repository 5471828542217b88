"""Lightning strategies that train privately: ``lightning_dp.callbacks`` has the same names."""

from __future__ import annotations

import importlib

__all__ = ["PrivateDDPStrategy", "PrivateSingleDeviceStrategy"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("lightning_dp.callbacks.private_strategies"), name)
