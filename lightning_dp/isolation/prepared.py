"""A copy of a model made ready for a pass, its stand-ins, and the loss of the pass."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_dp._training_step import is_differentiable, loss_in
from lightning_dp.isolation.stand_in_optimizers import ByHand
from lightning_dp.isolation.stand_ins import NotProbed, Now, StandInTrainer

__all__ = ["NoLoss", "begin", "is_half", "loss_of", "prepared", "show_trainer"]


class NoLoss(NotProbed):
    """A step gave nothing to go back from."""


def prepared(module: LightningModule) -> LightningModule:
    """Make a copy of a model ready for passes on the CPU that leave nothing anywhere."""
    module.cpu()
    if is_half(module):
        module.float()
    for part in module.modules():
        if isinstance(part, _DropoutNd):
            part.p = 0.0  # the masks of a smaller batch would be others
    for param in module.parameters():
        param.grad = None
    return module


def show_trainer(module: LightningModule, trainer: StandInTrainer) -> LightningModule:
    """Let a copy of a model see a Trainer, to which it logs."""
    for part in module.modules():
        if isinstance(part, LightningModule):
            part.log = trainer.log  # type: ignore[method-assign,assignment]
    trainer.shown_to = module
    module.trainer = trainer  # type: ignore[assignment]
    return module


def is_half(module: nn.Module) -> bool:
    """Tell whether parameters are of half precision."""
    return any(param.dtype in (torch.float16, torch.bfloat16) for param in module.parameters())


def begin(module: LightningModule, now: Now) -> None:
    """Bring a copy to a pretended moment, as the Trainer's hook for a new epoch does."""
    for (part, name), value in now.counters.items():
        owner = module.get_submodule(part)
        known = getattr(owner, name)
        setattr(owner, name, known * 0 + value if isinstance(known, Tensor) else value)
    module.on_train_epoch_start()


def loss_of(output: Any, by_hand: ByHand | None) -> Tensor:
    """Return the loss of a step.

    Args:
        output: what ``training_step`` returned.
        by_hand: what it was given for its optimizer, in manual optimization.

    Raises:
        NoLoss: if there is none to go back from.
    """
    loss = loss_in(output)
    if by_hand is not None and (loss := by_hand.loss) is None:
        raise NoLoss("manual optimization: training_step calls no self.manual_backward(loss)")
    if not is_differentiable(loss):
        raise NoLoss("training_step returns no loss")
    return loss
