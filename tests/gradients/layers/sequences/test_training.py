"""Models of sequences, unchanged, in the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch
from lightning_dp.callbacks import DifferentialPrivacy

class Transformer(L.LightningModule):
    """An ordinary module of three tokens a record, with the same dropout in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True), 1
        )
        self.embed, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        torch.manual_seed(self.global_step)
        hidden = self.encoder(self.embed(x.view(len(x), 3, 2))).mean(1)
        return nn.functional.cross_entropy(self.head(hidden), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_without_noise_and_clipping_a_transformer_trains_as_ever(blobs, make_trainer):
    results = []
    for is_private in (False, True):
        torch.manual_seed(0)
        model = Transformer()
        privacy = DifferentialPrivacy(
            target_delta=1e-5, noise_multiplier=0.0, max_grad_norm=1e6, sampling=FullBatch()
        )
        callbacks = [privacy] if is_private else []
        make_trainer(max_epochs=4, callbacks=callbacks).fit(model, DataLoader(blobs, 240))
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert privacy.report().mechanism["gradient engine"] == "bookkeeping"
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


def test_a_transformer_trains_privately(blobs: TensorDataset, make_trainer):
    torch.manual_seed(0)
    model = Transformer()
    privacy = DifferentialPrivacy(target_delta=1e-5, target_epsilon=4.0, max_grad_norm=1.0)
    trainer = make_trainer(max_epochs=3, callbacks=[privacy], accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(blobs, 24))
    assert privacy.report().mechanism["gradient engine"] == "bookkeeping"
    assert 0 < float(trainer.callback_metrics["privacy/epsilon"]) <= 4.0
    assert trainer.global_step == 15
