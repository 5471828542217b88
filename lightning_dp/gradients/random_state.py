"""The global random states at one moment, to which a further pass over the same records goes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["RandomState"]


class RandomState:
    """All global random states at one moment, so that a second pass draws the same dropout masks.

    Args:
        device: where the model runs; its generator is among them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @classmethod
    def seeded(cls, device: torch.device, seed: int) -> RandomState:
        """Return the states that a seed makes, from 0 to 2³² - 1; those of now stay."""
        now = cls(device)
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        there = cls(device)
        now._restore()
        return there

    def is_now(self) -> bool:
        """Tell whether as many random numbers were drawn by then as by now."""
        return self.is_same(RandomState(self._device))

    def is_same(self, now: RandomState) -> bool:
        """Tell the same of another moment."""
        mine, its = (
            (each._cpu, *([] if each._cuda is None else [each._cuda])) for each in (self, now)
        )
        (kind, keys, *rest), (kind_now, keys_now, *rest_now) = self._numpy, now._numpy
        return (
            all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
            and self._python == now._python
            and (kind, rest) == (kind_now, rest_now)
            and bool(np.array_equal(keys, keys_now))
        )

    def _restore(self) -> None:
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the random states begin as they were then; afterwards they are as they are now."""
        now = RandomState(self._device)
        self._restore()
        try:
            yield
        finally:
            now._restore()
