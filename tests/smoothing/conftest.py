"""The slow, obvious oracle: the matrix itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray


@pytest.fixture
def dense() -> Callable[[int, float], NDArray[np.float64]]:
    """A_σ = I - σL, entry by entry: each row of L has a 1 for either neighbour on the circle."""

    def matrix(d: int, sigma: float) -> NDArray[np.float64]:
        laplacian = np.zeros((d, d))
        for i in range(d):
            laplacian[i, i] -= 2
            laplacian[i, (i + 1) % d] += 1
            laplacian[i, (i - 1) % d] += 1
        return np.eye(d) - sigma * laplacian

    return matrix
