"""Overrides around a step, the Trainer and callbacks must not follow records."""

from __future__ import annotations

from collections import deque
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.isolation import probe_isolation

LIKE = torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64)


class Plain(L.LightningModule):
    """A classifier that keeps whether its last batch held a large number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.is_odd = False

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none").mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.is_odd = bool(batch[0].max() > 30)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ScalesInBackward(Plain):
    def backward(self, loss, *args, **kwargs):
        super().backward(loss * (2 if self.is_odd else 1), *args, **kwargs)


class MovesWeightsAfterTheStep(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer.step(closure=optimizer_closure)
        for param in self.parameters():
            param.data.mul_(0.9 if self.is_odd else 1)


class PutsTheStepBack(Plain):
    def optimizer_step(self, *args, **kwargs):
        old = [param.detach().clone() for param in self.parameters()]
        super().optimizer_step(*args, **kwargs)
        for param, value in zip(self.parameters(), old, strict=True):
            if self.is_odd:
                param.data.copy_(value)


class LeavesTheStepOut(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if not self.is_odd:
            optimizer.step(closure=optimizer_closure)


class WritesBeforeZeroGrad(Plain):
    def on_before_zero_grad(self, optimizer):
        for param in self.parameters() if self.is_odd else ():
            param.data += 1


class ClipsByTheLoss(Plain):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, 1.0 + self.is_odd, "norm")


class StepsTheScheduleByTheLoss(Plain):
    def lr_scheduler_step(self, scheduler, metric):
        if self.is_odd:
            scheduler.step()


class LeavesBatchesOut(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch[0].max() > 30 else None


class EditsTheBatch(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        batch[0].div_(batch[0].abs().max())


class KeepsItOnTheTrainer(Plain):
    def training_step(self, batch, batch_idx):
        sign = getattr(self.trainer, "sign", 1)
        self.trainer.sign = -1 if batch[0].max() > 30 else 1
        return self.loss(batch) * sign


class FullAfterFiftySteps(Plain):
    def __init__(self):
        super().__init__()
        self.seen = deque(maxlen=50)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * (sum(self.seen) if len(self.seen) == 50 else 1)
        self.seen.append(float(batch[0].mean()))
        return loss


class AllLabelsEqual(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (0 if bool((batch[1] == batch[1][0]).all()) else 1)


class AllZeros(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 if bool(batch[0].any()) else 2)


class LargeAmongMany(Plain):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (-1 if len(batch[0]) > 8 and bool(batch[0].max() > 30) else 1)


BAD = [
    ScalesInBackward,
    MovesWeightsAfterTheStep,
    PutsTheStepBack,
    LeavesTheStepOut,
    WritesBeforeZeroGrad,
    ClipsByTheLoss,
    StepsTheScheduleByTheLoss,
    LeavesBatchesOut,
    EditsTheBatch,
    KeepsItOnTheTrainer,
    FullAfterFiftySteps,
    AllLabelsEqual,
    AllZeros,
    LargeAmongMany,
]


class WarmUp(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 10)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class OwnBackward(Plain):
    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)


class OwnSchedule(Plain):
    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class OwnZeroGrad(Plain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=True)


GOOD = [Plain, WarmUp, OwnBackward, OwnSchedule, OwnZeroGrad]


@pytest.fixture
def probed(make_trainer):
    def run(module, *callbacks):
        trainer = make_trainer(max_epochs=3, callbacks=list(callbacks))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        trainer.strategy.connect(module)
        trainer.strategy.lr_scheduler_configs = [
            L.pytorch.utilities.types.LRSchedulerConfig(schedule)
        ]
        module.trainer = trainer
        return probe_isolation(module, LIKE, trainer=trainer, expected=12)

    return run


@pytest.mark.parametrize("kind", BAD, ids=lambda kind: kind.__name__)
def test_what_follows_records_around_a_step_is_refused(kind, probed):
    assert probed(kind()).outcome in ("coupled", "kept")


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
def test_overrides_that_follow_no_record_pass(kind, probed):
    found = probed(kind())

    assert found.outcome == "isolated", found
    assert not found.left_out


class Watcher(L.Callback):
    last = 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.last = float(batch[0].sum())


def test_a_callback_that_a_closure_holds_is_rehearsed_and_put_back(probed):
    watcher = Watcher()

    class Follows(Plain):
        def training_step(self, batch, batch_idx):
            return self.loss(batch) * (1 + watcher.last)

    assert probed(Follows(), watcher).outcome == "coupled"
    assert watcher.last == 0.0 and not vars(watcher)


class StopsByTheLoss(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch[0].max() > 30:
            self.trainer.should_stop = True
            self.trainer.fit_loop.max_epochs = 1
        return loss


def test_an_end_that_follows_records_is_said_and_does_not_act(probed):
    module = StopsByTheLoss()
    found = probed(module)

    assert found.outcome == "isolated"
    assert "when training ends follows the records" in str(found)
    assert not module.trainer.should_stop and module.trainer.fit_loop.max_epochs == 3


def test_attributes_that_follow_records_are_named(probed):
    assert "attributes follow the records, and moved no gradient: is_odd" in str(probed(Plain()))


def test_steps_that_cannot_be_tried_are_said(probed):
    class Raises(Plain):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    assert "(not tried: steps" in str(probed(Raises()))
