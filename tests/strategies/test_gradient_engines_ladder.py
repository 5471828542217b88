"""A charged step whose batch the engine cannot answer: the next one does, once, and nobody can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_dp import FullBatch
from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.gradients import UnsupportedModelError, engines
from lightning_dp.gradients.engines import Rung
from lightning_dp.gradients.layer_calls import LayerCalls

PLACES = ["forward", "backward", "take"]


class Fussy(LayerCalls):
    """Refuses one width of rows, at one of the places where an engine can refuse."""

    place = "backward"
    width = 12

    def _refuse(self, place: str, *, is_odd: bool) -> None:
        if place == self.place and is_odd:
            raise UnsupportedModelError(f"net (Linear) saw rows of {self.width} places. Cut them.")

    def attach(self, module: nn.Module, params: Any) -> None:
        super().attach(module, params)
        self._odd = False
        layer = next(part for part in module.modules() if isinstance(part, nn.Linear))

        def look(layer: nn.Module, args: Any) -> None:
            self._odd = args[0].shape[1] == self.width
            self._refuse("forward", is_odd=self._odd)

        self._look = self._attached._hooks.add(layer, layer.register_forward_pre_hook, look)

    def backward(self, loss: Tensor, **how: Any) -> None:
        self._refuse("backward", is_odd=self._odd)
        super().backward(loss, **how)

    def take(self, scale: float, touched: Mapping[str, nn.Parameter]) -> AbstractPerSampleGradients:
        self._refuse("take", is_odd=self._odd)
        return super().take(scale, touched)


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
def train(classifier, make_trainer, monkeypatch):
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
        rungs = (Rung("fussy", Fussy), Rung("layers", LayerCalls))
        monkeypatch.setitem(engines._LADDERS, "auto", rungs)  # type: ignore[arg-type]
        torch.manual_seed(0)
        module = model()
        settings: dict[str, Any] = {"isolation_probe": False, "spot_checks": False, **options}
        privacy = DifferentialPrivacy(
            target_delta=1e-5,
            noise_multiplier=1.0,
            max_grad_norm=0.3,
            seed=3,
            sampling=FullBatch(),
            **settings,
        )
        trainer = make_trainer(max_epochs=2, callbacks=[privacy])
        torch.manual_seed(1)  # dropout
        trainer.fit(module, DataLoader(samples(), 8, collate_fn=collate))
        return module, privacy.report(), trainer

    run.model = Counting
    return run


@pytest.mark.parametrize("place", PLACES)
def test_a_real_batch_is_answered_by_the_next_engine_as_if_by_the_first(place, train):
    module, report, trainer = train(place)
    expected, plain, usual = train(None)

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


@pytest.mark.parametrize("place", PLACES)
def test_a_synthetic_batch_shows_it_before_anything_is_charged(place, train):
    module, report, _ = train(place, isolation_probe=True)
    expected, _, _ = train(None)
    said = report.mechanism["gradient engine"]
    assert said == (
        "layers, since fussy does not cover this model: net (Linear) saw rows of 12 places."
    )
    assert module.seen == expected.seen == 6  # each batch once
    torch.testing.assert_close(list(module.parameters()), list(expected.parameters()))


def test_manual_optimization_ends_where_training_step_cannot_run_again(train):
    class Manual(train.model):  # type: ignore[misc, name-defined]
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(super().training_step(batch, batch_idx))
            if batch_idx == 2:
                self.optimizers().step()

    with pytest.raises(Exception, match="saw rows of 12 places"):
        train("backward", model=Manual)


def test_a_spot_check_sees_the_step_of_the_next_engine(train):
    module, _, _ = train("take", spot_checks=True)
    expected, _, _ = train(None, spot_checks=True)
    torch.testing.assert_close(list(module.parameters()), list(expected.parameters()))


def test_an_engine_below_that_refuses_too_ends_the_run(train, monkeypatch):
    class Fussier(Fussy):
        def _refuse(self, place: str, *, is_odd: bool) -> None:
            if place == "take" and is_odd:
                raise UnsupportedModelError("net (Linear) saw what nobody takes. Cure.")

    original = engines.EngineChoice.__init__

    def both(self: Any, name: str, **how: Any) -> None:
        original(self, name, **how)
        self._rungs = (Rung("fussy", Fussy), Rung("fussier", Fussier))

    monkeypatch.setattr(engines.EngineChoice, "__init__", both)
    with pytest.raises(Exception, match=r"nobody takes.*'fussy' does not cover it either.*Linear"):
        train("backward")
