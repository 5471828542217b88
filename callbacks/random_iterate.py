"""The output that the theorems of DIFF2 speak about: one of all iterates, chosen at random."""

from __future__ import annotations

import random
import secrets
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

__all__ = ["RandomIterate"]


class RandomIterate(L.Callback):
    """Ends training with the weights after a uniformly random optimizer step.

    The choice does not look at the data, so it costs no privacy. Checkpoints saved during fit hold
    the latest weights, and go on from there; what this callback keeps is saved with them.
    (For the mean of all iterates use Lightning's own ``WeightAveraging`` callback.)

    Example:
        >>> trainer = L.Trainer(callbacks=[RandomIterate()], logger=False, max_steps=10)
    """

    def __init__(self) -> None:
        self._seen = 0  # iterates of this run
        self._global_step = 0  # at the latest of them
        self._kept: dict[str, Tensor] = {}  # the weights after one of them
        self._generator = random.Random()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.ckpt_path is None:
            self._seen, self._global_step, self._kept = 0, trainer.global_step, {}
        # All processes must make the same choices, whatever seed_everything says.
        self._generator.seed(trainer.strategy.broadcast(secrets.randbits(128)))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == self._global_step:
            return  # this batch was only accumulated
        self._seen, self._global_step = self._seen + 1, trainer.global_step
        # The t-th iterate takes the place of the one kept with probability 1/t.
        if self._generator.randrange(self._seen) == 0:
            self._kept = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._kept:
            with torch.no_grad():
                pl_module.load_state_dict(self._kept)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen, "global_step": self._global_step, "kept": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen, self._global_step = state_dict["seen"], state_dict["global_step"]
        self._kept = state_dict["kept"]
