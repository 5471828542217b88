"""The noise of a generator, by NumPy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def normal_values(generator: np.random.Generator, size: int) -> NDArray[np.float64]:
    """The method of Box and Muller: cosines first, then sines, and one too many is left out."""
    lengths, angles = generator.random(size + size % 2).reshape(2, -1)
    lengths, angles = np.sqrt(-2 * np.log(1 - lengths)), 2 * np.pi * angles
    return np.concatenate([lengths * np.cos(angles), lengths * np.sin(angles)])[:size]
