"""The engine that a training run ends up with, which makes no difference to the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from opacus.layers import DPLSTM
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_dp import Diff2, FullBatch
from lightning_dp.gradients import UnsupportedModelError, engines
from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.layer_calls import LayerCalls
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


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = DPLSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 3, 2))[0][:, -1])


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.Linear(8, 3))


@pytest.fixture
def train(classifier, blobs, fit):
    def run(engine: str, make: Any, kind: Any = classifier, **options: Any) -> Any:
        torch.manual_seed(0)
        model = kind(make())
        privacy = private(**{"max_grad_norm": 0.5, "seed": 3, "engine": engine, **options})
        torch.manual_seed(1)  # dropout
        fit(model, privacy, DataLoader(blobs, 60), max_epochs=2, accumulate_grad_batches=2)
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        return weights, privacy.report().mechanism["gradient engine"]

    return run


@pytest.mark.parametrize(
    ("make", "description"),
    [
        (plain, "layers"),
        (Recurrent, "records, since layers does not cover this model: net.lstm"),
    ],
)
def test_auto_takes_an_engine_that_covers_the_model(train, make, description):
    expected, _ = train("hooks", make)
    weights, engine = train("auto", make)
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
        train("layers", WithGate)


def test_a_module_that_runs_again_for_each_record_may_log(train, classifier):
    class Scaled(classifier):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            self.log("mean", x.mean())
            return self.net(x * self.scale)

    (weights, _), (expected, _) = (
        train(each, lambda: nn.Linear(6, 3), Scaled) for each in ("hooks", "auto")
    )
    torch.testing.assert_close(weights, expected, rtol=0, atol=2e-6)


def test_a_layer_of_two_inputs_that_opacus_has_no_rule_of(train):
    torch.testing.assert_close(
        train("hooks", WithGate)[0], train("auto", WithGate)[0], rtol=0, atol=2e-6
    )


@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        *((name, {}) for name in ("auto", "ghost", "hooks")),
        *((name, {"retain_graph": True}) for name in ("auto", "hooks")),
    ],
)
def test_manual_backward(engine, arguments, classifier, blobs, fit):
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
        fit(model, privacy, DataLoader(blobs, 240), max_epochs=3)
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*results, rtol=0, atol=1e-7)


# -- a charged step whose batch the engine cannot answer: the next one does, once ----------------


PLACES = ["forward", "backward", "take"]


class Fussy(LayerCalls):
    """Refuses one width of rows, at one of the places where an engine can refuse."""

    name, place = "fussy", "backward"
    width = 12

    def _refuse(self, place: str, *, is_odd: bool) -> None:
        if place == self.place and is_odd:
            raise UnsupportedModelError(f"net (Linear) saw rows of {self.width} places. Cut them.")

    def __init__(self, module: nn.Module, params: Any, **how: Any) -> None:
        super().__init__(module, params, **how)
        self._odd = False
        layer = next(part for part in module.modules() if isinstance(part, nn.Linear))

        def look(layer: nn.Module, args: Any) -> None:
            self._odd = args[0].shape[1] == self.width
            self._refuse("forward", is_odd=self._odd)

        self._hooks.add(layer, layer.register_forward_pre_hook, look)

    def backward(self, loss: Tensor, **how: Any) -> None:
        self._refuse("backward", is_odd=self._odd)
        super().backward(loss, **how)

    def take(self, scale: float) -> AbstractPerSampleGradients:
        self._refuse("take", is_odd=self._odd)
        return super().take(scale)


def collate(samples: list[Any]) -> Any:
    """Pad to 9 places, and to 12 where a sample is long."""
    x, y = zip(*samples, strict=True)
    width = 12 if any(len(each) > 9 for each in x) else 9
    return torch.stack(
        [nn.functional.pad(each, (0, width - len(each))) for each in x]
    ), torch.stack(y)


def samples() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    lengths = [9] * 8 + [9, 12] * 4 + [9] * 8  # the second of three chunks is long
    return [
        (torch.randn(n, generator=generator), torch.tensor(i % 3)) for i, n in enumerate(lengths)
    ]


@pytest.fixture
def train_on_ladder(classifier, fit, monkeypatch):
    class Counting(classifier):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(1, 5), nn.Dropout(0.4), nn.Linear(5, 3)))
            self.seen = 0
            self.metric = MeanMetric()
            self.register_buffer("steps", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            self.seen += 1
            self.steps += 1
            self.metric.update(float(batch_idx))
            outputs = self(x.unsqueeze(2)).mean(1)
            loss = nn.functional.cross_entropy(outputs, y)
            self.log("steps", float(batch_idx), on_step=False, on_epoch=True, reduce_fx="sum")
            return loss

    def run(place: str | None, width: int = 12, model: Any = Counting, **options: Any) -> Any:
        monkeypatch.setattr(Fussy, "place", place)
        monkeypatch.setattr(Fussy, "width", width)
        monkeypatch.setitem(engines._LADDERS, "auto", (Fussy, LayerCalls))  # type: ignore[arg-type]
        torch.manual_seed(0)
        module = model()
        privacy = private(max_grad_norm=0.3, seed=3, sampling=FullBatch(), **options)
        torch.manual_seed(1)  # dropout
        trainer = fit(module, privacy, DataLoader(samples(), 8, collate_fn=collate), max_epochs=2)
        return module, privacy.report(), trainer

    run.model = Counting
    return run


@pytest.mark.parametrize("place", PLACES)
def test_a_real_batch_is_answered_by_the_next_engine_as_if_by_the_first(place, train_on_ladder):
    module, report, trainer = train_on_ladder(place)
    expected, plain, usual = train_on_ladder(None)

    for (name, ours), theirs in zip(
        module.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        # Two engines round apart; another draw of dropout or of noise is another number.
        is_same = torch.allclose(ours.double(), theirs.double(), rtol=1e-5, atol=1e-7)
        assert is_same or (place == "forward" and name == "steps"), name
    assert report.mechanism["gradient engine"] == "fussy"  # a batch's shapes are not in the report
    assert (report.epsilon, report.steps) == (plain.epsilon, plain.steps)
    assert trainer.global_step == usual.global_step == 2
    if place != "forward":  # where training_step ended on its way, it begins once more
        assert module.seen == expected.seen
        assert trainer.callback_metrics["steps"] == usual.callback_metrics["steps"]


def test_manual_optimization_ends_where_training_step_cannot_run_again(train_on_ladder):
    class Manual(train_on_ladder.model):  # type: ignore[misc, name-defined]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx == 2:
                self.optimizers().step()

    with pytest.raises(Exception, match="saw rows of 12 places"):
        train_on_ladder("backward", model=Manual)


def test_an_engine_below_that_refuses_too_ends_the_run(train_on_ladder, monkeypatch):
    class Fussier(Fussy):
        def _refuse(self, place: str, *, is_odd: bool) -> None:
            if place == "take" and is_odd:
                raise UnsupportedModelError("net (Linear) saw what nobody takes. Cure.")

    original = engines.EngineChoice.__init__

    def both(self: Any, name: str, **how: Any) -> None:
        original(self, name, **how)
        self._rungs = (Fussy, Fussier)

    monkeypatch.setattr(engines.EngineChoice, "__init__", both)
    with pytest.raises(Exception, match=r"nobody takes.*'fussy' does not cover it either.*Linear"):
        train_on_ladder("backward")
