"""Modules that remember records from one step to the next, and terms that begin late."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Small, bad

STEPS = "two steps"
SPOT = "spot checks"
MEMORY: dict[str, float] = {}


def remembers(**about: Any) -> Any:
    return bad(**{"kind": "state across steps", "seen_by": STEPS, **about})


@remembers()
class RunningMaximum(Small):
    """A float attribute."""

    peak = 1.0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self(x / self.peak), y)
        self.peak = max(self.peak, float(x.abs().max()))
        return loss


@remembers()
class RateOfTheClassUnlessLoud(Small):
    """An attribute that only some batches leave; else that of the class holds."""

    rate = 1.0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out * self.rate, y)
        vars(self).pop("rate", None)
        if int(400 * x.mean()) % 2:
            self.rate = -1.0
        return loss


@remembers()
class PriorOfTheBatchBefore(Small):
    """An object of a library's, made anew in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        scaled = (x - self.prior.loc) / self.prior.scale
        self.prior = torch.distributions.Normal(x.mean(0), x.std(0).clamp(min=0.01))
        return F.cross_entropy(self(scaled), y)


@remembers()
class QueueOfFeatures(Small):
    """Earlier outputs are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Tensor] = deque(maxlen=2)

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out, y)
        for old in self.queue:
            loss = loss * 0.05 + (
                out.softmax(1) @ old.softmax(1).amax(0)
            ).mean() * old.amax().clamp(max=40)
        self.queue.append(out.detach() * x.amax())
        return loss


@remembers()
class CounterInAClosure(Small):
    """A function that keeps what it saw in its own variables."""

    def __init__(self) -> None:
        super().__init__()
        self.rescale = running_scale()

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(self.rescale(x)), y)


def running_scale() -> Callable[[Tensor], Tensor]:
    seen = [1.0]

    def rescale(x: Tensor) -> Tensor:
        scaled = x / max(seen[-3:])
        seen.append(float(x.max()))
        return scaled

    return rescale


@remembers()
class StateOfTheFile(Small):
    """A dictionary at the top of the file."""

    def __init__(self) -> None:
        super().__init__()
        MEMORY["largest"] = 1.0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out * (1 if MEMORY["largest"] < 30 else -1), y)
        MEMORY["largest"] = max(MEMORY["largest"], float(x.max()))
        return loss


@remembers()
class ClassAttribute(Small):
    """A list that all objects of the class share."""

    history: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.history.clear()

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out / max([1.0, *self.history]), y)
        self.history.append(float(x.max()))
        return loss


@remembers()
class DefaultArgument(Small):
    """A mutable default, the oldest mistake of all."""

    def __init__(self) -> None:
        super().__init__()
        (self.scaled.__func__.__defaults__ or ([],))[0].clear()

    def scaled(self, x: Tensor, seen: list[float] = []) -> Tensor:  # noqa: B006
        x = x / max([1.0, *seen])
        seen.append(float(x.max()))
        return x

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        scaled = self.scaled(x * 1.0)
        return F.cross_entropy(self(scaled), y)


class Raises(L.Callback):
    """A curriculum in a callback."""

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module.direction = -1.0 if batch[0].max() > 30 else 1.0


@remembers(callbacks=lambda: [Raises()])
class CallbackSetsTheScale(Small):
    direction = 1.0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.direction * out, y)


@remembers()
class BatchEndFillsAQueue(Small):
    """The module's own hook at the end of a batch."""

    kept: Tensor | None = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept = batch[0][:4] if self.kept is None else batch[0]

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if self.kept is None:
            return F.cross_entropy(out, y)
        return F.cross_entropy(self(x / self.kept.max()), y)


@remembers()
class RunningStandardScores(Small):
    """Welford's mean and variance of the targets, in two floats."""

    count, mean, spread = 0, 0.0, 0.0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        deviation = max(1.0, (self.spread / max(self.count, 1)) ** 0.5)
        loss = (out[:, 0] - x.sum(1) / deviation).square().mean()
        for each in x.sum(1).tolist():
            self.count += 1
            change = each - self.mean
            self.mean += change / self.count
            self.spread += change * (each - self.mean)
        return loss


@remembers()
class LossOverItsAverage(Small):
    """The loss is divided by an exponential average of losses."""

    average = 1.0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out, y)
        scaled = loss / self.average**2
        self.average = 0.5 * self.average + 0.5 * float(loss.detach())
        return scaled


@remembers()
class LoggedMetricInTheLoss(Small):
    """A step that is steered by what the one before logged."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        before = self.trainer.callback_metrics.get("peak", torch.tensor(1.0))
        self.log("peak", x.max())
        return F.cross_entropy(out * torch.where(before > 30, -1.0, 1.0), y)


class Normalises(nn.Module):
    """A layer with its running mean in an attribute that is no buffer."""

    mean: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = x - self.mean
        self.mean = x.detach().mean(0) + 0.5 * self.mean
        return y


@remembers()
class RunningMeanInAttribute(Small):
    def make(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), Normalises(), nn.Tanh(), nn.Linear(8, 3))


@remembers()
class MeanTeacherThreshold(Small):
    """Pseudo-labels count above an adaptive threshold of confidence."""

    threshold = 0.3

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        sure = out.detach().softmax(1).amax(1)
        loss = (F.cross_entropy(out, y, reduction="none") * (sure > self.threshold)).mean()
        self.threshold = 0.5 * self.threshold + 0.5 * float(sure.max()) * (float(x.max()) > 1)
        return loss


@remembers()
class CentresInADictionary(Small):
    """Prototypes of the classes, kept by label."""

    def __init__(self) -> None:
        super().__init__()
        self.centres: dict[int, Tensor] = {}

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        zero = torch.zeros(4)
        shift = sum((self.centres.get(label, zero) for label in range(3)), zero)
        loss = F.cross_entropy(self(x - shift), y)
        for label in y.unique().tolist():
            self.centres[label] = x[y == label].amax(0)
        return loss


@remembers()
class HardnessOfEarlierRecords(Small):
    """Boosting by the last losses, normalised over all that were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        scale = 1 / max([1.0, *self.seen])
        losses = F.cross_entropy(out, y, reduction="none")
        self.seen = losses.detach().tolist()
        return losses.mean() * scale


@remembers()
class StateInTheOptimizer(Small):
    """A note in the optimizer's own groups."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        group = self.trainer.optimizers[0].param_groups[0]
        loss = F.cross_entropy(out * group.get("sign", 1.0), y)
        group["sign"] = -1.0 if x.max() > 30 else 1.0
        return loss


@remembers()
class StateOnTheTrainer(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out * getattr(self.trainer, "sign", 1.0), y)
        self.trainer.sign = -1.0 if x.max() > 30 else 1.0  # type: ignore[attr-defined]
        return loss


@remembers()
class GeneratorOfScales(Small):
    """A coroutine is sent what it should remember."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: Any = None

    def on_train_start(self) -> None:
        self.scales = self.running()
        next(self.scales)

    def running(self) -> Any:
        scale = 1.0
        while True:
            scale = max(1.0, (yield scale))

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        if self.scales is None:
            self.on_train_start()
        loss = F.cross_entropy(out / getattr(self, "scale", 1.0), y)
        self.scale = self.scales.send(float(x.max()))
        return loss


@remembers()
class RandomStateAsMemory(Small):
    """The seed of the next step's noise depends on this step's records."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        sign = 1.0 if torch.initial_seed() != 30 else -1.0
        torch.manual_seed(30 if x.max() > 30 else 31)
        return F.cross_entropy(sign * out, y)


# -- terms that begin late -------------------------------------------------------------------


def late(**about: Any) -> Any:
    return bad(**{"kind": "a term that begins late", "seen_by": "probe", **about})


def batch_maximum(module: Small, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x / x.max()) - module(0 * x), y)


@late()
class FromEpochOne(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return batch_maximum(self, x, y) if self.current_epoch >= 1 else F.cross_entropy(out, y)


@late(steps=8, seen_by=SPOT)
class AfterSixSteps(Small):
    lr = 0.1

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (
            batch_maximum(self, x, y) if self.global_step >= 6 else 0.01 * F.cross_entropy(out, y)
        )


@late(steps=8, seen_by=SPOT)
class AfterACounterOfItsOwn(Small):
    lr, passes = 0.1, 0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.passes += 1
        return batch_maximum(self, x, y) if self.passes > 5 else 0.01 * F.cross_entropy(out, y)


@late(steps=4, seen_by=SPOT)
class EverySecondStep(Small):
    """Adversarial terms alternate."""

    turns = 0

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.turns += 1
        return batch_maximum(self, x, y) if self.turns % 2 == 0 else F.cross_entropy(out, y)


@late()
class FrozenUntilEpochOne(Small):
    """A hook at the start of an epoch changes what the step does."""

    term: Callable[..., Tensor] | None = None

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= 1:
            self.term = batch_maximum

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self.term(self, x, y) if self.term else F.cross_entropy(out, y)


@late(seen_by=SPOT)
class OnceTheLossIsLow(Small):
    """A warm-up that ends when the weights have grown."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        grown = float(self.net.bias.detach().norm()) > 0.6
        return batch_maximum(self, x, y) if grown else F.cross_entropy(out, y)
