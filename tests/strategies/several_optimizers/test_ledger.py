"""Private steps alone are charged, and a resumed run goes on with both optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.journal import read_journal
from tests.strategies.several_optimizers.gan import GAN


@pytest.mark.parametrize("every", [1, 2])
def test_private_steps_alone_are_charged(every, fit, tmp_path):
    model = GAN()
    model.every = every

    privacy = fit(model, trainer={"max_epochs": 3})

    (path,) = (tmp_path / "privacy").glob("*.journal")
    _, runs = read_journal(path)
    assert sum(count for run in runs.values() for _, count in run) == privacy.steps == 12
    events = [event for run in runs.values() for event in run]
    assert privacy.epsilon == pytest.approx(PLDAccountant().epsilon(events, 1e-3, "add_remove"))
    assert fit.trainer.global_step == 12 + 12 // every


def test_the_noise_is_calibrated_for_private_steps_alone(fit):
    model = GAN()

    privacy = fit(model, target_epsilon=3.0, trainer={"max_epochs": 3})

    assert privacy.steps == 12
    assert 2.9 < privacy.epsilon <= 3.0


def test_training_stops_before_the_step_that_would_exceed_the_budget(fit):
    affords_4 = fit(GAN()).epsilon + 1e-6

    privacy = fit(GAN(), budget=affords_4, trainer={"max_epochs": 5})

    assert privacy.steps == 4
    assert fit.trainer.global_step == 8
    assert "budget reached" in str(privacy.report())


@pytest.mark.parametrize("at_end", [True, False], ids=["epoch's end", "in the epoch"])
def test_a_resumed_run_goes_on_with_both_optimizers_and_the_same_plan(at_end, fit, tmp_path):
    class Momentum(GAN):
        every = 2

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam(self.generator.parameters(), lr=0.01),
                torch.optim.Adam(self.critic.parameters(), lr=0.01),
            ], []

    every = {"every_n_epochs": 1} if at_end else {"every_n_train_steps": 3}
    saved = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, filename="{step}", **every)
    options = {"max_epochs": 3, "enable_checkpointing": True}
    whole = fit(Momentum(), saved, target_epsilon=3.0, trainer=options)
    noise = whole.noise_multiplier
    path = sorted((tmp_path / "saved").glob("*.ckpt"))[0]
    states = torch.load(path, weights_only=False)["optimizer_states"]
    assert len(states) == 2

    model = Momentum()
    resumed = fit(model, target_epsilon=9.0, trainer=options, ckpt_path=path)

    assert fit.trainer.current_epoch == 3
    assert resumed.noise_multiplier == noise
    assert resumed.steps == whole.steps + (12 - int(_steps_in(path)))
    assert resumed._run.mechanism.step == 12


def _steps_in(path: Any) -> int:
    record = torch.load(path, weights_only=False)
    (found,) = [value for value in _leaves(record) if "step" in value["mechanism"]]
    return int(found["mechanism"]["step"])


def _leaves(record: Any) -> list[dict[str, Any]]:
    if not isinstance(record, dict):
        return []
    inside = [found for value in record.values() for found in _leaves(value)]
    return [record, *inside] if "mechanism" in record else inside


def test_a_second_fit_of_the_same_trainer_goes_on_in_the_plan(fit, loader):
    model = GAN()
    privacy = fit(model)
    fit.trainer.fit_loop.max_epochs = 2
    fit.trainer.fit(model, loader)

    assert privacy.steps == 8
    assert privacy._run.mechanism.step == 8


def test_a_second_private_step_on_a_batch_is_refused(fit):
    class Twice(GAN):
        order = "dd"

    with pytest.raises(RuntimeError, match="Two optimizer steps on one batch"):
        fit(Twice())


def test_a_batch_without_a_private_step_ends_the_run(fit):
    class Alternates(GAN):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.order = "gd"[(batch_idx + 1) % 2]
            super().training_step(batch, batch_idx)

    with pytest.raises(Exception, match=r"no gradient for a chunk.*don't skip batches"):
        fit(Alternates())
