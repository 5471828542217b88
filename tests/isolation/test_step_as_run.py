"""The fit's own step as one of the runs of a comparison: seen alike, for one run less."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_dp import Checks, FullBatch
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy

N = 64


class Model(L.LightningModule):
    """Notes the size of each of its batches."""

    def __init__(self, couple=None):
        super().__init__()
        self.net, self.couple, self.sizes = torch.nn.Linear(8, 4), couple, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        SIZES.append((self.trainer.global_step, len(x)))
        loss = F.cross_entropy(self.net(x), y, reduction="none")
        return (loss if self.couple is None else self.couple(x, loss)).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Noisy(Dataset):
    """Adds noise to each record when it is read, so that no record is read twice alike."""

    def __init__(self, noise):
        self.noise, self.x = noise, F.normalize(torch.rand(N, 8))

    def __len__(self):
        return N

    def __getitem__(self, i):
        return self.x[i] + self.noise * torch.randn(8), i % 4


SIZES: list[tuple[int, int]] = []


def private(folder, **settings):
    return DifferentialPrivacy(
        noise_multiplier=8.0,
        target_delta=1e-5,
        sampling=FullBatch(),
        engine="layers",
        ledger_dir=str(folder / "ledger"),
        advice=False,
        **settings,
    )


@pytest.fixture
def runs_of_step_1(make_trainer, tmp_path):
    """The sizes of all runs of the second step, whose comparison is of the whole batch."""

    def run(model, noise=0.0, **settings):
        SIZES.clear()
        privacy = private(tmp_path, **settings)
        trainer = make_trainer(callbacks=[privacy], max_steps=2)
        trainer.fit(model, DataLoader(Noisy(noise), N))
        assert not trainer.strategy.private_run.not_compared
        return [size for step, size in SIZES if step == 1]

    return run


def test_the_whole_batch_runs_once_more_with_samples_exchanged(runs_of_step_1):
    assert runs_of_step_1(Model()) == [N, N]
    assert runs_of_step_1(Model(), checks=Checks(comparisons=False)) == [N]


@pytest.fixture
def runs_of_step_0(make_trainer, tmp_path):
    """The sizes of all runs of the first step, whose comparison is of 16 samples at most."""

    def run(model, n):
        SIZES.clear()
        privacy = private(tmp_path, checks=Checks(dry_run=False))
        trainer = make_trainer(callbacks=[privacy], max_steps=1)
        trainer.fit(model, DataLoader(Subset(Noisy(0.0), range(n)), n))
        assert not trainer.strategy.private_run.not_compared
        return [size for _, size in SIZES]

    return run


class DropsOut(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step([F.dropout(batch[0]), batch[1]], batch_idx)


@pytest.mark.parametrize(
    ("kind", "n", "sizes"),
    [(Model, 16, [16, 16, 8]), (DropsOut, 16, [16, 16, 16, 8]), (Model, 32, [32, 16, 16, 8])],
)
def test_a_batch_of_few_runs_once_less_if_it_draws_nothing(runs_of_step_0, kind, n, sizes):
    assert runs_of_step_0(kind(), n) == sizes


def test_what_only_fewer_samples_show_is_refused(runs_of_step_0):
    with pytest.raises(Exception, match="without the other records"):
        runs_of_step_0(Model(lambda x, loss: loss * len(x)), 16)


def test_records_that_cannot_be_read_twice_run_on_their_own(runs_of_step_1):
    assert runs_of_step_1(Model(), noise=0.1) == [N, N, N]


def test_what_only_the_whole_batch_shows_is_refused(runs_of_step_1):
    with pytest.raises(Exception, match="exchanged for others"):
        runs_of_step_1(Model(lambda x, loss: loss * (6 * x[:, 0].mean() - 1 if len(x) == N else 1)))


class Drops(Model):
    """Leaves records out at the second step."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 1:
            left = batch[0][:, 0] > batch[0][:, 0].median()
            batch = [each[left] for each in batch]
        return super().training_step(batch, batch_idx)


def test_a_step_with_other_rows_than_records_is_voided_as_ever(runs_of_step_1):
    with pytest.raises(VoidedRunError, match="rows"):
        runs_of_step_1(Drops(), checks=Checks(loss_graph=False))
