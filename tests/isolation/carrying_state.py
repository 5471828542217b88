"""Models in which records of one step reach later ones, or a checkpoint, by what the model keeps."""

from __future__ import annotations

from collections import deque
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Accuracy

LIKE = torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64)


class Plain(L.LightningModule):
    """A classifier with a loss for each record; ``scale`` and ``extra`` are for subclasses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y, reduction="none")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.losses(*batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


# -- state that moves the next step's gradients ---------------------------------------------------


class RunningMaximum(Plain):
    largest = 1e-6

    def training_step(self, batch, batch_idx):
        loss = self.losses(*batch).mean() / self.largest
        self.largest = max(self.largest, float(batch[0].abs().max()))
        return loss


class FeatureDeque(Plain):
    def __init__(self):
        super().__init__()
        self.queue = deque(maxlen=64)

    def training_step(self, batch, batch_idx):
        h = self.net(batch[0])
        loss = h.square().mean()
        if self.queue:
            loss = loss + (h @ torch.stack(list(self.queue)).T).logsumexp(1).mean()
        self.queue.extend(h.detach())
        return loss


class MemoryBank(Plain):
    bank = None

    def training_step(self, batch, batch_idx):
        h = self.net(batch[0])
        self.features = h.detach()
        return h.square().mean() if self.bank is None else (h - self.bank.mean(0)).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.bank = self.features.clone()


class QueueOfOutputs(Plain):
    """Full after two steps only, and used when it is."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def training_step(self, batch, batch_idx):
        loss = self.losses(*batch).mean()
        return {"loss": loss * (1 + sum(self.kept[-2:]) if len(self.kept) >= 2 else 1)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept.append(float(outputs["loss"]))


class Tracker:
    def __init__(self):
        self.state = {"mean": [torch.zeros(6)]}


class MeanInAnObject(Plain):
    def __init__(self):
        super().__init__()
        self.tracker = Tracker()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.losses(x - self.tracker.state["mean"][0], y).mean()
        self.tracker.state["mean"][0] = 0.9 * self.tracker.state["mean"][0] + 0.1 * x.mean(0)
        return loss


class LoggedLoss(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.losses(*batch).mean()
        last = self.trainer.callback_metrics.get("train_loss", torch.tensor(1.0))
        self.log("train_loss", loss, on_step=True, on_epoch=False)
        return loss / last


class LoggedLossOfTheEpoch(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.losses(*batch).mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        if self.current_epoch == 0:
            return loss
        return loss * self.trainer.logged_metrics["train_loss"]


class LossWeightsOfTheLastStep(Plain):
    weights = (1.0, 1.0)

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self.net(x)
        parts = F.cross_entropy(out, y), out.square().mean()
        loss = sum(w * part for w, part in zip(self.weights, parts, strict=True))
        total = sum(float(part) for part in parts)
        self.weights = tuple(float(part) / total for part in parts)
        return loss


class CurriculumOnTheLastLoss(Plain):
    last = 0.0

    def training_step(self, batch, batch_idx):
        losses = self.losses(*batch)
        kept = losses[losses.detach() >= 0] * (1.0 if self.last > 2 else 2.0)
        self.last = float(batch[0].max())
        return kept.mean()


class MixUpWithTheLastBatch(Plain):
    previous = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        mixed = x if self.previous is None else 0.7 * x + 0.3 * self.previous
        self.previous = x
        return self.losses(mixed, y).mean()


class TemperatureSetInAHook(Plain):
    temperature = 1.0

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]) / self.temperature, batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.temperature = 1.0 + float(outputs["loss"])


class StatisticsBeforeTheStep(Plain):
    def on_train_batch_start(self, batch, batch_idx):
        self.mean = batch[0].mean(0)

    def training_step(self, batch, batch_idx):
        return self.losses(batch[0] - self.mean, batch[1]).mean()


class LossSeenByAHook(Plain):
    scale = 1.0

    def training_step(self, batch, batch_idx):
        return self.losses(*batch).mean() * self.scale

    def on_before_backward(self, loss):
        self.scale = float(loss.detach())


class MeanOfTheEpoch(Plain):
    def __init__(self):
        super().__init__()
        self.outputs, self.mean = [], 1.0

    def training_step(self, batch, batch_idx):
        loss = self.losses(*batch).mean() * self.mean
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.mean = float(torch.stack(self.outputs).mean())
        self.outputs.clear()


class MetricInTheLoss(Plain):
    def __init__(self):
        super().__init__()
        self.accuracy = Accuracy("multiclass", num_classes=3)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.accuracy.update(out, batch[1])
        return F.cross_entropy(out, batch[1]) * (1 + (batch_idx > 0) * self.accuracy.compute())


class SkipsAfterASpike(Plain):
    last = 0.0

    def training_step(self, batch, batch_idx):
        losses = self.losses(*batch)
        if self.last > 2:
            losses = losses * 0.0
        self.last = float(batch[0].max())
        return losses.mean()


class SeedsByTheRecords(Plain):
    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = torch.randn_like(x)
        torch.manual_seed(int(x.sum() * 1000))
        return self.losses(x + noise, y).mean()


class StateOfACallback(Plain):
    def training_step(self, batch, batch_idx):
        ours = next(each for each in self.trainer.callbacks if isinstance(each, Remembers))
        return self.losses(*batch).mean() * ours.scale


class Remembers(L.Callback):
    scale = 1.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.scale = float(outputs["loss"])


class SetByACallback(Plain):
    scale = 1.0

    def training_step(self, batch, batch_idx):
        return self.losses(*batch).mean() * self.scale


class SetsTheScale(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.scale = float(outputs["loss"])


def running_mean():
    mean = torch.zeros(6)

    def centred(x):
        nonlocal mean
        out = x - mean
        mean = 0.9 * mean + 0.1 * x.mean(0)
        return out

    return centred


class MeanInAClosure(Plain):
    def __init__(self):
        super().__init__()
        self.centred = running_mean()

    def training_step(self, batch, batch_idx):
        return self.losses(self.centred(batch[0]), batch[1]).mean()


SEEN = {"mean": torch.zeros(6)}


class MeanInAGlobal(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.losses(batch[0] - SEEN["mean"], batch[1]).mean()
        SEEN["mean"] = batch[0].mean(0)
        return loss


class MeanInAClassAttribute(Plain):
    mean = torch.zeros(6)

    def training_step(self, batch, batch_idx):
        loss = self.losses(batch[0] - MeanInAClassAttribute.mean, batch[1]).mean()
        MeanInAClassAttribute.mean = batch[0].mean(0)
        return loss


# -- hooks that steer the optimizer --------------------------------------------------------------


class ZeroesGradientsAfterASpike(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.losses(*batch).mean()
        self.last = float(loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        for param in self.parameters():
            param.grad *= self.last


class RateByTheLoss(ZeroesGradientsAfterASpike):
    def on_before_optimizer_step(self, optimizer):
        optimizer.param_groups[0]["lr"] = 1e-9 * self.last


class RateByTheLossOfTheLastBatch(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] = 1e-9 * float(outputs["loss"])


CARRIES = [
    RunningMaximum,
    FeatureDeque,
    MemoryBank,
    QueueOfOutputs,
    MeanInAnObject,
    LoggedLoss,
    LoggedLossOfTheEpoch,
    LossWeightsOfTheLastStep,
    CurriculumOnTheLastLoss,
    MixUpWithTheLastBatch,
    TemperatureSetInAHook,
    StatisticsBeforeTheStep,
    LossSeenByAHook,
    MeanOfTheEpoch,
    MetricInTheLoss,
    SkipsAfterASpike,
    SeedsByTheRecords,
    StateOfACallback,
    SetByACallback,
    MeanInAClosure,
    MeanInAGlobal,
    MeanInAClassAttribute,
    ZeroesGradientsAfterASpike,
    RateByTheLoss,
    RateByTheLossOfTheLastBatch,
]


# -- what outlives the run ------------------------------------------------------------------------


class WeightsWrittenInAHook(Plain):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.net[0].bias.data[0] = batch[0].mean()


class BufferWrittenInAHook(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(()))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.last = outputs["loss"]


class LossesInTheCheckpoint(Plain):
    def __init__(self):
        super().__init__()
        self.history = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.history.append(float(outputs["loss"]))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["history"] = self.history


class LossInTheHyperparameters(Plain):
    def on_train_epoch_end(self):
        self.hparams.loss = self.last

    def training_step(self, batch, batch_idx):
        loss = self.losses(*batch).mean()
        self.last = float(loss.detach() + batch[0].sum())
        return loss


KEEPS = [
    WeightsWrittenInAHook,
    BufferWrittenInAHook,
    LossesInTheCheckpoint,
    LossInTheHyperparameters,
]
