"""All that a Trainer holds beside the model is rehearsed: what follows records through it is refused."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Timer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DifferentialPrivacy


class Plain(L.LightningModule):
    """A classifier; a large number in a batch is what its subclasses follow."""

    factor = 1.0
    worst = 0.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.factor * F.cross_entropy(self.net(x), y)
        self.worst = max(self.worst, float(x.max()))
        self.log("peak", x.max())
        return loss

    @property
    def is_odd(self) -> bool:
        return self.worst > 30

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithSchedule(Plain):
    """Its scheduler steps after each batch."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1 / (step + 1))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = self.schedule(optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ScheduleOfAClosure(WithSchedule):
    def schedule(self, optimizer):
        return LambdaLR(optimizer, lambda step: 0.1 if self.is_odd else 1.0)


class ScheduleOfAMethod(WithSchedule):
    def rate(self, step):
        return 0.1 if self.is_odd else 1.0

    def schedule(self, optimizer):
        return LambdaLR(optimizer, self.rate)


class FollowsMetrics(LRScheduler):
    def __init__(self, optimizer, module):
        self.module = module
        super().__init__(optimizer)

    def get_lr(self):
        trainer = self.module._trainer
        peak = 0 if trainer is None else trainer.callback_metrics.get("peak", 0)
        return [0.1 if peak > 30 else 1.0 for _ in self.base_lrs]


class ScheduleOfMetrics(WithSchedule):
    def schedule(self, optimizer):
        return FollowsMetrics(optimizer, self)


class ScheduleSteppedByHand(WithSchedule):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.schedule_kept = ExponentialLR(optimizer, 0.1)
        return optimizer

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.is_odd:
            self.schedule_kept.step()


class ScheduleOfTheTrainerSteppedByHand(WithSchedule):
    def on_train_epoch_end(self):
        if self.is_odd:
            self.lr_schedulers().step()


class OptimizerOfTheStrategy(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for group in self.trainer.strategy.optimizers[0].param_groups:
            group["lr"] = 0.0 if self.is_odd else 0.1


class OptimizerKept(Plain):
    def configure_optimizers(self):
        self.kept = super().configure_optimizers()
        return self.kept

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept.param_groups[0]["lr"] = 0.0 if self.is_odd else 0.1


class OwnZeroGrad(Plain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.0 if self.is_odd else 0.1


class LayerInEvaluation(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.net[1].train(not self.is_odd)


class ValidationSteers(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        self.factor = -1.0 if self.is_odd else 1.0


class ValidationStepSteers(Plain):
    def validation_step(self, batch, batch_idx):
        self.factor = -1.0 if self.is_odd else 1.0


class StateInTheDataModule(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / self.trainer.datamodule.scale

    def on_train_batch_end(self, outputs, batch, batch_idx):
        data = self.trainer.datamodule
        data.scale = max(data.scale, float(batch[0].max()))


class StateInTheDataSet(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.trainer.train_dataloader.dataset.is_hard = self.is_odd


class ResultsRemembered(Plain):
    """The first batch of all decides: what a function remembers was in no copy."""

    def training_step(self, batch, batch_idx):
        peak = [float(batch[0].max())]

        @cache
        def scale() -> float:
            return peak[0]

        self.remembered = getattr(self, "remembered", scale)
        return super().training_step(batch, batch_idx) / self.remembered()


class KeptInTheEnvironment(Plain):
    """Where no copy of the model is."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / float(os.environ.get("PEAK", "1"))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        largest = max(float(batch[0].max()), float(os.environ.get("PEAK", "1")))
        os.environ["PEAK"] = str(largest)


class EditsTheBatch(Timer):
    """One of Lightning's callbacks with a hook of the user's."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        batch[0].div_(batch[0].max())


class Steers(Timer):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.lightning_module.factor = -1.0 if batch[0].max() > 30 else 1.0


class HoldsTheOptimizer(L.Callback):
    def on_train_start(self, trainer, pl_module):
        self.optimizer = trainer.optimizers[0]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.optimizer.param_groups[0]["lr"] = 0.0 if batch[0].max() > 30 else 0.1


class SavesTheWorst(L.Callback):
    worst = 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.worst = max(self.worst, float(batch[0].max()))

    def state_dict(self):
        return {"worst": self.worst}


class AddsTheMeans(L.Callback):
    mean = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.mean = batch[0].mean(0)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["mean"] = self.mean


BAD = [
    *((kind, ()) for kind in (ScheduleOfAClosure, ScheduleOfAMethod, ScheduleOfMetrics)),
    *((kind, ()) for kind in (ScheduleSteppedByHand, ScheduleOfTheTrainerSteppedByHand)),
    *((kind, ()) for kind in (OptimizerOfTheStrategy, OptimizerKept, OwnZeroGrad)),
    *((kind, ()) for kind in (LayerInEvaluation, ValidationSteers, ValidationStepSteers)),
    *((kind, ()) for kind in (StateInTheDataModule, StateInTheDataSet, ResultsRemembered)),
    (KeptInTheEnvironment, ()),
    *((Plain, (kind,)) for kind in (EditsTheBatch, Steers, HoldsTheOptimizer)),
    *((Plain, (kind,)) for kind in (SavesTheWorst, AddsTheMeans)),
]


class Data(L.LightningDataModule):
    scale = 1.0

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.rand(40, 6, generator=generator)
        return DataLoader(TensorDataset(x, torch.arange(40) % 3), 10)

    val_dataloader = train_dataloader


def fitted(make_trainer: Any, module: L.LightningModule, callbacks: Any = ()) -> Any:
    privacy = DifferentialPrivacy(noise_multiplier=4.0, target_delta=1e-3)
    added = [kind() for kind in callbacks]
    trainer = make_trainer(callbacks=[privacy, *added], max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=Data())
    return privacy


QUICK = (ScheduleOfAClosure, OptimizerKept, ValidationSteers, StateInTheDataSet, Steers)


def some(cases):
    for kind, callbacks in cases:
        name = callbacks[0] if callbacks else kind
        marks = [] if name in QUICK else pytest.mark.slow
        yield pytest.param(kind, callbacks, marks=marks, id=name.__name__)


@pytest.mark.parametrize(("kind", "callbacks"), some(BAD))
def test_what_follows_records_beside_the_model_is_refused(
    kind, callbacks, make_trainer, monkeypatch
):
    monkeypatch.setenv("PEAK", "1")
    with pytest.raises(MisconfigurationException, match=r"Records of one batch|ε would not hold"):
        fitted(make_trainer, kind(), callbacks)


class Validates(WithSchedule):
    """Collects outputs, and follows what validation says alone."""

    def on_validation_epoch_start(self):
        self.losses = []

    def validation_step(self, batch, batch_idx):
        self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        self.factor = 1.0 + (torch.stack(self.losses).mean() > 5)


@cache
def table(size: int) -> Tensor:
    return torch.ones(size)


class ReadsPublicValues(WithSchedule):
    """Reads the data module, the strategy and a cached table, and keeps its optimizer."""

    def configure_optimizers(self):
        found = super().configure_optimizers()
        self.kept = found[0][0]
        return found

    def schedule(self, optimizer):
        return LambdaLR(optimizer, lambda step: 1 / (1 + self.trainer.current_epoch))

    def training_step(self, batch, batch_idx):
        weight = self.trainer.datamodule.scale * self.trainer.strategy.world_size
        self.net[1].p = 0.1 / (1 + self.current_epoch)
        return super().training_step((batch[0] * table(6) * weight, batch[1]), batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept.param_groups[0]["weight_decay"] = 1e-3 / (1 + self.global_step)


class Counts(Timer):
    steps = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.steps += 1

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}


@pytest.mark.parametrize("kind", [WithSchedule, Validates, ReadsPublicValues])
def test_what_follows_public_values_trains(kind, make_trainer):
    module = kind()
    privacy = fitted(make_trainer, module, (Counts,))

    assert privacy.steps == 8
    report = str(privacy.report())
    assert "probed, isolated" in report and "not tried" not in report


def test_rehearsals_leave_the_real_optimizer_alone(make_trainer):
    class Writes(Plain):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            for group in self.trainer.strategy.optimizers[0].param_groups:
                group["lr"] = self.seen.setdefault(self.global_step, group["lr"]) / 2

    module = Writes()
    module.seen = {}
    fitted(make_trainer, module)

    assert module.seen == {step: 0.1 / 2 ** (step - 1) for step in range(1, 9)}
