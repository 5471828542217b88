"""The call of ``training_step``, as Lightning's training loop makes it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

__all__ = ["call_training_step"]


def call_training_step(module: LightningModule, batch: Any, batch_idx: int) -> Any:
    """What ``training_step`` returns, called by position.

    The number of the batch is its second argument, whatever that is called, if it takes two.
    """
    step = module.training_step
    takes_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    return step(batch, batch_idx) if takes_number else step(batch)
