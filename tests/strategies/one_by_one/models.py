"""Models of which each record runs alone, and the sum by a loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_dp import CubicNewton, Diff2
from lightning_dp.estimators import Storm

C = 0.3
N = 10
SEEN: list[float] = [0.0]  # outside of every model


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.build()

    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class RawParameters(Base):
    """A parameter of the LightningModule itself, used in training_step."""

    def build(self) -> None:
        super().build()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.net(x) / self.temperature.square(), y)


class TiedByFunction(Base):
    """A weight in its layer and, transposed, outside it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = torch.tanh(self.net[0](x))
        again = F.linear(hidden, self.net[0].weight.t())
        return F.cross_entropy(self.net(x), y) + (again - x).square().mean()


class WeightNorm(Base):
    def build(self) -> None:
        self.net = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)
        )


class Cell(Base):
    def build(self) -> None:
        self.cell, self.head = nn.GRUCell(2, 5), nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        state = x.new_zeros(len(x), 5)
        for part in x.view(-1, 3, 2).unbind(1):
            state = self.cell(part, state)
        return F.cross_entropy(self.head(state), y)


class TimeFirst(Base):
    """An ordinary LSTM with the records in the second dimension."""

    def build(self) -> None:
        self.lstm, self.head = nn.LSTM(2, 5), nn.Linear(5, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.head(self.lstm(x.view(-1, 3, 2).transpose(0, 1))[0][-1]), y)


class OneRowOfPositions(Base):
    def build(self) -> None:
        self.positions, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        states = x.unsqueeze(-1) * self.positions(torch.arange(6, device=x.device))
        return F.cross_entropy(self.head(torch.tanh(states).mean(1)), y)


class Compiled(Base):
    def build(self) -> None:
        super().build()
        self.net = torch.compile(self.net, backend="aot_eager")


class Contrastive(Base):
    """Two views of each record; alone, its views are compared with each other only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        views = F.normalize(self.net(torch.stack([x, x.flip(1), -x], 1)), dim=-1).flatten(0, 1)
        alike = views @ views.t() / 0.5
        return (alike.logsumexp(1) - alike.diagonal()).mean()


class Coupled(Base):
    """A loss over the batch, which any other engine refuses; and a sum, with noise inside."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        return (losses.sum() - 0.2).abs() + 0.2 + losses.max()


MODELS = [
    RawParameters,
    TiedByFunction,
    WeightNorm,
    Cell,
    TimeFirst,
    OneRowOfPositions,
    Contrastive,
    Coupled,
    pytest.param(Compiled, marks=pytest.mark.slow),
]


def records(count: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.arange(count) % 3)


def clipped_by_a_loop(model: L.LightningModule, data: Any, collate: Any = None) -> Tensor:
    """Run the records one after the other, each in a copy of the model, and add them up."""
    total = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for record in data:
        alone = copy.deepcopy(model)
        batch = (collate or torch.utils.data.default_collate)([record])
        loss = alone.training_step(batch, 0)
        loss = loss["loss"] if isinstance(loss, dict) else loss
        if loss is None:
            continue
        SEEN[:] = [0.0]
        loss.backward()
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
        flat = torch.cat([grad.double().flatten() for grad in grads])
        if bool(flat.isfinite().all()):
            total += flat * min(1.0, C / float(flat.norm()))
    return total


ESTIMATORS: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "diff2": lambda: Diff2(3, C, 0.5, split=2.0),
    "storm": lambda: Storm(momentum=0.3, max_grad_norm=C),
    "cubic_newton": lambda: CubicNewton(
        strong_convexity=1.0, hessian_lipschitz=1.0, inner_steps=3, max_grad_norm=C, keep=40
    ),
}
