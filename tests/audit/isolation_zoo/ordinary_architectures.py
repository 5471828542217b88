"""Networks that keep records apart: all of them train."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Small, ordinary


@ordinary
class MixtureOfExperts(Small):
    """A soft gate; each expert sees each record."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 3), *(nn.Linear(4, 3) for _ in range(3))])

    def forward(self, x: Tensor) -> Tensor:
        gate, *experts = self.net
        return sum(
            g[:, None] * expert(x)
            for g, expert in zip(gate(x).softmax(1).unbind(1), experts, strict=True)
        )


@ordinary
class MixtureWithMasks(MixtureOfExperts):
    """Only the best expert counts, by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        gate, *experts = self.net
        scores = gate(x).softmax(1)
        mask = F.one_hot(scores.argmax(1), 3)
        outs = torch.stack([expert(x) for expert in experts], 1)
        return (outs * (mask * scores)[:, :, None]).sum(1)


@ordinary
class TwoHeads(Small):
    """Fixed weights of two tasks."""

    def make(self) -> nn.Module:
        return nn.ModuleDict({"trunk": nn.Linear(4, 8), "a": nn.Linear(8, 3), "b": nn.Linear(8, 1)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        h = F.relu(self.net["trunk"](x))
        return F.cross_entropy(self.net["a"](h), y) + 0.3 * F.mse_loss(
            self.net["b"](h)[:, 0], x.sum(1)
        )


@ordinary
class StochasticDepth(Small):
    """A record skips a block with its own coin."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        first, block, last = self.net
        h = F.relu(first(x))
        coin = (torch.rand(len(x), 1) < 0.8) / 0.8 if self.training else 1.0
        return last(h + coin * F.relu(block(h)))


@ordinary
class LayerDrop(StochasticDepth):
    """One coin for all records: public randomness."""

    def forward(self, x: Tensor) -> Tensor:
        first, block, last = self.net
        h = F.relu(first(x))
        share = 0.0 if self.training and random.random() < 0.3 else 1.0
        return last(h + share * F.relu(block(h)))


@ordinary
class Backbone(Small):
    """A frozen backbone under ``no_grad``, a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.backbone(x)
        return self.net(x)


@ordinary
class RefinedSeveralTimes(Small):
    """One layer is used three times."""

    def make(self) -> nn.Module:
        return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + 0.1 * torch.tanh(self.net[0](x))
        return self.net[1](x)


@ordinary
class HooksThatDoNothing(Small):
    """All hooks of a batch, as a template has them."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x - 0.5, y

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.zeroed = getattr(self, "zeroed", 0) + 1

    def on_after_backward(self) -> None:
        self.backwards = getattr(self, "backwards", 0) + 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last_batch = batch_idx
