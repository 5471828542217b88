"""Data sets whose records change or are read together during a fit."""

from __future__ import annotations

import math

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy

X, Y = torch.randn(40, 3), torch.arange(40) % 2


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(make_trainer, module=None, data=None, dataset=None, collate=None, workers=0, **settings):
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5, **settings)
    trainer = make_trainer(max_steps=4, callbacks=[privacy])
    loader = DataLoader(
        TensorDataset(X, Y) if dataset is None else dataset,
        batch_size=20,
        collate_fn=collate,
        num_workers=workers,
    )
    if data is not None:
        data.train_dataloader = lambda: loader
    trainer.fit(module or Model(), data or loader)
    return privacy


class Resamples(Model):
    """Shows hard examples more often after some steps."""

    def __init__(self, subset, after):
        super().__init__()
        self.subset, self.after = subset, after

    def on_train_batch_end(self, *unused):
        if self.global_step == self.after:
            self.subset.indices = [0, *range(39)]


@pytest.mark.parametrize("after", [2, 3])  # as a pass ends; in the last one of the fit
def test_a_record_that_is_named_twice_during_fit_voids_the_run(make_trainer, tmp_path, after):
    subset = Subset(TensorDataset(X, Y), range(40))
    with pytest.raises(VoidedRunError, match=r"changed during fit\. Index 0 of .* 2 times"):
        fit(make_trainer, Resamples(subset, after), dataset=subset, ledger_dir=str(tmp_path))


# -- data sets ------------------------------------------------------------------------------


class Rows(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return X[i], Y[i]


class MixesInACall(Rows):
    def __getitems__(self, indices):
        rows = X[indices]
        return list(zip(rows - rows.mean(0), Y[indices], strict=True))


def test_without_spot_checks_it_is_not_watched(make_trainer):
    assert math.isfinite(fit(make_trainer, dataset=MixesInACall(), spot_checks=False).epsilon)


class Sequences(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        return torch.full((2 + i % 3, 3), 0.1 * i), i % 2


def padded(samples):
    x = pad_sequence([x for x, _ in samples], batch_first=True)
    lengths = torch.tensor([len(x) for x, _ in samples])
    return x, lengths, torch.tensor([y for _, y in samples])


class Mean(Model):
    """Counts the padding, so the longest record moves the gradients of all others."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0].mean(1)), batch[2])


def test_records_that_run_alone_are_padded_by_no_other(make_trainer):
    settings = {"dataset": Sequences(), "collate": padded, "engine": "one_by_one"}
    assert "padded" not in fit(make_trainer, Mean(), **settings).report().isolation


def test_nothing_is_said_of_padding_where_there_is_none(make_trainer):
    assert "padded" not in fit(make_trainer).report().isolation
