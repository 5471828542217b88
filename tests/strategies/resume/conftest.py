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
from tests.zoo import flat, private, sgd
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

    make_trainer: Callable[..., L.Trainer]
    classifier: type[L.LightningModule]

    def __call__(
        self,
        ckpt_path: Any = None,
        *,
        privacy: DifferentialPrivacy | dict[str, Any] | None = None,
        callbacks: tuple[L.Callback, ...] = (),
        optimizer: Callable[[Any], Any] = sgd,
        weights_only: bool | None = None,
        batch_size: int = BATCH,
        records: int = RECORDS,
        workers: int = 0,
        **options: Any,
    ) -> Fitted:
        if not isinstance(privacy, DifferentialPrivacy):
            privacy = private(**(privacy or {}))
        saves = any(isinstance(each, L.pytorch.callbacks.Checkpoint) for each in callbacks)
        probe, options = Probe(), {"max_epochs": 2, "enable_checkpointing": saves, **options}
        trainer = self.make_trainer(callbacks=[privacy, probe, *callbacks], **options)
        fitted = Fitted(trainer, self.model(optimizer), privacy, probe)
        loader = self.loader(batch_size, records, workers)
        trainer.fit(fitted.model, loader, ckpt_path=ckpt_path, weights_only=weights_only)
        return fitted

    def model(self, optimizer: Callable[[Any], Any] = sgd) -> L.LightningModule:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        return self.classifier(net, optimizer)

    def loader(
        self, batch_size: int = BATCH, records: int = RECORDS, workers: int = 0
    ) -> DataLoader[Any]:
        data = TensorDataset(*make_records(records))
        return DataLoader(data, batch_size=batch_size, num_workers=workers)

    def steps_per_epoch(self, accumulate: int = 1) -> int:
        return math.ceil(math.ceil(RECORDS / BATCH) / accumulate)


@pytest.fixture
def fit(make_trainer: Callable[..., L.Trainer], classifier: Any) -> Fit:
    return Fit(make_trainer, classifier)


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
