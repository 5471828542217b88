"""Schedulers that follow the training data are refused; what else acts on a metric of it is said."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from lightning_dp._refusals import PrivacyWarning
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report.files import read_report
from tests.zoo import private

REFUSED = "ReduceLROnPlateau follows '.*', a metric of the training data.*StepLR"


class Logs(L.LightningModule):
    """Logs its loss in a hook of one's choice, and steps a scheduler by it or not.

    Args:
        hook: where it logs.
        monitor: what a plateau scheduler follows; None for none.
        interval: of the scheduler.
        log: arguments of ``self.log``.
    """

    def __init__(
        self,
        hook: str = "training_step",
        monitor: str | None = None,
        interval: str = "epoch",
        **log: Any,
    ) -> None:
        super().__init__()
        self.net, self.metric, self.loss = nn.Linear(6, 3), torchmetrics.MeanMetric(), None
        self.hook, self.monitor, self.interval, self.how = hook, monitor, interval, log
        if hook != "training_step":
            setattr(self, hook, self._log)

    def _log(self, *_: Any, **__: Any) -> None:
        value = torch.zeros(()) if self.loss is None else self.loss
        self.log("loss", value, **self.how)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.loss = loss.detach()
        if self.hook == "training_step":
            self._log()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.monitor is None:
            return optimizer
        scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, threshold_mode="abs")
        how = {"scheduler": scheduler, "monitor": self.monitor, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": how}


@pytest.fixture
def privacy() -> DifferentialPrivacy:
    return private()


@pytest.fixture
def fit(loader, make_trainer, privacy, tmp_path):
    """A fit of two epochs, with its privacy warnings; validated unless told otherwise."""

    def run(model: L.LightningModule, *callbacks: L.Callback, validate: bool = True):
        options = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1}
        options["enable_checkpointing"] = True
        trainer = make_trainer(callbacks=[privacy, *callbacks], **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, loader, loader if validate else None)
        return [str(each.message) for each in caught if each.category is PrivacyWarning]

    return run


# -- schedulers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("monitor", ["loss", "loss_step", "loss_epoch"])
def test_without_validation_a_plateau_scheduler_is_refused_before_a_charge(
    monitor, interval, fit, assert_refused
):
    model = Logs(monitor=monitor, interval=interval, on_step=True, on_epoch=True)

    assert_refused(lambda: fit(model, validate=False), REFUSED, model)


@pytest.mark.parametrize(
    ("hook", "charged", "released"),
    [
        ("training_step", 1, 0),
        ("on_train_start", 0, 0),
        ("on_train_epoch_start", 0, 0),
        ("on_train_batch_start", 0, 0),
        ("on_before_backward", 1, 1),
        ("on_before_optimizer_step", 1, 1),
        ("on_train_batch_end", 1, 1),
        ("on_train_epoch_end", 3, 3),
    ],
)
def test_with_validation_it_is_refused_when_its_metric_turns_out_to_be_of_training(
    hook, charged, released, fit, assert_refused
):
    model = Logs(hook, monitor="loss")

    assert_refused(lambda: fit(model), REFUSED, model, charged, released, gradient_left=True)


def test_a_metric_that_a_callback_logs_is_refused(fit, assert_refused):
    class Norm(L.Callback):
        def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            self.log("norm", 1.0)

    model = Logs(monitor="norm")

    assert_refused(
        lambda: fit(model, Norm()), REFUSED, model, charged=1, released=1, gradient_left=True
    )


def test_a_scheduler_of_ones_own_that_reduces_on_a_plateau_is_refused(fit, assert_refused):
    class Own(Logs):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = LambdaLR(optimizer, lambda step: 1.0)
            how = {"scheduler": scheduler, "monitor": "loss", "reduce_on_plateau": True}
            return {"optimizer": optimizer, "lr_scheduler": how}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            raise AssertionError("a metric of the training data was handed out")

    model = Own()

    assert_refused(lambda: fit(model), "LambdaLR follows 'loss'", model, charged=1)


def test_a_name_of_validation_that_training_logs_too_is_refused(fit, assert_refused):
    class Same(Logs):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", 1.0)

    model = Same(monitor="loss")

    assert_refused(lambda: fit(model), REFUSED, model, charged=1)


@pytest.mark.parametrize("monitor", ["val_loss", "privacy/epsilon"])
def test_metrics_of_validation_and_of_privacy_may_be_followed(monitor, fit, privacy):
    assert fit(Logs(monitor=monitor)) == []
    assert privacy.steps == 6


class Manual(Logs):
    """Steps the scheduler itself."""

    def __init__(self, by: str, *, returned: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.by, self.returned = False, by, returned

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()

    def on_train_epoch_end(self) -> None:
        plateau = self.lr_schedulers() if self.returned else self.plateau
        plateau.step(self.trainer.callback_metrics[self.by])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer)
        if self.returned:
            return [optimizer], [plateau]
        self.plateau = plateau
        return optimizer


@pytest.mark.parametrize("returned", [True, False])
def test_a_plateau_scheduler_stepped_by_hand_is_refused_without_validation_and_said_with_it(
    returned, fit, privacy, assert_refused
):
    model = Manual("loss", returned=returned)
    assert_refused(
        lambda: fit(model, validate=False), "steps a ReduceLROnPlateau itself.*StepLR", model
    )

    (said,) = fit(Manual("val_loss", returned=returned))
    assert "If it does so by a metric of the training data, ε does not hold" in said
    assert privacy.steps == 6


# -- callbacks ---------------------------------------------------------------------------------------


class Follows(L.Callback):
    """A callback of one's own."""

    monitor = "loss"


CALLBACKS = {
    "ModelCheckpoint": lambda folder: ModelCheckpoint(folder, monitor="loss"),
    "EarlyStopping": lambda folder: EarlyStopping("loss"),
    "Follows": lambda folder: Follows(),
}


@pytest.mark.parametrize(
    ("name", "validate"), [*((name, True) for name in CALLBACKS), ("Follows", False)]
)
def test_a_callback_that_acts_on_a_metric_of_training_warns_once_and_is_in_the_report(
    name, validate, fit, privacy, tmp_path
):
    (said,) = fit(Logs(), CALLBACKS[name](tmp_path / "a"), validate=validate)

    assert f"{name}(monitor='loss') uses a metric of the training data" in said
    assert "scores are saved in checkpoints" in said and "ε does not cover it" in said
    (path,) = tmp_path.rglob("privacy_report-*.json")
    for report in (privacy.report(), read_report(path)):
        (entry,) = (text for text in report.not_covered if name in text)
        assert re.search("scores are saved in checkpoints, without noise", entry)


def test_a_file_name_with_a_metric_of_training_warns(fit, privacy, tmp_path):
    (said,) = fit(Logs(), ModelCheckpoint(tmp_path / "a", filename="{epoch}-{loss:.2f}"))

    assert "ModelCheckpoint(filename='{epoch}-{loss:.2f}')" in said and "in file names" in said
    assert any("file names" in text for text in privacy.report().not_covered)


def test_what_a_saved_metric_counted_is_named_in_the_report(fit, privacy):
    model = Logs()
    model.metric.persistent(True)

    assert fit(model) == []
    assert any("the metric 'metric' counted" in text for text in privacy.report().not_covered)
