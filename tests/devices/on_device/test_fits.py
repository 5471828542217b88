"""A fit on the device is the fit on the CPU: no tensor of one meets those of the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device import DEVICE
from torch import Tensor, nn

from lightning_dp import (
    CubicNewton,
    Diff2,
    FullBatch,
    LaplacianSmoothing,
    Momentum,
    Storm,
)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


def images() -> Tensor:
    return torch.randn(40, 2, 8, 8)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Embedding(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        found, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.head(self.norm(hidden + found).mean(1))


def words() -> Tensor:
    return torch.randint(0, 11, (40, 5))


class Raw(nn.Module):
    """Parameters that meet records outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x * self.scale.exp() + self.shift))


ENGINES = {
    "bookkeeping": {"net": cnn, "x": images},
    "attention": {"net": Attention, "x": words},
    "traced": {"net": Raw},
    "functional": {"net": mlp, "engine": "functional"},
    "hooks": {"net": cnn, "x": images, "engine": "hooks"},
    "one by one": {"net": mlp, "engine": "one_by_one"},
}
ESTIMATORS = {
    "diff2": {"estimator": Diff2(restart_every=2)},
    "storm": {"estimator": Storm(momentum=0.5)},
    "cubic": {"estimator": CubicNewton(1.0, 1.0, inner_steps=3), "optimizer": torch.optim.SGD},
}
REST = {
    "full batch": {"sampling": FullBatch()},
    "smoothing": {"postprocessing": [LaplacianSmoothing(1.0), Momentum(0.9)]},
    "rough smoothing": {"postprocessing": [LaplacianSmoothing(50.0)]},
    "count": {"count_clipped": True},
    "accumulation": {"trainer": {"accumulate_grad_batches": 2}},
    "no checks": {"isolation_probe": False, "spot_checks": False, "advice": False},
}
CASES = {**ENGINES, **ESTIMATORS, **REST}


@pytest.mark.parametrize("case", CASES)
def test_fit_equals_that_on_the_cpu(case: str, fit: Callable[..., Any]) -> None:
    settings = {"net": mlp, **CASES[case]}
    there, here = (fit(where, **settings) for where in (DEVICE, "cpu"))
    assert there.privacy.steps == here.privacy.steps == 3
    torch.testing.assert_close(there.weights, here.weights, rtol=1e-4, atol=1e-5)
