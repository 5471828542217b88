"""A second ledger on a model that another one trained says what both cost together."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.accounting.base import epsilon_text
from lightning_dp.accounting.journal import Charges, read_written
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report import run_report
from lightning_dp.schedules import Exponential
from tests.zoo import Classifier, private

DELTA, RATE = 1e-5, 24 / 240
TOGETHER = "trained before under another privacy ledger"


def epsilon(steps: int) -> float:
    return PLDAccountant().epsilon([(PoissonGaussian(1.5, RATE), steps)], DELTA)


def made() -> DifferentialPrivacy:
    return private(noise_multiplier=1.5)


@pytest.fixture
def fit(fit):
    """``fit(model)``: five steps under a new callback, or a given one."""

    def run(model: Any, privacy: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
        options = {"max_steps": 5, **options}
        return fit(model, made() if privacy is None else privacy, ckpt_path=ckpt_path, **options)

    return run


@pytest.fixture
def another_process(monkeypatch) -> Callable[[], None]:
    """Forgets what this process knows; the journals are what is left."""
    return lambda: monkeypatch.setattr(run_report, "_process", run_report._Process())


def warned(call: Callable[[], Any]) -> float:
    """The sum that the one warning says."""
    with pytest.warns(PrivacyWarning, match=TOGETHER) as caught:
        call()
    (message,) = [str(each.message) for each in caught if TOGETHER in str(each.message)]
    found = re.search(r"Together with the whole plan of this run that is ε = ([\d.]+) at", message)
    assert found is not None, message
    return float(found[1])


def test_three_callbacks_on_one_module_say_what_they_cost_together(classifier, mlp, fit):
    model = classifier(mlp())
    fit(model)
    assert warned(lambda: fit(model)) == pytest.approx(epsilon(10), rel=1e-3)
    assert warned(lambda: fit(model)) == pytest.approx(epsilon(15), rel=1e-3)


def test_one_callback_or_one_chain_of_checkpoints_says_nothing(classifier, mlp, fit, tmp_path):
    model, privacy = classifier(mlp()), made()
    fit(model, privacy)
    fit(model, privacy).save_checkpoint(tmp_path / "a.ckpt")
    fit(model, made(), ckpt_path=tmp_path / "a.ckpt", max_steps=8)
    fit(classifier(mlp()), made(), ckpt_path=tmp_path / "a.ckpt", max_steps=8)


def loaded(model: Any) -> Any:
    new = Classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    new.load_state_dict(model.state_dict())
    return new


def with_a_new_head(model: Any) -> Any:
    return Classifier(nn.Sequential(copy.deepcopy(model.net[0]), nn.Tanh(), nn.Linear(8, 3)))


def with_a_frozen_backbone(model: Any) -> Any:
    model.net[0].requires_grad_(False)
    model.net[2] = nn.Linear(8, 3)
    return model


def wrapped(model: Any) -> Any:
    return Classifier(model.net)


WAYS = [copy.deepcopy, loaded, wrapped, with_a_new_head, with_a_frozen_backbone]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_model_made_of_a_trained_one_is_known_again(classifier, mlp, fit, way):
    model = classifier(mlp())
    fit(model)
    again = way(model)
    assert warned(lambda: fit(again)) == pytest.approx(epsilon(10), rel=1e-3)


@pytest.mark.parametrize("source", ["end of the fit", "checkpoint in the middle"])
@pytest.mark.parametrize("way", [loaded, with_a_new_head], ids=lambda way: way.__name__)
def test_its_weights_are_known_in_another_process_by_the_journal(
    classifier, mlp, fit, tmp_path, another_process, at_each_step, way, source
):
    def save(trainer: L.Trainer, module: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(tmp_path / "middle.ckpt", weights_only=True)

    model = classifier(mlp())
    fit(model, callbacks=[at_each_step(save)])
    if source != "end of the fit":
        state = torch.load(tmp_path / "middle.ckpt", weights_only=True)["state_dict"]
        assert not torch.equal(state["net.0.weight"], model.net[0].weight)
        model.load_state_dict(state)
    again = way(model)
    another_process()
    assert warned(lambda: fit(again)) == pytest.approx(epsilon(10), rel=1e-3)


def test_fingerprints_of_released_weights_stand_in_the_journal(classifier, mlp, fit):
    privacy = made()
    fit(classifier(mlp()), privacy)
    written = read_written(Path(privacy.report().journal))
    assert len(written.weights) == 4  # two layers' weights and biases
    assert written.runs == privacy.report().events


def test_models_that_nobody_trained_are_nobodys(classifier, mlp, fit, another_process):
    """Made alike; reset to what they were; never trained under privacy; a fit that made no step."""
    model = classifier(mlp())
    start = copy.deepcopy(model.state_dict())
    fit(model)
    fit(classifier(mlp()))
    model.load_state_dict(start)
    fit(model)
    another_process()
    fit(classifier(mlp()))
    plain = classifier(mlp())
    fit(plain, max_steps=0)
    fit(plain)


# -- the folder ----------------------------------------------------------------------------


def test_a_plan_without_an_end_says_what_was_spent():
    said = run_report.with_whole_plan(
        Charges({"a": [(PoissonGaussian(1.5, RATE), 5)]}), made()._run
    )
    spent = f"That spent ε = {epsilon_text(epsilon(5))} at δ = 1e-05 (add_remove) already"
    assert said == f"{spent}, to which this run adds."


def test_a_long_schedule_and_the_plan_are_added_up_from_above(classifier, mlp, fit):
    spent = [(PoissonGaussian(4.0 + i * 1e-3, RATE), 1) for i in range(300)]
    privacy = private(noise_schedule=Exponential(0.1))
    bounds, model = [], classifier(mlp())
    model.on_train_batch_start = lambda *_: bounds.append(privacy._run.epsilon_beside(spent))
    fit(model, privacy, max_steps=3)
    exact = PLDAccountant().epsilon([*spent, *privacy._run.ledger.history()], DELTA)
    assert exact <= bounds[0] <= 1.03 * exact
