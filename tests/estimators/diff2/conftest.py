"""A linear classifier, and the same training written down in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[np.float64]
RECORDS, FEATURES, CLASSES = 60, 4, 3
SIZE = CLASSES * FEATURES + CLASSES


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(RECORDS) % CLASSES
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    return x + nn.functional.one_hot(y, FEATURES), y


@pytest.fixture
def fit(make_fit: Callable[..., Any]) -> Any:
    """``fit(...)`` trains multinomial logistic regression."""
    loss = nn.functional.cross_entropy
    return make_fit(lambda: nn.Linear(FEATURES, CLASSES), loss, data(), lr=0.3)


def record_gradients(params: Array) -> Array:
    """The gradient of every record, (RECORDS, SIZE), by the formula (softmax - onehot) ⊗ (x, 1)."""
    x, y = (np.asarray(part.double()) for part in data())
    weight = params[: CLASSES * FEATURES].reshape(CLASSES, FEATURES)
    logits = x @ weight.T + params[CLASSES * FEATURES :]
    error = np.exp(logits) / np.exp(logits).sum(1, keepdims=True) - np.eye(CLASSES)[y.astype(int)]
    outer = error[:, :, None] * x[:, None, :]
    return np.concatenate([outer.reshape(RECORDS, -1), error], axis=1)


def clipped_sum(rows: Array, clip_norm: float) -> Array:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows * np.minimum(1, clip_norm / norms)).sum(0)


@dataclass
class Twin:
    """DIFF2 and STORM as the papers write them, one step at a time.

    Args:
        noise: standard normal vectors, one per query.
        z: noise multiplier of step t.
    """

    noise: Callable[[], Array]
    z: Callable[[int], float]

    def diff2(
        self, batches: list[tuple[list[int], float]], start: Array, **options: float
    ) -> Array:
        return self._run(batches, start, self._diff2_step, **options)

    def storm(
        self, batches: list[tuple[list[int], float]], start: Array, **options: float
    ) -> Array:
        return self._run(batches, start, self._storm_step, **options)

    def _run(self, batches: Any, start: Array, step: Any, lr: float, **options: float) -> Array:
        x, before, v = start, start, np.zeros(SIZE)
        for t, (batch, size) in enumerate(batches):
            v = step(t, x, before, v, batch, size, **options)
            before, x = x, x - lr * v
        return x

    def _noised(self, t: int, rows: Array, clip_norm: float, size: float) -> Array:
        return (clipped_sum(rows, clip_norm) + self.z(t) * clip_norm * self.noise()) / size

    def _diff2_step(
        self, t: int, x: Array, before: Array, v: Array, batch: Any, size: float,
        T: float, C1: float, C2: float,
    ) -> Array:  # fmt: skip
        here = record_gradients(x)[batch]
        if t % T == 0:
            return self._noised(t, here, C1, size)
        radius = C2 * float(np.linalg.norm(x - before))
        return v + self._noised(t, here - record_gradients(before)[batch], radius, size)

    def _storm_step(
        self, t: int, x: Array, before: Array, v: Array, batch: Any, size: float,
        a: float, C1: float, C2: float,
    ) -> Array:  # fmt: skip
        here = record_gradients(x)[batch]
        if t == 0:
            return self._noised(t, here, C1, size)
        radius = a * C1 + (1 - a) * C2 * float(np.linalg.norm(x - before))
        rows = here - (1 - a) * record_gradients(before)[batch]
        return (1 - a) * v + self._noised(t, rows, radius, size)


@pytest.fixture
def twin() -> type[Twin]:
    return Twin
