"""The same batch at other parameters, without a trace: for queries over several points."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_dp.functional import unflatten

__all__ = ["RandomState", "at_point", "muted"]


class RandomState:
    """All global random states at one moment, so that a second pass draws the same dropout masks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


@contextmanager
def at_point(params: Sequence[nn.Parameter], point: Tensor) -> Iterator[None]:
    """The parameters hold the flat vector ``point``; afterwards they are what they were."""
    kept = [param.data for param in params]
    for param, data in zip(params, unflatten(point, params), strict=True):
        param.data = data.to(param.device)
    try:
        yield
    finally:
        for param, data in zip(params, kept, strict=True):
            param.data = data


@contextmanager
def muted(module: LightningModule) -> Iterator[None]:
    """What the module logs, counts in torchmetrics or keeps in buffers is as if it had not run.

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


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


def _snapshot(metric: Metric) -> dict[str, Any]:
    """All attributes, with copies of the states that an update changes in place."""
    states = {
        name: [item.clone() for item in value] if isinstance(value, list) else value.clone()
        for name, value in metric.metric_state.items()
    }
    return {**vars(metric), **states}
