"""Steps of little models as functions, and the batches whose shapes they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPECTED = 24  # records in a batch


class Step(L.LightningModule):
    """A training_step of its network and its batch."""

    def __init__(
        self, step: Callable[..., Any], net: nn.Module | None = None, **parts: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)) if net is None else net
        )
        self._step = step
        for name, part in parts.items():
            setattr(self, name, part)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self._step(self, *batch) if isinstance(batch, tuple) else self._step(self, batch)


def labelled(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, 6), torch.zeros(n, dtype=torch.int64)


def real(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.zeros(5, 6), torch.zeros(5, *shape))


def alone() -> tuple[Tensor]:
    return (torch.zeros(5, 6),)


def losses(model: Step, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model.net(x), y, reduction="none")


def some(names: Iterable[str], nth: int) -> list[Any]:
    """Let every nth be tried each time, and the others with the slow tests."""
    slow = pytest.mark.slow
    return [pytest.param(n, marks=[slow] if i % nth else []) for i, n in enumerate(names)]


class Tokens(nn.Module):
    def __init__(self, vocabulary: int = 12) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.zeros(5, 7, dtype=torch.int64), torch.zeros(5, 7, dtype=torch.int64)
