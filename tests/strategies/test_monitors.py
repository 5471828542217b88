"""Schedulers that follow the training data are refused; what else acts on a metric of it is said."""

from __future__ import annotations

import math
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

from lightning_dp import Checks
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.report.files import read_report
from tests.zoo import private

REFUSED = "ReduceLROnPlateau follows '.*', a metric of the training data.*StepLR"
LIMITS = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1}


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
        self.log("loss", torch.zeros(()) if self.loss is None else self.loss, **self.how)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.loss = loss.detach()
        if self.hook == "training_step":
            self._log()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def scheduler(self, optimizer: Any) -> dict[str, Any]:
        plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=1e9, threshold_mode="abs")
        return {"scheduler": plateau, "interval": self.interval}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.monitor is None:
            return optimizer
        how = {**self.scheduler(optimizer), "monitor": self.monitor}
        return {"optimizer": optimizer, "lr_scheduler": how}


class Own(Logs):
    def scheduler(self, optimizer: Any) -> dict[str, Any]:
        return {"scheduler": LambdaLR(optimizer, lambda step: 1.0), "reduce_on_plateau": True}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        raise AssertionError("a metric of the training data was handed out")


class Same(Logs):
    """Training logs a name of validation, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", 1.0)


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

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            plateau = self.lr_schedulers() if self.returned else self.plateau
            plateau.step(self.trainer.callback_metrics[self.by])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer)
        if self.returned:
            return [optimizer], [plateau]
        self.plateau = plateau
        return optimizer


class LogsNorm(L.Callback):
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.log("norm", 1.0)


BOTH = {"on_step": True, "on_epoch": True}


@pytest.mark.parametrize(
    "model",
    [
        *(lambda m=monitor: Logs(monitor=m, **BOTH) for monitor in ("loss_step", "loss_epoch")),
        *(lambda i=each: Logs(monitor="loss", interval=i, **BOTH) for each in ("epoch", "step")),
        *(lambda r=returned: Manual("loss", returned=r) for returned in (True, False)),
    ],
)
def test_without_validation_a_plateau_scheduler_is_refused_before_a_charge(model, ends):
    itself = "steps a ReduceLROnPlateau itself.*StepLR"
    ends(model(), itself if isinstance(model(), Manual) else REFUSED, privacy=UNCHECKED, **LIMITS)


UNCHECKED = {"checks": Checks(dry_run=False, comparisons=False)}
WHEN_LOGGED = {  # the hook -> steps that were charged, and released
    "training_step": (1, 0),
    "on_train_start": (0, 0),
    "on_train_epoch_start": (0, 0),
    "on_train_batch_start": (0, 0),
    "on_before_backward": (1, 1),
    "on_before_optimizer_step": (1, 1),
    "on_train_batch_end": (1, 1),
    "on_train_epoch_end": (3, 3),
}


@pytest.mark.parametrize(
    ("model", "match", "charged", "released"),
    [
        *((lambda h=h: Logs(h, monitor="loss"), REFUSED, *n) for h, n in WHEN_LOGGED.items()),
        (lambda: Logs(monitor="norm"), REFUSED, 1, 1),
        (lambda: Own(monitor="loss"), "LambdaLR follows 'loss'", 1, 0),
        (lambda: Same(monitor="loss"), REFUSED, 1, 0),
    ],
)
def test_with_validation_it_is_refused_when_its_metric_turns_out_to_be_of_training(
    model, match, charged, released, ends, loader
):
    expected = {"charged": charged, "released": released, "gradient_left": True}
    ends(
        model(), match, privacy=UNCHECKED, validate=loader, callbacks=[LogsNorm()],
        **expected, **LIMITS,
    )  # fmt: skip


class Follows:
    """The ways by which a module lets the next steps follow a metric, unless it is of validation."""

    class InTheStep(Logs):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            before = self.trainer.callback_metrics.get(self.by, 0.0)
            return super().training_step(batch, batch_idx) * (1.0 if before < 10 else 0.5)

    class ThroughAnAttribute(Logs):
        scale = 1.0

        def on_train_epoch_start(self) -> None:
            self.scale = float(self.trainer.callback_metrics.get(self.by, 1.0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.scale

    class InAFunctionOfTheSchedule(Logs):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [LambdaLR(optimizer, self.rate)]

        def rate(self, epoch: int) -> float:
            metrics = {} if self._trainer is None else self.trainer.callback_metrics
            return 1.0 if metrics.get(self.by, 1.0) < 10 else 0.5

    class InItsOptimizerStep(Logs):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
            _set_rate(optimizer, self.trainer.logged_metrics.get(self.by, 1.0))
            optimizer.step(closure=closure)

    class BehindTheStep(Logs):
        def on_train_batch_end(self, *_: Any) -> None:
            _set_rate(
                self.trainer.optimizers[0], self.trainer.progress_bar_metrics.get(self.by, 1.0)
            )

    class BehindTheEpoch(Logs):
        def on_train_epoch_end(self) -> None:
            _set_rate(self.trainer.optimizers[0], self.trainer.callback_metrics.get(self.by, 1.0))

    class BehindValidation(Logs):
        def on_validation_epoch_end(self) -> None:
            _set_rate(self.trainer.optimizers[0], self.trainer.callback_metrics.get(self.by, 1.0))

    class ByTheStop(Logs):
        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = bool(self.trainer.callback_metrics.get(self.by, 1.0) > 100)

    class InTheStepOfAScheduler(Manual):
        def __init__(self) -> None:
            super().__init__("loss", returned=True)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            self.lr_schedulers().step(self.trainer.callback_metrics.get(self.by, 1.0))

        def on_validation_epoch_end(self) -> None:
            pass

    class ByAScheduler(Manual):
        def __init__(self) -> None:
            super().__init__("loss", returned=True)


WAYS = {name: way for name, way in vars(Follows).items() if isinstance(way, type)}


def _set_rate(optimizer: Any, metric: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 if metric < 10 else 0.05


@pytest.mark.parametrize("name", WAYS)
def test_what_steers_training_by_a_metric_of_it_is_void(name, fit, loader):
    model, privacy = WAYS[name](), private(checks=Checks())
    model.by, model.how = "loss", {"prog_bar": True}
    with pytest.raises(VoidedRunError, match=r"trainer\.callback_metrics"):
        fit(model, privacy, validate=loader, **{**LIMITS, "max_epochs": 12})
    assert math.isinf(privacy.epsilon)


def test_a_data_module_may_not_read_them_either(fit, loader):
    class Scales(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loader

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            metrics = {} if self.trainer is None else self.trainer.callback_metrics
            return batch[0] * (1.0 if metrics.get("loss", 1.0) < 10 else 2.0), batch[1]

    with pytest.raises(VoidedRunError, match=r"trainer\.callback_metrics"):
        fit(Logs(), private(checks=Checks()), Scales(), max_epochs=2)


@pytest.mark.parametrize("name", sorted(set(WAYS) - {"InTheStep", "InTheStepOfAScheduler"}))
def test_a_metric_of_validation_may_steer_it(name, fit, loader):
    model = WAYS[name]()
    model.by, model.how = "val_loss", {"prog_bar": True}
    assert fit(model, private(checks=Checks()), validate=loader, **LIMITS).global_step == 6


# -- what is allowed, and said ---------------------------------------------------------------------


class FollowsLoss(L.Callback):
    monitor = "loss"


CHECKPOINT = ["uses a metric of the training data", "scores are saved in checkpoints"]
IN_NAMES = ["ModelCheckpoint(filename='{epoch}-{loss:.2f}')", "in file names"]


@pytest.mark.parametrize(
    ("model", "callback", "said", "listed", "validated"),
    [
        (lambda: Logs(monitor="val_loss"), None, [], "", True),
        (lambda: Logs(monitor="privacy/epsilon"), None, [], "", True),
        *(
            (
                lambda r=r: Manual("val_loss", returned=r),
                None,
                [],
                "",
                True,
            )
            for r in (True, False)
        ),
        (
            Logs,
            lambda folder: ModelCheckpoint(folder, monitor="loss"),
            CHECKPOINT,
            "scores are",
            True,
        ),
        (Logs, lambda folder: EarlyStopping("loss"), CHECKPOINT, "scores are", True),
        (Logs, lambda folder: FollowsLoss(), CHECKPOINT, "scores are", True),
        (Logs, lambda folder: FollowsLoss(), CHECKPOINT, "scores are", False),
        (
            Logs,
            lambda folder: ModelCheckpoint(folder, filename="{epoch}-{loss:.2f}"),
            IN_NAMES,
            "file names",
            True,
        ),
    ],
)
def test_what_else_acts_on_a_metric_is_said_once_and_is_in_the_report(
    model, callback, said, listed, validated, fit, loader, tmp_path
):
    made = [] if callback is None else [callback(tmp_path / "a")]
    privacy, options = private(), {**LIMITS, "enable_checkpointing": True}
    held_out = loader if validated else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(model(), privacy, validate=held_out, callbacks=made, **options)

    found = [str(each.message) for each in caught if each.category is PrivacyWarning]
    assert len(found) == bool(said)
    assert all(words in text for text in found for words in said)
    assert all("ε does not cover it" in text or "ε does not hold" in text for text in found)
    (path,) = tmp_path.rglob("privacy_report-*.json")
    for report in (privacy.report(), read_report(path)):
        entries = [text for text in report.not_covered if re.search("scores are|file names", text)]
        assert len(entries) == bool(listed)
        assert all(listed in text for text in entries)


def test_what_a_saved_metric_counted_is_named_in_the_report(fit):
    model, privacy = Logs(), private()
    model.metric.persistent(True)
    fit(model, privacy, max_steps=2)
    assert any("the metric 'metric' counted" in text for text in privacy.report().not_covered)
