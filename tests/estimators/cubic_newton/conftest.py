"""Logistic regression through a Trainer, and the same rounds written down in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_dp import CubicNewton
from lightning_dp.functional import shared_mask

Array = NDArray[np.float64]
RECORDS, FEATURES = 48, 5
SIZE = FEATURES + 1


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(RECORDS, FEATURES, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).double()


def loss(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(output[:, 0], y)


@pytest.fixture
def fit(make_fit: Callable[..., Any]) -> Any:
    """``fit(estimator, ...)`` trains logistic regression."""
    return make_fit(lambda: nn.Linear(FEATURES, 1).double(), loss, data(), lr=1.0)


def design() -> tuple[Array, Array]:
    x, y = (np.asarray(part) for part in data())
    return np.concatenate([x, np.ones((RECORDS, 1))], axis=1), y


def gradients_and_hessians(params: Array) -> tuple[Array, Array]:
    """Of every record: (RECORDS, SIZE) and (RECORDS, SIZE, SIZE)."""
    x, y = design()
    p = 1 / (1 + np.exp(-x @ params))
    return (p - y)[:, None] * x, (p * (1 - p))[:, None, None] * x[:, :, None] * x[:, None, :]


@dataclass
class Twin:
    """The algorithm as the paper and the privacy rules write it, with dense Hessians."""

    newton: CubicNewton
    keep: int
    z: float
    noise: Callable[[int], Array]
    expected_batch_size: float
    learning_rate: float = 1.0

    def rounds(self, batches: list[list[list[int]]], x: Array) -> Array:
        """Each round: a batch for each inner step."""
        for t, of_steps in enumerate(batches):
            x = self._round(t, of_steps, x)
        return x

    def _round(self, t: int, batches: list[list[int]], x: Array) -> Array:
        n, tau = self.newton, self.newton.inner_steps
        c = shared_mask(n.mask_seed, t, SIZE, self.keep).numpy()
        g, h = gradients_and_hessians(x)
        g, h = g[:, c], h[:, c][:, :, c]
        theta, average = x[c], np.zeros(len(c))
        for s in range(tau):
            v = theta - x[c]
            length = float(np.linalg.norm(v))
            bound = math.sqrt(len(c) / SIZE) * (n.max_grad_norm + n.max_hessian_norm * length)
            u = (g + h @ v)[batches[s]]
            u = u * np.minimum(1, bound / np.linalg.norm(u, axis=1, keepdims=True))
            z = self.z if n.fresh_batches else self.z * math.sqrt(tau)
            total = u.sum(0) + z * bound * self.noise(len(c))
            slope = total / self.expected_batch_size + n.weight_decay * theta
            slope = slope + n.hessian_lipschitz / 2 * length * v
            size = 2 / (n.strong_convexity * (s + 2))
            theta = theta - min(size, n.max_step_size or math.inf) * slope
            if n.box is not None:
                theta = np.clip(theta, -n.box, n.box)
            average = average + 2 * (s + 1) / (tau * (tau + 1)) * theta
        moved = x.copy()
        moved[c] += self.learning_rate * (average - x[c])
        return moved


@pytest.fixture
def twin() -> type[Twin]:
    return Twin


@pytest.fixture
def optimum() -> Callable[[float], Array]:
    """The minimiser of the mean loss plus λ‖x‖²/2 over all records, by Newton's method."""

    def find(weight_decay: float) -> Array:
        x = np.zeros(SIZE)
        for _ in range(50):
            g, h = (part.mean(0) for part in gradients_and_hessians(x))
            x = x - np.linalg.solve(h + weight_decay * np.eye(SIZE), g + weight_decay * x)
        return x

    return find
