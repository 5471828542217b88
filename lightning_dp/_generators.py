"""Random generators: the global ones of all kinds of devices, and those that objects hold."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "OWN_GENERATORS",
    "RandomState",
    "accelerator_kept",
    "as_text",
    "generator_state",
    "put_back",
    "seed_own",
    "seeded_state",
    "set_generator_state",
    "state_of",
]

OWN_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


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

    @property
    def seed(self) -> int:
        """The seed of torch's generator on the host, which no drawing changes."""
        generator = torch.Generator()
        generator.set_state(self._cpu)
        return generator.initial_seed()

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


# -- generators that objects of a user's program hold ----------------------------------------------


def state_of(generator: Any) -> Any:
    """Return the state of a generator, for :func:`put_back`."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def as_text(state: Any) -> str:
    """Return a state of :func:`state_of` in a form that can be compared.

    Example:
        >>> generator = random.Random(0)
        >>> before = as_text(state_of(generator))
        >>> drawn = generator.random()
        >>> as_text(state_of(generator)) == before
        False
    """
    if isinstance(state, Tensor):
        return state.cpu().numpy().tobytes().hex()
    if isinstance(state, tuple):
        return " ".join(map(as_text, state))
    return state.tobytes().hex() if isinstance(state, np.ndarray) else str(state)


def put_back(generator: Any, state: Any) -> None:
    """Bring a generator to a state of :func:`state_of`."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def seed_own(generator: Any, seed: int) -> None:
    """Let a generator begin with a seed, from 0 to 2³² - 1."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)
