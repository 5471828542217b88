"""Random generators that objects of a user's program hold: their states, and new seeds."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["OWN_GENERATORS", "as_text", "put_back", "seed_own", "state_of"]

OWN_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


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
