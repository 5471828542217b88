"""The call of ``training_step`` as Lightning's loop makes it, and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

__all__ = ["call_training_step", "is_differentiable", "loss_in", "with_loss"]


def call_training_step(module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """Return what ``training_step`` does, called by position.

    The number of the batch is its second argument, whatever that is called, if it takes two.
    """
    step = module.training_step
    takes_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    return step(batch, batch_idx) if takes_number else step(batch)


def loss_in(output: Any) -> Any:
    """Return the loss in the output of ``training_step``: the output itself, or its entry "loss"."""
    return output.get("loss") if isinstance(output, Mapping) else output


def is_differentiable(loss: object) -> TypeGuard[Tensor]:
    """Tell whether there is anything to go back from."""
    return isinstance(loss, Tensor) and loss.requires_grad


def with_loss(output: Any, none: Tensor) -> Any:
    """Return the output of ``training_step``; where there is no loss, with ``none`` in its place."""
    if output is None:
        return none
    if isinstance(output, Mapping) and output.get("loss") is None:
        return {**output, "loss": none}
    return output
