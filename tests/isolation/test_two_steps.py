"""Records of one step must not move the next one's gradients, wherever the model keeps them."""

from __future__ import annotations

import copy
import time
from collections import deque
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Accuracy

from lightning_dp.isolation import probe_isolation

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

# -- ordinary state -------------------------------------------------------------------------------


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

CALLBACKS: dict[type[Plain], tuple[type[L.Callback], ...]] = {
    StateOfACallback: (Remembers,),
    SetByACallback: (SetsTheScale,),
    Plain: (Collects,),
}


class Probes(L.Callback):
    """Probes at the first batch, as a private fit does."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if isinstance(trainer, L.Trainer):  # not when it is rehearsed itself
            pl_module.on_train_batch_start(batch, batch_idx)  # it would come next
            self.found = probe_isolation(pl_module, LIKE, trainer=trainer)
            trainer.should_stop = True


@pytest.fixture
def probed(make_trainer):
    """Returns the outcome for a kind of model at its first batch."""

    def probe(kind):
        SEEN["mean"] = torch.zeros(6)
        MeanInAClassAttribute.mean = torch.zeros(6)
        probes = Probes()
        callbacks = [*(made() for made in CALLBACKS.get(kind, ())), probes]
        trainer = make_trainer(max_epochs=10, callbacks=callbacks)
        data = torch.utils.data.TensorDataset(torch.rand(8, 6), torch.arange(8) % 3)
        trainer.fit(kind(), torch.utils.data.DataLoader(data, batch_size=4))
        return probes.found

    return probe


class Watches(L.Callback):
    """Notes gradients and rates at each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, *unused):
        grads = [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]
        rate = torch.tensor([trainer.optimizers[0].param_groups[0]["lr"] * 1e9])
        self.seen.append(torch.cat([g.flatten() for g in [*grads, rate]]))


def steps_after(kind, first, make_trainer):
    """Fit in Lightning, without privacy, and return what each step but the first did."""
    generator = torch.Generator().manual_seed(3)
    others = torch.rand(8, 6, generator=generator), torch.arange(8) % 3
    batches = [first, tuple(leaf[:4] for leaf in others), tuple(leaf[4:] for leaf in others)]
    watch = Watches()
    callbacks = [watch, *(made() for made in CALLBACKS.get(kind, ()))]
    torch.manual_seed(1)
    SEEN["mean"] = torch.zeros(6)
    MeanInAClassAttribute.mean = torch.zeros(6)
    trainer = make_trainer(max_epochs=2, callbacks=callbacks)
    trainer.fit(kind(), torch.utils.data.DataLoader(batches, batch_size=None))
    return watch.seen


@pytest.mark.parametrize("kind", CARRIES, ids=lambda kind: kind.__name__)
def test_one_record_moves_what_later_batches_do_in_lightning(kind, make_trainer):
    x, y = torch.rand(4, 6, generator=torch.Generator().manual_seed(2)), torch.arange(4) % 3
    other = x.clone()
    other[0] *= 20
    first, second = (
        steps_after(kind, (x, y), make_trainer),
        steps_after(kind, (other, y), make_trainer),
    )
    own = kind in (ZeroesGradientsAfterASpike, RateByTheLoss, StatisticsBeforeTheStep)
    moved = [not torch.allclose(a, b, rtol=1e-5) for a, b in zip(first, second, strict=True)]
    assert any(moved if own else moved[1:])


@pytest.mark.parametrize(
    "kind",
    [*CARRIES[::2], *(pytest.param(kind, marks=pytest.mark.slow) for kind in CARRIES[1::2])],
    ids=lambda kind: kind.__name__,
)
def test_state_that_moves_gradients_is_refused(kind, probed):
    assert probed(kind).outcome == "coupled"


@pytest.mark.parametrize("kind", KEEPS, ids=lambda kind: kind.__name__)
def test_records_in_a_checkpoint_are_refused(kind, probed):
    assert probed(kind).outcome == "kept"


@pytest.mark.parametrize("kind", [Plain, *ORDINARY], ids=lambda kind: kind.__name__)
def test_ordinary_state_passes(kind, probed):
    found = probed(kind)

    assert found.outcome == "isolated", found
