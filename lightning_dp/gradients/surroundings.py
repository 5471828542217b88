"""The random numbers and the precision of a call, for running it once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Surroundings", "generator_state"]


def generator_state(device: torch.device) -> Tensor:
    """Return the state of a device's generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


@dataclass(frozen=True)
class Surroundings:
    """The settings under which something ran, apart from what went in.

    Args:
        device: of its tensors.
        random_state: of the device's generator before it; None if it drew nothing.
        autocast: the type that it computed in; None without autocast.
    """

    device: torch.device
    random_state: Tensor | None
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: torch.device, random_state: Tensor | None) -> Surroundings:
        """Return those of this moment."""
        kind = device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return cls(device, random_state, autocast)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, random numbers and precision are those of the call; nothing of it stays."""
        device = self.device
        states: Any = nullcontext()
        if self.random_state is not None:
            accelerators = [] if device.type == "cpu" else [device]
            kind = "cuda" if device.type == "cpu" else device.type
            states = torch.random.fork_rng(accelerators, device_type=kind)
        precision = torch.autocast(
            device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )
        with states, precision:
            if self.random_state is not None and device.type == "cpu":
                torch.set_rng_state(self.random_state)
            elif self.random_state is not None:
                torch.get_device_module(device).set_rng_state(self.random_state, device)
            yield
