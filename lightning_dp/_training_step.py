"""The call of ``training_step`` as Lightning's loop makes it, its loss, and how it leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric

from lightning_dp._module_state import ModuleState

__all__ = ["apart", "call_training_step", "is_differentiable", "loss_in", "muted", "with_loss"]


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


@contextmanager
def muted(module: LightningModule) -> Iterator[None]:
    """Inside, the module leaves no trace: logs, torchmetrics and buffers are as if it had not run.

    ``log`` is shadowed (``log_dict`` goes through it). Plain attributes that ``training_step``
    changes itself are not protected.
    """
    metrics = [(part, _snapshot(part)) for part in module.modules() if isinstance(part, Metric)]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    module.log = _ignore  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
        for metric, attributes in metrics:
            vars(metric).clear()
            vars(metric).update(attributes)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def apart(module: LightningModule, before: ModuleState) -> Iterator[None]:
    """Inside, a record runs alone, as :func:`muted`; afterwards nothing tells that it did.

    torchmetrics have counted nothing yet, and random generators of the module begin with seeds from
    the global ones.

    Args:
        before: the state that every record begins with, of this module and of what it uses.
    """
    try:
        with muted(module):
            for part in module.modules():
                if isinstance(part, Metric):
                    part.reset()
            before.reseed()
            yield
    finally:
        before.restore()


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


def _snapshot(metric: Metric) -> dict[str, Any]:
    """All attributes, with copies of the states that an update changes in place."""
    states = {
        name: [item.clone() for item in value] if isinstance(value, list) else value.clone()
        for name, value in metric.metric_state.items()
    }
    return {**vars(metric), **states}
