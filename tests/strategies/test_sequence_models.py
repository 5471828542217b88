"""Models of sequences, unchanged, in the Trainer."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from opacus.layers import DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import FullBatch
from tests.zoo import private


class Sequences(L.LightningModule):
    """Three tokens a record."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def encode(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.encode(x.view(len(x), 3, 2))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Transformer(Sequences):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True), 1
        )

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(self.embed(x)).mean(1)


class TimeFirst(Sequences):
    """Opacus' attention as it is by default."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.attention = DPMultiheadAttention(4, 2, dropout=dropout, add_bias_kv=True)

    def encode(self, x: Tensor) -> Tensor:
        y = self.embed(x).transpose(0, 1)
        return self.attention(y, y, y)[0].mean(0)


class Packed(Sequences):
    """An LSTM on sequences of one to three tokens, by the sign of what is in them."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.lstm = DPLSTM(
            4, 2, num_layers=2, dropout=dropout, bidirectional=True, batch_first=True
        )

    def encode(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 1:, 0] > 0).sum(1)
        packed = pack_padded_sequence(self.embed(x), lengths.cpu(), True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return output.sum(1)


@pytest.mark.parametrize("kind", [Transformer, TimeFirst, Packed])
def test_without_noise_and_clipping_a_model_trains_as_ever(kind, blobs, make_trainer):
    results = []
    for is_private in (False, True):
        torch.manual_seed(0)
        model = kind(dropout=0.0)
        privacy = private(noise_multiplier=0.0, max_grad_norm=1e6, sampling=FullBatch())
        callbacks = [privacy] if is_private else []
        make_trainer(max_epochs=3, callbacks=callbacks).fit(model, DataLoader(blobs, 240))
        results.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert privacy.report().mechanism["gradient engine"].startswith("records, since layers")
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", [Transformer, TimeFirst, Packed])
def test_a_model_trains_privately(kind, blobs: TensorDataset, make_trainer):
    torch.manual_seed(0)
    model = kind()
    privacy = private(target_epsilon=4.0, max_grad_norm=1.0)
    trainer = make_trainer(max_epochs=2, callbacks=[privacy], accumulate_grad_batches=2)
    trainer.fit(model, DataLoader(blobs, 60))
    assert privacy.report().mechanism["gradient engine"].startswith("records, since layers")
    assert 0 < float(trainer.callback_metrics["privacy/epsilon"]) <= 4.0
    assert trainer.global_step == 4
