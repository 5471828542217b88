"""Callbacks hear of the privacy of a fit where Lightning has no hook."""

from __future__ import annotations

import lightning as L
import pytest
import torch

from lightning_dp import PrivacyConfig
from lightning_dp.callbacks import PrivacyLogger
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.hooks import PrivacyCallback
from lightning_dp.strategies.strategy import install


class Hears(PrivacyCallback):
    """Writes down which hook was called after how many charged steps."""

    def __init__(self):
        self.heard = []

    def on_privacy_start(self, trainer, run, folder):
        self.heard.append(("start", run.steps, folder.name))

    def on_privacy_replan(self, trainer, run):
        self.heard.append(("replan", run.steps))

    def on_privacy_step(self, trainer, run):
        self.heard.append(("step", run.steps))

    def on_privacy_save(self, run, content):
        self.heard.append(("save", content.steps))

    def on_privacy_end(self, trainer, run):
        self.heard.append(("end", run.steps))

    def on_privacy_teardown(self, trainer, run):
        self.heard.append(("teardown", run.steps))


class Installs(L.Callback):
    """Makes a Trainer private, and hands callbacks to the strategy."""

    def __init__(self, *given):
        self.given = given
        config = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-5, isolation_probe=False)
        self.run = PrivateRun(config)

    def setup(self, trainer, pl_module, stage):
        install(trainer, self.run, *self.given)


def test_hooks_are_called_in_the_order_of_a_fit(privacy, classifier, mlp, loader, make_trainer):
    hears = Hears()
    trainer = make_trainer(max_steps=2, callbacks=[hears, privacy])

    trainer.fit(classifier(mlp()), loader)
    trainer.save_checkpoint(trainer.default_root_dir + "/after.ckpt")

    assert hears.heard == [
        ("start", 0, "privacy"),
        ("step", 1),
        ("step", 2),
        ("end", 2),
        ("teardown", 2),
        ("save", 2),
    ]


def test_a_fit_that_fails_is_torn_down_and_has_no_end(
    privacy, classifier, mlp, loader, make_trainer
):
    class Fails(L.Callback):
        def on_train_batch_end(self, *_):
            raise KeyError("mine")

    hears = Hears()
    trainer = make_trainer(max_steps=2, callbacks=[hears, privacy, Fails()])

    with pytest.raises(KeyError, match="mine"):
        trainer.fit(classifier(mlp()), loader)

    assert [each[0] for each in hears.heard] == ["start", "step", "teardown"]


def test_the_trainers_own_callback_takes_the_place_of_one_of_its_kind(
    classifier, mlp, loader, make_trainer
):
    class Mine(PrivacyLogger):
        """Has another look at the progress bar."""

        def on_privacy_step(self, trainer, run):
            trainer.progress_bar_metrics["privacy/epsilon"] = "mine"

    given, other, mine = PrivacyLogger(), Hears(), Mine()
    trainer = make_trainer(max_steps=2, callbacks=[Installs(given, other), mine])

    trainer.fit(classifier(mlp()), loader)

    assert trainer.strategy._callbacks == (mine, other)
    assert ("step", 2) in other.heard


def test_a_private_strategy_takes_no_step_outside_a_fit(privacy, classifier, mlp, make_trainer):
    trainer = make_trainer(max_steps=1, callbacks=[privacy])
    strategy = install(trainer, privacy._run)
    strategy.connect(classifier(mlp()))

    with pytest.raises(RuntimeError, match="trains only while its Trainer fits a model"):
        strategy.backward(torch.zeros(()), None)
