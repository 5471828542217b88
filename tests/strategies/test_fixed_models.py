"""Models that were refused train after ``fix``, with the gradients of each record alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch, fix
from lightning_dp.callbacks import DifferentialPrivacy


class Block(nn.Module):
    """A residual block as torchvision's, on pictures of 6 values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32)
        self.relu, self.again = nn.ReLU(inplace=True), nn.BatchNorm1d(32)
        self.down, self.head = nn.Conv1d(32, 32, 3, padding=1), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm(self.conv(x.unsqueeze(1))))
        y = self.relu(self.again(self.down(y)) + y)
        return self.head(y.mean(2))


class Attending(nn.Module):
    """Attention, of which Opacus' hooks see nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(2, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x.view(len(x), 3, 2))
        return self.head(self.attention(y, y, y, need_weights=False)[0].mean(1))


def backbone() -> nn.Module:
    """A frozen backbone with statistics, and a head."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net(3 * torch.randn(50, 6) + 1)
    for layer in net[:2]:
        layer.requires_grad_(False)
    return net


def rescaled() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), Table(), nn.Linear(8, 3))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] > 0).long())


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    # the model, arguments of fix, the engine, the refusal without fix
    "residual block": (Block, {}, "auto", r"\['net\.norm', 'net\.again'\] normalise.*fix\(model\)"),
    "kept statistics": (
        Block,
        {"norms": "fixed"},
        "auto",
        r"normalise.*lightning_dp\.fix\(model\)",
    ),
    "frozen backbone": (backbone, {}, "auto", r"normalise.*its statistics as constants"),
    "max_norm": (rescaled, {}, "auto", r"max_norm set.*as lightning_dp\.fix\(model\) does"),
    "attention, hooks": (
        Attending,
        {"attention": True},
        "hooks",
        r"net\.attention \(MultiheadAttention\).*lightning_dp\.fix\(model, attention=True\)",
    ),
}


@pytest.fixture(params=MODELS)
def case(
    request: pytest.FixtureRequest,
) -> tuple[Callable[[], nn.Module], dict[str, Any], str, str]:
    return MODELS[request.param]


def settings(engine: str, **more: Any) -> dict[str, Any]:
    unchecked = {"isolation_probe": False, "spot_checks": False}
    return {"target_delta": 1e-5, "engine": engine, **unchecked, **more}


def test_a_refused_model_trains_after_the_cure_of_the_refusal(
    case, blobs, loader, classifier, make_trainer
):
    make, options, engine, match = case
    torch.manual_seed(0)
    model = classifier(make())
    privacy = DifferentialPrivacy(**settings(engine, noise_multiplier=1.0))
    with pytest.raises(Exception, match=f"{match}"):
        make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)
    assert privacy.steps <= 1

    assert fix(model, **options) is model

    privacy = DifferentialPrivacy(**settings(engine, target_epsilon=8.0))
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(model, loader)
    assert privacy.steps == 10
    assert 0 < privacy.epsilon <= 8.0


def test_it_takes_the_steps_of_each_record_alone(
    case, blobs: TensorDataset, classifier, make_trainer
):
    make, options, engine, _ = case
    torch.manual_seed(0)
    model = fix(classifier(make()), **options)
    records = blobs[:20]
    expected = stepped(copy.deepcopy(model), *records, clip_norm=0.5)
    privacy = DifferentialPrivacy(
        **settings(engine, noise_multiplier=0.0, max_grad_norm=0.5),
        sampling=FullBatch(),
    )
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(
        model, DataLoader(TensorDataset(*records), 20)
    )
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, expected[name], rtol=0, atol=2e-6)


class Positions(nn.Module):
    """Position ids in a buffer, without a row for each record."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.head = nn.Embedding(6, 4), nn.Linear(4, 3)
        self.register_buffer("position_ids", torch.arange(6)[None])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x.unsqueeze(2) + self.places(self.position_ids)).sum(1))


def test_position_ids_train_as_they_are_by_default(blobs, loader, classifier, make_trainer):
    hooks = DifferentialPrivacy(**settings("hooks", noise_multiplier=1.0))
    with pytest.raises(TypeError, match=r"Position ids without a row.*train with engine='auto'"):
        make_trainer(max_epochs=1, callbacks=[hooks]).fit(classifier(Positions()), loader)
    privacy = DifferentialPrivacy(**settings("auto", noise_multiplier=1.0))
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(classifier(Positions()), loader)
    assert privacy.steps == 10


def stepped(model: Any, x: Tensor, y: Tensor, clip_norm: float) -> dict[str, Tensor]:
    """The parameters after one step of SGD with clipped gradients, one record at a time."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    total = {name: torch.zeros_like(param) for name, param in params.items()}
    for one, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(model(one[None]), label[None])
        rows = torch.autograd.grad(loss, list(params.values()))
        norm = torch.cat([row.flatten() for row in rows]).norm()
        for name, row in zip(params, rows, strict=True):
            total[name] += row * (clip_norm / norm).clamp(max=1.0)
    with torch.no_grad():
        for name, param in params.items():
            param -= 0.1 * total[name] / len(x)
    return dict(model.named_parameters())
