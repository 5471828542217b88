"""The global random generators of all kinds of devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["accelerator_kept", "generator_state", "seeded_state", "set_generator_state"]


def generator_state(device: torch.device) -> Tensor:
    """Return the state of a device's generator; no device is waited for."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = _call(torch.get_device_module(device).get_rng_state, device)
    return state


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Bring a device's generator to a state of :func:`generator_state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _call(torch.get_device_module(device).set_rng_state, device, state)


def seeded_state(device: torch.device, seed: int) -> Tensor:
    """Return the state that a seed brings a device's generator to; the generator stays as it is.

    Example:
        >>> before = torch.get_rng_state()
        >>> set_generator_state(torch.device("cpu"), seeded_state(torch.device("cpu"), 3))
        >>> drawn = torch.rand(2)
        >>> bool((drawn == torch.rand(2, generator=torch.Generator().manual_seed(3))).all())
        True
        >>> torch.set_rng_state(before)
    """
    return torch.Generator(device).manual_seed(seed).get_state()


def _call(function: Callable[..., Any], device: torch.device, *arguments: Any) -> Any:
    """Call a function of a device's module, which names the device where there may be several."""
    if "device" in inspect.signature(function).parameters:
        return function(*arguments, device=device)
    return function(*arguments)


@contextmanager
def accelerator_kept() -> Iterator[None]:
    """Put the generators of the accelerator back after what is inside; CUDA's are Lightning's matter."""
    states = [(device, generator_state(device)) for device in _accelerators()]
    try:
        yield
    finally:
        for device, state in states:
            set_generator_state(device, state)


def _accelerators() -> list[torch.device]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or found.type == "cuda":
        return []
    return [torch.device(found.type, i) for i in range(torch.accelerator.device_count())]
