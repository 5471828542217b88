"""The device that benchmarks run on: the accelerator at hand, else the CPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

__all__ = [
    "DEVICE",
    "allocated",
    "finish",
    "named",
    "now",
    "peak",
    "reset_peak",
    "trainer_arguments",
]


def _found() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(torch.accelerator.current_accelerator().type, 0)


DEVICE = _found()
ON_CPU = DEVICE.type == "cpu"
_MODULE: Any = None if ON_CPU else torch.get_device_module(DEVICE)


def named() -> str:
    """Return the words of a table about the device."""
    if ON_CPU:
        return "one thread"
    name = getattr(_MODULE, "get_device_name", None)
    return str(name()) if name is not None else str(DEVICE)


def trainer_arguments() -> dict[str, Any]:
    """Bring a Trainer to the device."""
    if ON_CPU:
        return {"accelerator": "cpu"}
    strategy = SingleDeviceStrategy(DEVICE)
    return {"accelerator": DEVICE.type, "strategy": strategy, "devices": 1}


def finish() -> None:
    """Wait until all that was asked of the device is done."""
    if not ON_CPU:
        _MODULE.synchronize()


def now() -> float:
    """Seconds, when all that was asked of the device is done."""
    finish()
    return time.perf_counter()


def allocated() -> float:
    """Bytes of the device that tensors have."""
    return float(_MODULE.memory_allocated())


def reset_peak() -> None:
    """Let the peak begin here."""
    if not hasattr(_MODULE, "max_memory_allocated"):
        raise SystemExit(f"Nobody counts the memory of {DEVICE}.")
    _MODULE.reset_peak_memory_stats()


def peak() -> float:
    """Bytes of the device that tensors had at most since then."""
    return float(_MODULE.max_memory_allocated())
