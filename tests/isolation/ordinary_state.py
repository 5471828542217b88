"""Models that keep something from step to step, and no record in it."""

from __future__ import annotations

import copy
import time

import lightning as L
import torch
from torch.nn import functional as F
from torchmetrics import Accuracy

from tests.isolation.carrying_state import Plain


class Teacher(Plain):
    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = self.teacher(batch[0]).softmax(1)
        return self.losses(*batch).mean() + F.mse_loss(self.net(batch[0]).softmax(1), target)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            old.data.lerp_(new.data, 0.01)


class WarmUpByEpoch(Plain):
    def training_step(self, batch, batch_idx):
        beta = min(1.0, self.current_epoch / 5)
        out = self.net(batch[0])
        return F.cross_entropy(out, batch[1]) + beta * out.square().mean()


class WarmUpByStep(Plain):
    def training_step(self, batch, batch_idx):
        share = self.global_step / max(1, self.trainer.estimated_stepping_batches)
        return self.losses(*batch).mean() * (1 + share)


class CurriculumByEpoch(Plain):
    def training_step(self, batch, batch_idx):
        losses = self.losses(*batch)
        return (losses * (0.1 + (losses.detach() < 1.1 + self.current_epoch))).mean()


class ListsForTheEpochsEnd(Plain):
    def __init__(self):
        super().__init__()
        self.training_step_outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.losses(*batch).mean()
        self.training_step_outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("mean", torch.stack(self.training_step_outputs).mean())
        self.training_step_outputs.clear()


class Metrics(Plain):
    def __init__(self):
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.accuracy(out, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"a": out.mean(), "b": out.std()})
        return F.cross_entropy(out, batch[1])

    def on_train_epoch_end(self):
        self.log("final", self.accuracy.compute())
        self.accuracy.reset()


class Schedulers(Plain):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("lr", self.lr_schedulers().get_last_lr()[0])


class Counters(Plain):
    steps = 0

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        self.steps += 1
        self.seen += len(batch[0])
        return self.losses(*batch).mean() * (1 + 1 / self.steps)


class LogsARunningMean(Plain):
    running = 0.0

    def training_step(self, batch, batch_idx):
        loss = self.losses(*batch).mean()
        self.running = 0.9 * self.running + 0.1 * loss.item()
        self.log("smooth", self.running)
        return loss


class MomentumEncoder(Teacher):
    def on_train_batch_start(self, batch, batch_idx):
        self.momentum = 1 - 0.01 * self.global_step
        for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            old.data.mul_(self.momentum).add_(new.data, alpha=1 - self.momentum)

    on_train_batch_end = L.LightningModule.on_train_batch_end


class AnnealedTemperature(Plain):
    temperature = 1.0

    def on_train_epoch_start(self):
        self.temperature = 0.9**self.current_epoch

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]) / self.temperature, batch[1])


class AlternatingPhases(Plain):
    phase = "a"

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return out.square().mean() if self.phase == "a" else F.cross_entropy(out, batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.phase = "b" if self.phase == "a" else "a"


class Timed(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        self.began = time.perf_counter()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("seconds", time.perf_counter() - self.began)


class ByHand(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.losses(*batch).mean()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers()
        return loss


class Cached(Plain):
    positions = None

    def training_step(self, batch, batch_idx):
        if self.positions is None:
            self.positions = torch.arange(6) / 6
        return self.losses(batch[0] + self.positions, batch[1]).mean()


class ProjectsWeights(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for param in self.parameters():
            param.data.clamp_(-1, 1)


class LogsNorms(Plain):
    def on_before_optimizer_step(self, optimizer):
        norms = L.pytorch.utilities.grad_norm(self, norm_type=2)
        self.log_dict(norms)


class Unfreezes(Plain):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch >= 3:
            self.net[0].requires_grad_(True)


class Noisy(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.losses(x + 0.1 * torch.randn_like(x), y).mean()


class Collects(L.Callback):
    def __init__(self):
        self.outputs = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append((outputs["loss"], batch[0]))


ORDINARY = [
    Teacher,
    WarmUpByEpoch,
    WarmUpByStep,
    CurriculumByEpoch,
    ListsForTheEpochsEnd,
    Metrics,
    Schedulers,
    Counters,
    LogsARunningMean,
    MomentumEncoder,
    AnnealedTemperature,
    AlternatingPhases,
    Timed,
    ByHand,
    Cached,
    ProjectsWeights,
    LogsNorms,
    Unfreezes,
    Noisy,
]
