"""The global random states at one moment, to which a further pass over the same records goes back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_dp._generators import generator_state, seeded_state, set_generator_state

__all__ = ["RandomState"]


class RandomState:
    """All global random states at one moment, so that a second pass draws the same dropout masks.

    Args:
        device: where the model runs; its generator is among them.
        torch_only: leave out Python's and NumPy's, which take ten times as long as the rest and
            draw nothing in most models.
    """

    def __init__(self, device: torch.device, *, torch_only: bool = False) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._others = None if torch_only else (random.getstate(), np.random.get_state())
        self._there = None if device.type == "cpu" else generator_state(device)

    @classmethod
    def seeded(cls, device: torch.device, seed: int) -> RandomState:
        """Return the states that a seed makes, from 0 to 2³² - 1; those of now stay."""
        now = cls(device)
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            set_generator_state(device, seeded_state(device, seed))
        there = cls(device)
        now.restore()
        return there

    def is_now(self) -> bool:
        """Tell whether as many random numbers were drawn by then as by now."""
        return self.is_same(RandomState(self._device))

    def is_same(self, now: RandomState) -> bool:
        """Tell the same of another moment."""
        mine, its = (
            (each._cpu, *([] if each._there is None else [each._there])) for each in (self, now)
        )
        return all(torch.equal(a, b) for a, b in zip(mine, its, strict=True)) and (
            self._others is None or now._others is None or _are_same(self._others, now._others)
        )

    def restore(self) -> None:
        """Go back to that moment."""
        torch.set_rng_state(self._cpu)
        if self._others is not None:
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
        if self._there is not None:
            set_generator_state(self._device, self._there)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the random states begin as they were then; afterwards they are as they are now."""
        now = RandomState(self._device, torch_only=self._others is None)
        self.restore()
        try:
            yield
        finally:
            now.restore()


def _are_same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    (python, (kind, keys, *rest)), (python_now, (kind_now, keys_now, *rest_now)) = one, other
    is_same = python == python_now and (kind, rest) == (kind_now, rest_now)
    return is_same and bool(np.array_equal(keys, keys_now))
