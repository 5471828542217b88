"""The engine that a training run ends up with, which makes no difference to the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dp import Diff2, FullBatch
from tests.zoo import private

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


class Gated(nn.Module):
    """A layer of no known type, called with two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(self.gate) * x + y


class WithGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.gated, self.two = nn.Linear(6, 8), Gated(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.one(x))
        return self.two(self.gated(hidden, hidden.square()))


class OwnAttention(DPMultiheadAttention):
    """Another forward pass than that of its base."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x, x, x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = DPLSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 3, 2))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.head = OwnAttention(2, 1, batch_first=True), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.own(x.view(-1, 3, 2))[0].mean(1))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 3))


@pytest.fixture
def train(classifier, blobs, make_trainer):
    def run(engine: str, make: Any, kind: Any = classifier, **options: Any) -> Any:
        torch.manual_seed(0)
        model = kind(make())
        privacy = private(**{"max_grad_norm": 0.5, "seed": 3, "engine": engine, **options})
        torch.manual_seed(1)  # dropout
        make_trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[privacy]).fit(
            model, DataLoader(blobs, 60)
        )
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        return weights, privacy.report().mechanism["gradient engine"]

    return run


@pytest.mark.parametrize(
    ("make", "description"),
    [
        (plain, "layers"),
        (Recurrent, "records, since layers does not cover this model: net.lstm"),
        (Attentive, "records, since layers does not cover this model: net.own"),
    ],
)
def test_auto_takes_an_engine_that_covers_the_model(train, make, description):
    expected, _ = train("hooks", make)
    weights, engine = train("auto", make)
    assert engine.startswith(description)
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("make", "description"),
    [
        (plain, "ghost"),
        (Recurrent, "records, since layers does not cover this model: net.lstm"),
        (WithGate, "records, since layers does not cover this model: net.gated"),
    ],
)
def test_a_second_backward_pass_gives_the_same_training(train, make, description):
    expected, _ = train("auto", make)
    weights, engine = train("ghost", make)
    assert engine.startswith(description)
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)


def test_differences_do_not_depend_on_the_engine(train):
    options = {
        "max_grad_norm": None,
        "estimator": Diff2(3, 0.5, 0.7, split=2.0),
        "noise_multiplier": 0.0,
    }
    expected, _ = train("hooks", plain, **options)
    weights, engine = train("layers", plain, **options)
    assert engine == "layers"
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)
    weights, engine = train("ghost", plain, **options)
    assert engine.startswith("layers, since ghost does not cover this model: The estimator")
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)


def test_a_named_engine_does_not_fall_back(train):
    with pytest.raises(TypeError, match=r"gated.*engine"):
        train("hooks", WithGate)


def test_a_layer_of_two_tensors_is_covered(train):
    expected, _ = train("one_by_one", WithGate)
    weights, engine = train("auto", WithGate)
    assert engine.startswith("records, since layers does not cover this model: net.gated")
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("engine", ["auto", "ghost", "hooks"])
def test_an_own_backward_runs_as_it_is(engine, classifier, train):
    calls: list[bool] = []

    class Own(classifier):  # type: ignore[misc, valid-type]
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            calls.append(True)
            loss.backward(*args, **kwargs)

    expected, _ = train(engine, plain)
    weights, _ = train(engine, plain, kind=Own)
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6 if engine == "ghost" else 0)
    assert len(calls) == 8


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        *((name, {}) for name in ("auto", "ghost", "hooks")),
        *((name, {"retain_graph": True}) for name in ("auto", "hooks")),
    ],
)
def test_manual_backward(engine, arguments, classifier, blobs, make_trainer):
    class Manual(classifier):  # type: ignore[misc, valid-type]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx), **arguments)
            self.optimizers().step()

    results = []
    for kind in (classifier, Manual):
        torch.manual_seed(0)
        model = kind(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)))
        privacy = private(noise_multiplier=0.0, sampling=FullBatch(), engine=engine)
        make_trainer(max_epochs=3, callbacks=[privacy]).fit(model, DataLoader(blobs, 240))
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-7)
