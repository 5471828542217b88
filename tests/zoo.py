"""Small models, batches and private runs that tests in several folders and processes share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_dp import AbstractSampling, Checks
from lightning_dp.accounting.events import AbstractEvent, Gaussian
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.sampling import BatchPlan


def sgd(params: Any) -> torch.optim.Optimizer:
    """A function with a name, which can be pickled with the module that holds it."""
    return torch.optim.SGD(params, lr=0.1)


def mlp() -> nn.Sequential:
    """A small network with the same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Classifier(L.LightningModule):
    """An ordinary LightningModule around any network."""

    def __init__(
        self, net: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    ) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Model(L.LightningModule):
    """A network, and a loss of its output and the rest of the batch."""

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, *others = batch
        return self.loss(self.net(x), *others)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def private(**options: Any) -> DifferentialPrivacy:
    """A callback with noise 1 at δ = 1e-5, without the comparisons of samples."""
    noise = {} if "target_epsilon" in options else {"noise_multiplier": 1.0}
    quiet = {"target_delta": 1e-5, "checks": Checks(dry_run=False, comparisons=False)}
    return DifferentialPrivacy(**{**noise, **quiet, **options})


def flat(module: nn.Module) -> Tensor:
    """All parameters as one vector of their own."""
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def records(n: int) -> tuple[Tensor, Tensor]:
    """n records of 6 features and one of 3 classes, the same every time."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % 3
    return torch.randn(n, 6, generator=generator) + 2 * nn.functional.one_hot(y, 6), y


@dataclass(frozen=True)
class WholeSet(AbstractSampling):
    """Every step on all records, but as many steps per epoch as Poisson batches would make.

    Without noise its trajectory does not depend on chance, so two runs can be compared weight by
    weight, also in the middle of an epoch.
    """

    def plan(
        self,
        *,
        num_records: int,
        batch_size: int,
        accumulate: int,
        world_size: int,
        loader_length: int,
    ) -> BatchPlan:
        return BatchPlan(num_records, 1.0, accumulate, math.ceil(loader_length / accumulate))

    def draw(
        self, shard_size: int, sample_rate: float, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        return np.arange(shard_size)

    def event(self, noise_multiplier: float, sample_rate: float) -> AbstractEvent:
        return Gaussian(noise_multiplier)


def gradient_rows(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """(n, d): the gradient of each record's cross-entropy, one at a time, over what is trained."""
    params, rows = [p for p in net.parameters() if p.requires_grad], []
    for i in range(len(x)):
        loss = nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)]))
    return torch.stack(rows)


def clipped(rows: Tensor, clip_norm: float) -> Tensor:
    """The sum of rows, each scaled down to the clip norm."""
    return (rows * (clip_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


SHAPES = ((3, 4), (5,), (2, 2, 2))


def random_gradients(records: int, *, seed: int = 0, spread: float = 3.0) -> list[Tensor]:
    """One (records, *shape) tensor per shape; record norms on both sides of 1."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-spread, spread, records, base=2.0)
    return [
        torch.randn(records, *shape, generator=generator)
        * sizes.view(-1, *[1] * len(shape))
        / math.sqrt(25)
        for shape in SHAPES
    ]
