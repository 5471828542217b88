"""Small models that couple the records of a batch, and models that do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo import Model


class BatchStatistics(nn.Module):
    """BatchNorm by another name."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + 1e-3).sqrt()


class PositionsOverTheBatch(nn.Module):
    """Position embeddings looked up along the wrong dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions(torch.arange(len(x), device=x.device))


class FirstHalf(nn.Module):
    """A comparison of the first half with the second."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.view(2, len(x) // 2, -1)
        return torch.cat([first - second, second - first])


class Wired(nn.Module):
    """One record sees another, but only one at this place of the batch."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[self.place - 1] = x[self.place - 1] + x[self.place]
        return x


class Experts(nn.Module):
    """Top-1 routing to two experts, each with room for a quarter of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(1)
        score, chosen = gate.max(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        room = torch.zeros(len(x), 2)
        for expert in range(2):
            wanting = (chosen == expert).nonzero().flatten()
            best = wanting[score[wanting].argsort(descending=True)][: len(x) // 4]
            room[best, expert] = 1.0
        return x + (outputs * (room * gate).unsqueeze(2)).sum(1)


def network(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def classifier(*middle: nn.Module) -> Model:
    return Model(network(*middle), F.cross_entropy)


def records(n: int = 8, classes: int = 3) -> list[Any]:
    """Return samples of six features and a label."""
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    return list(zip(x, torch.arange(n) % classes, strict=True))
