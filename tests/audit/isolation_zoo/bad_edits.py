"""The released gradient, the learning rate or the weights are changed by what the records say."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from isolation_zoo.cases import Small, bad

USED = "released is used"
KIND = "the update is edited"


def edits(**about: Any) -> Any:
    return bad(**{"kind": KIND, "seen_by": USED, **about})


class Watches(Small):
    """Notes whether the batch looked odd."""

    odd = False

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        self.odd = bool(x.max() > 30)
        return F.cross_entropy(out, y)


@edits()
class GradientZeroedWhenTheLossSpikes(Watches):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None and self.odd:
                param.grad.zero_()


@edits()
class GradientReplaced(Watches):
    """A new tensor in the place of the old one."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad = -param.grad if self.odd else param.grad.clone()


@edits()
class GradientThroughData(Watches):
    """``.data`` does not count versions."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.parameters():
            if param.grad is not None and self.odd:
                param.grad.data.neg_()


class Turns(torch.optim.SGD):
    """Edits the gradient between the closure and the step."""

    module: Any = None

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for param in self.param_groups[0]["params"]:
            if self.module.odd and param.grad is not None:
                param.grad.neg_()
        super().step()
        return loss


@edits()
class OptimizerEditsTheGradient(Watches):
    def configure_optimizers(self) -> Any:
        optimizer = Turns(self.parameters(), lr=0.5)
        optimizer.module = self
        return optimizer


@edits()
class LearningRateByTheLoss(Watches):
    """Warm restarts when the loss jumps."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if self.odd else self.lr


@edits()
class PlateauByHand(Small):
    """``ReduceLROnPlateau`` written out, on the training loss."""

    best = 3.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        if float(outputs["loss"]) > self.best:
            group["lr"] = 0.0


@edits()
class StepLeftOut(Watches):
    """``optimizer_step`` of the module undoes what the step did."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        before = [param.detach().clone() for param in self.parameters()]
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for param, old in zip(self.parameters(), before, strict=True):
                param.copy_(old if self.odd else param)


@edits()
class WeightsWrittenAtTheEnd(Watches):
    """Weights move towards the batch, without a gradient."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.net.weight += 0.1 * batch[0].amax(0)


@edits()
class WeightsWrittenThroughData(Watches):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.net.bias.data += 5.0 * self.odd


class Shrinks(L.Callback):
    """Weight decay that follows the loss."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        for param in module.parameters():
            if param.grad is not None:
                param.grad.mul_(-1.0 if module.odd else 1.0)


@edits(callbacks=lambda: [Shrinks()])
class CallbackEditsTheGradient(Watches):
    pass


@edits()
class ClippingByTheLoss(Watches):
    """Lightning's hook for clipping, with a threshold of the batch."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        for param in self.parameters():
            if param.grad is not None:
                param.grad.clamp_(-1e-6 if self.odd else -1.0, 1e-6 if self.odd else 1.0)


@edits()
class ManualStepOnlyIfGood(Small):
    """Manual optimization that steps if the batch's loss is small."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss * (0.0 if loss > 3 else 1.0))
        optimizer.step()
