"""Training steps, optimizers and Trainers as people write them: all of them train."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Small, ordinary


@ordinary
class LogsAndMeasures(Small):
    """Metrics, logs, and lists for the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.accuracy(out.softmax(1), y)
        self.losses.append(float(loss))
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log_dict({"loss": loss, "largest": out.max()}, prog_bar=True)
        return {"loss": loss, "out": out.detach()}

    def on_train_epoch_end(self) -> None:
        self.print(len(self.losses), end="")
        self.losses.clear()


@ordinary
class CountsItsSteps(Small):
    """Counters of steps and of records, in attributes and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.records = 0, 0
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.passes, self.records = self.passes + 1, self.records + len(x)
        self.seen += 1
        return F.cross_entropy(out, y)


@ordinary
class KeepsItsOutputsForTheEpoch(Small):
    """A list of outputs that is emptied when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.outputs.append({"out": out.detach(), "y": y})
        return F.cross_entropy(out, y)

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.cat([each["out"] for each in self.outputs]).mean())
        self.outputs.clear()


@ordinary
class RunningAverageOfTheLossForTheScreen(Small):
    """A smoothed loss that nothing but the progress bar reads."""

    smooth = 1.0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out, y)
        self.smooth = 0.9 * self.smooth + 0.1 * loss.item()
        self.log("smooth", self.smooth, prog_bar=True)
        return loss


@ordinary
class AnnealedTemperature(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        temperature = max(0.5, math.exp(-0.1 * self.global_step))
        soft = F.gumbel_softmax(out, tau=temperature, dim=1)
        return F.cross_entropy(out, y) + 0.1 * (soft * out).sum(1).mean()


@ordinary
class UsesTheNumberOfTheBatch(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if batch_idx % 3 == 0:
            self.log("third", float(batch_idx))
        return F.cross_entropy(self(x), y) * (1.0 if batch_idx % 2 else 0.5)


@ordinary
class OneArgument(Small):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        x, y = batch
        return F.cross_entropy(self(x), y)


@ordinary
class ManualOptimization(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.step()


@ordinary
class ManualWithScheduler(ManualOptimization):
    """A schedule that the module steps itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@ordinary
class WarmUpByHand(Small):
    """The learning rate grows with the step, in the module's own ``optimizer_step``."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.global_step + 1) / 5)
        optimizer.step(closure)


@ordinary
class LearningRatePrinted(Small):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [param.grad.norm() for param in self.parameters() if param.grad is not None]
        self.log("norm", torch.stack(norms).norm())


@ordinary(trainer={"gradient_clip_val": 0.5})
class ClippedByNorm(Small):
    pass


@ordinary(trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"})
class ClippedByValue(Small):
    pass


@ordinary(trainer={"accumulate_grad_batches": 2})
class Accumulates(Small):
    pass


@ordinary(trainer={"precision": "bf16-mixed"})
class MixedPrecision(Small):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


@ordinary
class GroupsOfParameters(Small):
    def configure_optimizers(self) -> Any:
        groups = [{"params": [self.net.weight], "weight_decay": 0.1}, {"params": [self.net.bias]}]
        return torch.optim.AdamW(groups, lr=1e-2)


@ordinary
class WeightAverageOfTheModel(Small):
    """An exponential average of released weights, for validation."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.averaged.parameters(), self.net.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


@ordinary
class MeanTeacher(WeightAverageOfTheModel):
    """The averaged weights teach."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.averaged(x + 0.01 * torch.randn_like(x)).softmax(1)
        return F.cross_entropy(out, y) + (out.softmax(1) - taught).square().sum(1).mean()


@ordinary
class AugmentsWithNumpy(Small):
    """One draw for the whole batch, from three libraries."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if np.random.rand() < 0.5:
            x = x.flip(1)
        if random.random() < 0.5:
            x = x * float(np.random.uniform(0.9, 1.1))
        return F.cross_entropy(self(x + 0.05 * torch.randn_like(x)), y)
