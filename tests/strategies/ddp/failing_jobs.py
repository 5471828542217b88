"""Scenarios of two processes that must end early; run as jobs.py is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jobs import Model, WholeSet, fit, main, rank, records
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy


def lengths(folder: Path) -> dict[str, Any]:
    """The ranks have data sets of different length."""
    model = Model(rank())
    try:
        fit(model, records(60 + rank()), 3, {"noise_multiplier": 1.0}, folder, max_epochs=1)
    finally:
        torch.save(len(model.chunks), folder / f"chunks-{rank()}.pt")
    return {}


def no_journal(folder: Path) -> dict[str, Any]:
    """The journal of a checkpoint is gone: only rank 0 looks for it."""
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    privacy = {"noise_multiplier": 1.0}
    options = {"max_steps": 2}
    fit(Model(rank()), records(60), 3, privacy, folder, saving, **options)
    torch.distributed.barrier()
    if rank() == 0:
        for journal in (folder / "privacy").glob("*.journal"):
            journal.unlink()
    torch.distributed.barrier()
    model = Model(rank())
    try:
        fit(model, records(60), 3, privacy, folder, ckpt_path=folder / "step=2.ckpt", max_steps=4)
    finally:
        torch.save(len(model.chunks), folder / f"chunks-{rank()}.pt")
    return {}


class Skips(Model):
    """Rank 1 gives no loss at its third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if self.global_step == 2 and rank() == 1 else loss


class SkipsByHand(Model):
    """Rank 1 does not step at its third batch, nor goes back."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 2 and rank() == 1:
            return
        self.manual_backward(loss)
        self.optimizers().step()  # type: ignore[union-attr]


class Edits(Model):
    """Rank 1 changes the private gradient of a step."""

    at = 2

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == self.at and rank() == 1:
            self.net[0].weight.grad.mul_(2)  # type: ignore[union-attr,operator]


class EditsAtOnce(Edits):
    at = 0


class Mixes(Model):
    """Rank 1 mixes its records at its third batch; all ranks meet in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, x, y = batch
        self.seen = self.all_gather(x.sum().detach())
        if self.global_step == 2 and rank() == 1:
            x = x + 3 * x.mean(0)
        return super().training_step((index, x, y), batch_idx)


def voided(folder: Path, kind: type[Model] = Skips) -> dict[str, Any]:
    """What one rank's records show ends both; each says what it knows."""
    privacy = DifferentialPrivacy(
        target_delta=1e-5, noise_multiplier=1.0, isolation_probe=False, sampling=WholeSet()
    )
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, save_on_exception=True)
    model, error = kind(rank()), ""
    try:
        fit(model, records(60), 3, None, folder, saving, privacy, max_epochs=1)
    except (VoidedRunError, MisconfigurationException) as raised:
        error = str(raised)
    return {"error": error, "epsilon": privacy.epsilon, "steps": privacy.steps}


def voided_apart(folder: Path) -> dict[str, Any]:
    return voided(folder, SkipsByHand)


def mixed(folder: Path) -> dict[str, Any]:
    return voided(folder, Mixes)


def edited(folder: Path) -> dict[str, Any]:
    return voided(folder, Edits)


def edited_at_once(folder: Path) -> dict[str, Any]:
    return voided(folder, EditsAtOnce)


if __name__ == "__main__":
    main(lengths, no_journal, voided, voided_apart, mixed, edited, edited_at_once)
