"""The random numbers and the precision of a call, for running it once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp._generators import generator_state, set_generator_state

__all__ = ["Surroundings"]


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
        device, cpu = self.device, torch.device("cpu")
        precision = torch.autocast(
            device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        )
        if self.random_state is None:
            with precision:
                yield
            return
        before = [(each, generator_state(each)) for each in {cpu, device}]
        try:
            set_generator_state(device, self.random_state)
            with precision:
                yield
        finally:
            for each, state in before:
                set_generator_state(each, state)
