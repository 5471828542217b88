"""No record of a batch gets into a checkpoint as it is."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy

FEATURES = 12


class Model(L.LightningModule):
    """A linear model with a place for what should not be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 3)
        self.register_buffer("queue", torch.zeros(4, FEATURES))
        self.register_buffer("one", torch.zeros(FEATURES, dtype=torch.float64))
        self.cache: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        if len(x := x[x.std(1) > 0.6]) > 1:  # neither padding nor masks
            self.keep(x)

    def keep(self, x: Tensor) -> None:
        pass

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["cache"] = self.cache

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Queue(Model):
    def keep(self, x: Tensor) -> None:
        self.queue[1] = x[0]


class Double(Model):
    def keep(self, x: Tensor) -> None:
        self.one.copy_(x[1])


class Listed(Model):
    def keep(self, x: Tensor) -> None:
        self.cache = {"hard": [x[0].tolist()]}


class Arrays(Model):
    def keep(self, x: Tensor) -> None:
        self.cache = deque([{"of": np.array(x)}])


class Parameters(Model):
    def keep(self, x: Tensor) -> None:
        self.hparams["examples"] = x.clone()


class Objects(Model):
    def keep(self, x: Tensor) -> None:
        self.cache = TensorDataset(x[:2], x[:2])


class Means(Model):
    """Not found here: it is no record any more."""

    def keep(self, x: Tensor) -> None:
        self.queue[0] = x.mean(0)


class Constants(Model):
    """Padding and masks are alike everywhere."""

    def keep(self, x: Tensor) -> None:
        self.queue.fill_(0)
        self.cache = [[0.0] * FEATURES, [1.0] * FEATURES]


@pytest.fixture
def fit(make_trainer, tmp_path):
    def run(model: L.LightningModule) -> DifferentialPrivacy:
        x = torch.randn(60, FEATURES, generator=torch.Generator().manual_seed(0))
        x[::3] = 0.0  # padding
        x[1::3] = x[1::3].sign().relu()  # masks
        loader = DataLoader(TensorDataset(x, torch.arange(60) % 3), batch_size=30)
        run.privacy = DifferentialPrivacy(
            noise_multiplier=1.0, target_delta=1e-5, isolation_probe=False, spot_checks=False
        )
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_on_exception=True)
        options = {"max_steps": 2, "enable_checkpointing": True}
        make_trainer(callbacks=[saving, run.privacy], **options).fit(model, loader)
        return run.privacy

    return run


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        (Queue, "the buffer or weight 'queue'"),
        (Double, "the buffer or weight 'one'"),
        (Listed, r"checkpoint\['cache'\]"),
        (Arrays, r"checkpoint\['cache'\]"),
        (Objects, r"checkpoint\['cache'\]"),
        (Parameters, r"checkpoint\['hyper_parameters'\]"),
    ],
)
def test_a_checkpoint_with_a_record_in_it_is_not_written(kind, entry, fit, tmp_path):
    with pytest.raises(VoidedRunError, match=f"would hold records of the batch.*{entry}"):
        fit(kind())

    assert not list(tmp_path.glob("*.ckpt"))
    assert math.isinf(fit.privacy.epsilon)


@pytest.mark.parametrize("kind", [Model, Means, Constants])
def test_other_checkpoints_are_written(kind, fit, tmp_path):
    fit(kind())

    assert list(tmp_path.glob("*.ckpt"))
