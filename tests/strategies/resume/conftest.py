"""A small private run that can be stopped and resumed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy
from tests.zoo import flat, private
from tests.zoo import records as make_records

RECORDS = 48
BATCH = 4


class Probe(L.Callback):
    """Counts what a run did, from the outside."""

    def __init__(self) -> None:
        self.training_steps = 0
        self.optimizer_steps = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.training_steps += 1

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.optimizer_steps += 1


@dataclass
class Fitted:
    """A fit that is over."""

    trainer: L.Trainer
    model: L.LightningModule
    privacy: DifferentialPrivacy
    probe: Probe

    @property
    def weights(self) -> torch.Tensor:
        return flat(self.model)

    @property
    def ledger(self) -> Any:
        return self.privacy._run.ledger


@dataclass
class Fit:
    """``fit(...)``: one private fit of a fresh model by a fresh Trainer."""

    folder: Path
    classifier: type[L.LightningModule]

    def __call__(
        self,
        ckpt_path: Any = None,
        *,
        privacy: DifferentialPrivacy | dict[str, Any] | None = None,
        callbacks: tuple[L.Callback, ...] = (),
        batch_size: int = BATCH,
        records: int = RECORDS,
        workers: int = 0,
        optimizer: Callable[[Any], Any] | None = None,
        weights_only: bool | None = None,
        **trainer_options: Any,
    ) -> Fitted:
        if not isinstance(privacy, DifferentialPrivacy):
            privacy = private(**(privacy or {}))
        trainer = self.trainer(privacy, callbacks, **trainer_options)
        fitted = Fitted(trainer, self.model(optimizer), privacy, trainer.callbacks[1])
        loader = self.loader(batch_size, records, workers)
        trainer.fit(fitted.model, loader, ckpt_path=ckpt_path, weights_only=weights_only)
        return fitted

    def trainer(
        self, privacy: DifferentialPrivacy, callbacks: tuple[L.Callback, ...], **options: Any
    ) -> L.Trainer:
        quiet: dict[str, Any] = {
            "accelerator": "cpu",
            "logger": False,
            "max_epochs": 2,
            "enable_checkpointing": any(
                isinstance(c, L.pytorch.callbacks.Checkpoint) for c in callbacks
            ),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
        }
        return L.Trainer(callbacks=[privacy, Probe(), *callbacks], **{**quiet, **options})

    def model(self, optimizer: Callable[[Any], Any] | None = None) -> L.LightningModule:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        return self.classifier(net) if optimizer is None else self.classifier(net, optimizer)

    def loader(
        self, batch_size: int = BATCH, records: int = RECORDS, workers: int = 0
    ) -> DataLoader[Any]:
        data = TensorDataset(*make_records(records))
        return DataLoader(data, batch_size=batch_size, num_workers=workers)

    def steps_per_epoch(self, accumulate: int = 1) -> int:
        return math.ceil(math.ceil(RECORDS / BATCH) / accumulate)


@pytest.fixture
def fit(tmp_path: Path, classifier: Any) -> Fit:
    return Fit(tmp_path, classifier)


class SaveAt(L.Callback):
    """Saves a checkpoint after chosen physical batches, wherever in a logical batch they are."""

    def __init__(self, path: Path, epoch: int, batch_idx: int) -> None:
        self.path, self.epoch, self.batch_idx = path, epoch, batch_idx

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (trainer.current_epoch, batch_idx) == (self.epoch, self.batch_idx):
            trainer.save_checkpoint(self.path)


@pytest.fixture
def save_at() -> type[SaveAt]:
    return SaveAt
