"""The noise of a generator, by NumPy alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 24576


class NormalValues:
    """The values in the order in which they are used: from the end of what is drawn at once."""

    def __init__(self, generator: np.random.Generator) -> None:
        self._generator = generator
        self._drawn: NDArray[np.float64] = np.zeros(0)

    def __call__(self, size: int) -> NDArray[np.float64]:
        """So many that were not used before."""
        if size > len(self._drawn):
            count = _BLOCK if 3 * size <= _BLOCK else size + size % 2
            self._drawn = box_muller(self._generator, count)
        self._drawn, used = np.split(self._drawn, [len(self._drawn) - size])
        return used


def box_muller(generator: np.random.Generator, size: int) -> NDArray[np.float64]:
    """The method of Box and Muller: cosines first, then sines."""
    lengths, angles = generator.random(size).reshape(2, -1)
    lengths, angles = np.sqrt(-2 * np.log(1 - lengths)), 2 * np.pi * angles
    return np.concatenate([lengths * np.cos(angles), lengths * np.sin(angles)])
