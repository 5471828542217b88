"""Rows that several samples of a user's data set are made of are told, without a look at values."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from lightning_dp import DifferentialPrivacy, PrivacyWarning
from lightning_dp.isolation.rows_behind import chosen_rows, shared_rows


class Rows(Dataset):
    """Eight rows, one sample of each."""

    def __init__(self) -> None:
        self.rows = torch.arange(32.0).view(8, 4)
        self.labels = list(range(8))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.labels[index]


class Repeated(Rows):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return super().__getitem__(index % 8)


class ByATable(Rows):
    def __init__(self):
        super().__init__()
        self.index = np.array([0, 0, 0, 1, 2, 3, 4, 5, 6, 7])

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.rows[self.index[index]]


class Shuffled(ByATable):
    """Names each row once."""

    def __init__(self):
        super().__init__()
        self.index = np.array([3, 0, 1, 2, 7, 5, 6, 4])

    def __len__(self):
        return 8


class WithAnAnchor(Rows):
    def __getitem__(self, index):
        return self.rows[index] + self.rows[0], self.labels[index]


class OfAnInnerOne(Rows):
    def __init__(self):
        self.inner = TensorDataset(torch.arange(8.0))

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.inner[index // 2]


class Windows(Rows):
    def __init__(self):
        self.series = torch.arange(10.0)

    def __getitem__(self, index):
        return self.series[index : index + 3]


class Blocks(Rows):
    """Windows that do not overlap."""

    def __init__(self):
        self.series = torch.arange(24.0)

    def __getitem__(self, index):
        return self.series[3 * index : 3 * index + 3]


class WithNames(Rows):
    """A table of public names has fewer rows than there are samples."""

    def __init__(self):
        super().__init__()
        self.names = ["a", "b", "c"]

    def __getitem__(self, index):
        return self.rows[index], self.names[self.labels[index] % 3]


class Toy(Rows):
    """Made up around a few centres."""

    def __init__(self):
        self.centres = torch.eye(2)

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return self.centres[index % 2] + torch.randn(2)


class Files(Rows):
    def __getitem__(self, index):
        raise FileNotFoundError


@pytest.mark.parametrize(
    ("kind", "each", "rows"),
    [
        (Repeated, 1, 8),
        (ByATable, 1, 8),
        (WithAnAnchor, 2, 8),
        (OfAnInnerOne, 1, 8),
        (Windows, 3, 10),
    ],
)
def test_rows_of_several_samples_are_told(kind, each, rows):
    found = shared_rows(kind(), [3, 6])

    assert (found.each, found.rows, found.samples) == (each, rows, len(kind()))


@pytest.mark.parametrize("kind", [Rows, Shuffled, Blocks, WithNames, Toy, Files])
def test_rows_of_one_sample_each_are_not(kind):
    assert shared_rows(kind(), [1, 6]) is None


def test_data_sets_of_torch_are_left_to_others():
    assert shared_rows(Subset(Repeated(), range(24)), [1, 2]) is None


def test_nothing_is_left_on_the_data_set():
    data = Repeated()
    before = dict(vars(data))
    shared_rows(data, [1, 2])

    assert all(value is before[name] for name, value in vars(data).items())


def test_subsets_are_told_apart_by_their_rows_in_any_order():
    whole = Rows()

    assert chosen_rows(Subset(whole, [1, 2])) == chosen_rows(Subset(whole, [2, 1]))
    assert chosen_rows(Subset(whole, [1, 2])) != chosen_rows(Subset(whole, [1, 3]))
    assert chosen_rows(Rows()) == chosen_rows(Rows())


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_fit_warns_of_them_and_the_report_says_it(make_trainer):
    privacy = DifferentialPrivacy(noise_multiplier=4.0, target_delta=1e-3)
    trainer = make_trainer(callbacks=[privacy], max_epochs=1)
    with pytest.warns(PrivacyWarning, match="one row is in several samples"):
        trainer.fit(Model(), DataLoader(Repeated(), 4))

    assert "rows of the data that are in several samples (3 on average)" in str(privacy.report())


class Chosen(L.LightningDataModule):
    """Other rows in each epoch."""

    epoch = 0

    def train_dataloader(self):
        self.epoch += 1
        return DataLoader(Subset(Rows(), range(self.epoch % 4, self.epoch % 4 + 4)), 2)


def test_a_new_loader_with_other_rows_warns_once(make_trainer, recwarn):
    privacy = DifferentialPrivacy(noise_multiplier=4.0, target_delta=1e-3)
    trainer = make_trainer(callbacks=[privacy], max_epochs=4, reload_dataloaders_every_n_epochs=1)
    warnings.simplefilter("always")
    trainer.fit(Model(), datamodule=Chosen())

    said = [str(w.message) for w in recwarn if "gives other rows of the data set" in str(w.message)]
    assert len(said) == 1


def test_chosen_rows_are_compared_without_their_order_and_in_parts():
    rows = np.random.default_rng(0).permutation(200_000)
    some, behind = chosen_rows(Subset(rows, rows.tolist())), rows[::-1].copy()
    assert some == chosen_rows(Subset(rows, behind)) == chosen_rows(Subset(rows, range(200_000)))
    twice = rows.copy()
    twice[0] = twice[1]
    assert some != chosen_rows(Subset(rows, twice))
    assert chosen_rows(Subset(rows, {3: 4, 1: 0})) is not None  # no sequence
