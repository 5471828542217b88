"""Hooks that iterate the training data past the private loader are told by their code."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DifferentialPrivacy, PrivacyWarning
from lightning_dp.isolation.data_readers import readers_of_training_data


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Loops(Model):
    def on_train_start(self):
        for x, _ in self.trainer.datamodule.train_dataloader():
            self.centre = x.mean(0)


class Stacks(Model):
    def on_fit_start(self):
        self.counts = torch.stack([y for _, y in self.trainer.datamodule.train_set]).bincount()


class Keeps(Model):
    def on_train_epoch_start(self):
        data = self.trainer.datamodule.train_dataset
        self.number = 3
        self.largest = max(float(x.max()) for x, _ in data)


class TakesTheFirst(Model):
    def on_train_start(self):
        self.first = next(iter(self.trainer.datamodule.train_dataloader()))


class Enumerates(Model):
    def on_train_start(self):
        for i, batch in enumerate(self.trainer.datamodule.train_dataloader()):
            self.log(str(i), batch[0].mean())


class Asks(Model):
    """Ordinary code that names the training data."""

    def setup(self, stage):
        self.train_set = [2 * each for each in (1, 2)]
        self.sizes = [len(each) for each in (self.train_set,)]

    def train_dataloader(self):
        return DataLoader([2 * each for each in self.train_set])

    def on_train_epoch_start(self):
        self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)
        for part in self.children():
            part.train()

    def steps(self):
        number = len(self.trainer.datamodule.train_dataloader())
        return [step + 1 for step in range(number)]


@pytest.mark.parametrize("kind", [Loops, Stacks, Keeps, TakesTheFirst, Enumerates])
def test_readers_are_named(kind):
    (name,) = readers_of_training_data(kind(), ())

    assert name.startswith(f"{kind.__name__}.on_")


@pytest.mark.parametrize("kind", [Model, Asks])
def test_who_asks_for_its_length_or_makes_it_is_none(kind):
    assert readers_of_training_data(kind(), (L.Callback(),)) == ()


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.rand(24, 4), torch.arange(24) % 3), 6)


def test_a_fit_warns_and_the_report_says_it(make_trainer):
    privacy = DifferentialPrivacy(noise_multiplier=4.0, target_delta=1e-3)
    trainer = make_trainer(callbacks=[privacy], max_epochs=1)
    with pytest.warns(PrivacyWarning, match=r"Loops\.on_train_start reads the training data"):
        trainer.fit(Loops(), datamodule=Data())

    assert "what Loops.on_train_start computes of the training data" in str(privacy.report())
