"""A learning rate found in one short training whose rate grows from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_dp._validate import positive, whole

__all__ = ["LearningRateSweep"]

_DIVERGED = 3.0  # times the size of the best score, above it: scores may be negative
_SMOOTH = 0.8  # weight of the past in the smoothed scores


class LearningRateSweep(Callback):
    """Finds a learning rate in one short training: the rate grows from ``low`` to ``high``, step by step.

    After each step ``score`` is asked how good the weights are; the suggestion is the rate at which it
    fell fastest. The weights are put back at the end. Use a separate Trainer, together with:

    - nothing else, on public or synthetic records: free of charge, but without the noise of the private
      training, under which the best rate is often another one;
    - :class:`DifferentialPrivacy` with ``noise_multiplier`` on such records: the noise is there, and a
      ledger in a separate folder;
    - :class:`DifferentialPrivacy` on the private records: its steps are charged like any others, to the
      same ledger if it is the callback of the training that follows, or to a trial of a
      :class:`~lightning_dp.search.Search`.

    ``score`` must look at public or synthetic records only: a loss on private ones is not covered by ε,
    and neither is a learning rate that was chosen by it.

    Args:
        score: from the model to a loss on public or synthetic records, smaller is better. It is called in
            evaluation mode and without gradients.
        low, high: rates, 0 < low < high.
        steps: optimizer steps, at least 4. Training stops after them, or once the score is above the best
            one by three times its size.

    Raises:
        ValueError: naming the argument.

    Example:
        >>> sweep = LearningRateSweep(lambda model: 0.0, low=1e-4, high=1.0, steps=5)
        >>> [round(sweep.rate(step), 6) for step in range(5)]
        [0.0001, 0.001, 0.01, 0.1, 1.0]
    """

    def __init__(
        self,
        score: Callable[[LightningModule], float],
        *,
        low: float = 1e-5,
        high: float = 10.0,
        steps: int = 100,
    ) -> None:
        self._score = score
        self._low, self._high = positive("low", low), positive("high", high)
        self._steps = whole("steps", steps, 4)
        if not self._low < self._high:
            raise ValueError(f"low={low} must be smaller than high={high}.")
        self._before: dict[str, Tensor] = {}
        self.rates: list[float] = []
        self.scores: list[float] = []

    def rate(self, step: int) -> float:
        """Return the learning rate of a step: ``low (high / low)^(step / (steps - 1))``."""
        return self._low * math.pow(self._high / self._low, step / (self._steps - 1))

    @property
    def suggestion(self) -> float | None:
        """The rate at which the smoothed score fell fastest; None if it never fell."""
        smooth = _smoothed(self.scores)
        if smooth.size < 3:
            return None
        slopes = np.gradient(smooth)
        best = int(np.argmin(slopes))
        return self.rates[best] if slopes[best] < 0 else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the weights from before."""
        self.rates, self.scores = [], []
        self._before = {
            name: value.detach().clone() for name, value in pl_module.state_dict().items()
        }

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the rate of the step that comes."""
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.rate(min(trainer.global_step, self._steps - 1))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Score the weights after each optimizer step, and stop after the last one."""
        if trainer.global_step <= len(self.scores):
            return  # a part of a batch
        self.rates.append(self.rate(len(self.scores)))
        self.scores.append(self._scored(pl_module))
        best = min(self.scores)
        is_lost = not self.scores[-1] - best <= _DIVERGED * abs(best)
        if is_lost or len(self.scores) == self._steps:
            trainer.should_stop = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back, if the training began."""
        if self._before:
            pl_module.load_state_dict(self._before)
        self._before = {}

    def _scored(self, model: LightningModule) -> float:
        was_training = {module: module.training for module in model.modules()}
        model.eval()
        try:
            with torch.no_grad():
                return float(self._score(model))
        finally:
            for module, mode in was_training.items():
                module.training = mode


def _smoothed(scores: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a moving average of the finite scores, from the first one on."""
    smooth: list[float] = []
    past = 0.0
    for number, score in enumerate(scores, 1):
        if not math.isfinite(score):
            break
        past = _SMOOTH * past + (1 - _SMOOTH) * score
        smooth.append(past / (1 - _SMOOTH**number))
    return np.array(smooth)
