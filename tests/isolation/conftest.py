"""Models that couple the records of a batch, and models that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Model(L.LightningModule):
    """A network and a loss of its output and the rest of the batch."""

    def __init__(self, net: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, *others = batch
        return self.loss(self.net(x), *others)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BatchStatistics(nn.Module):
    """BatchNorm by another name."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0) + 1e-3).sqrt()


class RunningStatistics(nn.Module):
    """... that keeps what it saw in a plain attribute, and uses only that."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


class PositionsOverTheBatch(nn.Module):
    """Position embeddings looked up along the wrong dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions(torch.arange(len(x), device=x.device))


class Experts(nn.Module):
    """Top-1 routing to two experts, each with room for half of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        gate = self.router(x).softmax(1)
        score, chosen = gate.max(1)
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        kept = torch.zeros(len(x), 2)
        for expert in range(2):
            wanting = (chosen == expert).nonzero().flatten()
            best = wanting[score[wanting].argsort(descending=True)][: len(x) // 4]
            kept[best, expert] = 1.0
        return x + (outputs * (kept * gate).unsqueeze(2)).sum(1)


class FoldsPairs(nn.Module):
    """Two records in one row."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x) // 2, -1)


class Tokens(nn.Module):
    """A language model: a distribution for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


class WithLoss(nn.Module):
    """Scores and their loss, as models of transformers return them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.layer(x)
        return scores, scores.square().sum() / 32


def network(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def weighted(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, weight=torch.tensor([1.0, 1.0, 5.0]))


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    output = F.normalize(output)
    return F.cross_entropy(output @ output.T / 0.1, torch.arange(len(output)))


def load_balancing(output: Tensor, y: Tensor) -> Tensor:
    usage = output.softmax(1).mean(0)
    return F.cross_entropy(output, y) + 0.01 * 3 * (usage * usage).sum()


def token_mean(output: Tensor, mask: Tensor) -> Tensor:
    losses = output.square().sum(2)
    return (losses * mask).sum() / mask.sum()


def record_mean(output: Tensor, mask: Tensor) -> Tensor:
    losses = output.square().sum(2)
    return ((losses * mask).sum(1) / mask.sum(1)).mean()


def flat_tokens(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def features() -> tuple[Tensor, Tensor]:
    return torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.zeros(5, 7, dtype=torch.int64), torch.zeros(5, 7, dtype=torch.int64)


COUPLED: dict[str, tuple[Callable[[], Model], Callable[[], Any], str, str]] = {
    "class_weights": (lambda: Model(network(), weighted), features, "class weights", ""),
    "sum": (
        lambda: Model(network(), lambda o, y: F.cross_entropy(o, y, reduction="sum")),
        features,
        "the loss is a sum",
        "",
    ),
    "fixed_divisor": (
        lambda: Model(network(), lambda o, y: F.cross_entropy(o, y, reduction="sum") / 32),
        features,
        "the loss is a sum",
        "",
    ),
    "fixed_divisor_in_the_network": (
        lambda: Model(WithLoss(), lambda o, y: o[1]),
        features,
        "the loss is a sum",
        "",
    ),
    "ignored_class": (
        lambda: Model(network(), lambda o, y: F.cross_entropy(o, y, ignore_index=0)),
        features,
        "ignore_index",
        "",
    ),
    "padding_token": (
        lambda: Model(
            Tokens(),
            lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=0),
        ),
        tokens,
        "ignore_index",
        "",
    ),
    "token_mean": (lambda: Model(Tokens(), token_mean), tokens, "number of tokens", ""),
    "contrastive": (lambda: Model(network(), contrastive), features, "mixes or compares", ""),
    "load_balancing": (lambda: Model(network(), load_balancing), features, "mixes or comp", ""),
    "batch_norm": (
        lambda: Model(network(BatchStatistics()), F.cross_entropy),
        features,
        r"net\.1 \(BatchStatistics\) lets.*GroupNorm",
        "net.1",
    ),
    "running_statistics": (
        lambda: Model(network(RunningStatistics()), F.cross_entropy),
        features,
        r"net\.1 \(RunningStatistics\) lets",
        "net.1",
    ),
    "experts": (
        lambda: Model(network(Experts()), F.cross_entropy),
        features,
        r"net\.1 \(Experts\) lets.*routing",
        "net.1",
    ),
    "positions_over_the_batch": (
        lambda: Model(network(PositionsOverTheBatch()), F.cross_entropy),
        features,
        r"net\.1 \(PositionsOverTheBatch\) lets.*positions",
        "net.1",
    ),
}

ISOLATED: dict[str, tuple[Callable[[], Model], Callable[[], Any]]] = {
    "cross_entropy": (lambda: Model(network(), F.cross_entropy), features),
    "weights_per_record": (
        lambda: Model(
            network(),
            lambda o, y: (
                F.cross_entropy(o, y, reduction="none") * torch.tensor([1.0, 2.0, 5.0])[y]
            ).mean(),
        ),
        features,
    ),
    "mean_of_each_record": (lambda: Model(Tokens(), record_mean), tokens),
    "layer_norm_and_dropout": (
        lambda: Model(network(nn.LayerNorm(8), nn.Dropout(0.5)), F.cross_entropy),
        features,
    ),
    "functional_dropout": (
        lambda: Model(network(), lambda o, y: F.cross_entropy(F.dropout(o, 0.3), y)),
        features,
    ),
    "flat_tokens": (lambda: Model(Tokens(), flat_tokens), tokens),
}


@pytest.fixture
def model_class() -> type[Model]:
    return Model


@pytest.fixture
def make_network() -> Callable[..., nn.Sequential]:
    return network


@pytest.fixture(params=COUPLED)
def coupled(request: pytest.FixtureRequest) -> tuple[Model, Any, str, str]:
    """A model, a batch, what must be said, and the module to name."""
    make, batch, words, module = COUPLED[request.param]
    return make(), batch(), words, module


@pytest.fixture(params=ISOLATED)
def isolated(request: pytest.FixtureRequest) -> tuple[Model, Any]:
    make, batch = ISOLATED[request.param]
    return make(), batch()


@pytest.fixture
def class_weighted() -> Model:
    return COUPLED["class_weights"][0]()


@pytest.fixture
def language_model() -> Model:
    return Model(Tokens(), flat_tokens)
