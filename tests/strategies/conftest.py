"""Data and models of the tests that go through a whole Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.accounting.journal import read_journal
from lightning_dp.callbacks import DifferentialPrivacy
from tests.zoo import private


@pytest.fixture
def numbered() -> Callable[..., TensorDataset]:
    """n records (x, y, number of the record), the same every time."""

    def make(n: int = 240, dtype: torch.dtype = torch.float32) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        y = torch.arange(n) % 3
        x = torch.randn(n, 6, generator=generator) + 2 * nn.functional.one_hot(y, 6)
        return TensorDataset(x.to(dtype), y, torch.arange(n))

    return make


@pytest.fixture
def recording(classifier: type[Any]) -> type[Any]:
    """A classifier that writes down which records each noised step used."""

    class Recording(classifier):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.batches: list[list[int]] = []
            self.chunk_counts: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y, number = batch
            chunk = self.trainer.train_dataloader.current  # only it knows a stand-in from a record
            if chunk.first:
                self.batches.append([])
                self.chunk_counts.append(0)
            self.chunk_counts[-1] += 1
            if chunk.size:
                self.batches[-1] += number.tolist()
            return super().training_step((x, y), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch[:2], batch_idx)

    return Recording


@pytest.fixture
def fit(make_trainer: Callable[..., L.Trainer], loader: Any) -> Callable[..., L.Trainer]:
    """``fit(model, privacy, ...)``: a private fit, on 240 records in batches of 24; its Trainer."""

    def run(
        model: L.LightningModule,
        privacy: L.Callback,
        data: Any = None,
        validate: Any = None,
        ckpt_path: Any = None,
        callbacks: Any = (),
        **options: Any,
    ) -> L.Trainer:
        trainer = make_trainer(callbacks=[*callbacks, privacy], **options)
        trainer.fit(model, loader if data is None else data, validate, ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def charges(tmp_path: Path) -> Callable[[], list[Any]]:
    """The events in the run's journal on the disk, in order."""

    def read() -> list[Any]:
        (path,) = (tmp_path / "privacy").glob("*.journal")
        _, runs = read_journal(path)
        return [event for run in runs.values() for event, n in run for _ in range(n)]

    return read


@pytest.fixture
def privacy() -> DifferentialPrivacy:
    """Little noise, so that training visibly works."""
    return private(noise_multiplier=0.5)


@pytest.fixture
def assert_trained() -> Callable[..., None]:
    """Checks that so many steps were made and charged, and that the loss fell."""

    def loss_of(model: Any, loader: DataLoader[Any]) -> float:
        with torch.no_grad():
            x, y = loader.dataset.tensors
            return float(nn.functional.cross_entropy(model(x), y))

    def check(
        trainer: L.Trainer, model: Any, privacy: Any, loader: Any, untrained: Any, steps: int
    ) -> None:
        assert trainer.global_step == privacy.steps == steps
        assert loss_of(model, loader) < 0.9 * loss_of(untrained, loader)

    return check
