"""Models that are trained on the device, and the settings of their fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_dp import (
    AdaptiveQuantile,
    Automatic,
    Checks,
    CubicNewton,
    Diff2,
    FullBatch,
    LaplacianSmoothing,
    Momentum,
    PerGroup,
    Storm,
)

__all__ = ["BATCH", "CASES", "NETS", "RECORDS", "STEPS", "UNCHECKED", "Model"]

RECORDS, BATCH, STEPS = 40, 8, 3


class Model(L.LightningModule):
    """A classifier around any network."""

    def __init__(self, net: nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self.make_optimizer = net, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert x.device.type == self.device.type
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters(), lr=0.1)


class Attention(nn.Module):
    """Words and places, attention between them, and a classifier on top."""

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


class Raw(nn.Module):
    """Parameters that meet records outside of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x * self.scale.exp() + self.shift))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(36, 3),
    )


NETS: dict[str, dict[str, Any]] = {
    "mlp": {"net": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))},
    "cnn": {"net": cnn, "x": lambda: torch.randn(RECORDS, 2, 8, 8)},
    "attention": {"net": Attention, "x": lambda: torch.randint(0, 11, (RECORDS, 5))},
    "raw": {"net": Raw},
}

ENGINES = {
    "layers": {"name": "cnn"},
    "ghost": {"name": "cnn", "engine": "ghost"},
    "attention": {"name": "attention"},
    "records": {"name": "raw"},
    "hooks": {"engine": "hooks"},
    "one by one": {"engine": "one_by_one"},
}
ESTIMATORS = {
    "diff2": {"estimator": Diff2(restart_every=2)},
    "storm": {"estimator": Storm(momentum=0.5)},
    "cubic": {"estimator": CubicNewton(1.0, 1.0, inner_steps=3, keep=20)},
}
GROUPS = {"clipping": PerGroup({"*.weight": 0.3, "*": 0.2}), "max_grad_norm": None}
RULES = {
    "groups": GROUPS,
    "groups, ghost": {**GROUPS, "engine": "ghost"},
    "automatic": {"clipping": Automatic()},
    "adaptive": {"clipping": AdaptiveQuantile()},
}
REST = {
    "full batch": {"sampling": FullBatch()},
    "smoothing": {"postprocessing": [LaplacianSmoothing(1.0), Momentum(0.9)]},
    "rough smoothing": {"postprocessing": [LaplacianSmoothing(50.0)]},
    "count": {"count_clipped": True},
    "accumulation": {"trainer": {"accumulate_grad_batches": 2}},
}
CASES = {**ENGINES, **ESTIMATORS, **RULES, **REST}
UNCHECKED = {"checks": Checks(dry_run=False, comparisons=False), "advice": False}
