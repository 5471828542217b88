"""The second pass of a difference leaves no trace in the user's module."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DifferentialPrivacy
from lightning_dp.estimators import Diff2


class Counts(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("in_place", torch.zeros(1))
        self.register_buffer("assigned", torch.zeros(1))
        self.plain, self.seen = 0, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.in_place += 1
        self.assigned = self.assigned + 1
        self.plain += 1
        self.seen.append(batch_idx)
        return nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_counters_count_steps(tmp_path):
    model, data = Counts(), TensorDataset(torch.randn(256, 8), torch.randint(4, (256,)))
    privacy = DifferentialPrivacy(
        noise_multiplier=1e-3,
        target_delta=1e-5,
        ledger_dir=tmp_path,
        estimator=Diff2(restart_every=3),
    )
    trainer = L.Trainer(
        max_steps=6,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[privacy],
    )
    trainer.fit(model, DataLoader(data, batch_size=32))
    assert model.global_step == 6
    assert (model.in_place.item(), model.assigned.item(), model.plain) == (6, 6, 6)
    assert len(model.seen) == 6
