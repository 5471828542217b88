"""A fit whose collate_fn, transfer hooks or data set mix records, and fits in which none does."""

from __future__ import annotations

import math
import random
import re

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_dp._warnings import PrivacyWarning
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.accounting.journal import read_journal
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


def charges(folder):
    return [read_journal(journal)[1].total for journal in folder.rglob("*.journal")]


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


def mixup(samples):
    x, y = default_collate(samples)
    return (x + x.roll(1, 0) if random.random() < 0.5 else x), y


def test_a_collate_fn_that_mixes_samples_is_refused_before_a_charge(make_trainer, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"collate_fn \(mixup\) mixes.*__getitem__"):
        fit(make_trainer, collate=mixup, ledger_dir=str(tmp_path))

    assert charges(tmp_path) == [0]


def test_it_is_refused_where_workers_collate(make_trainer):
    with pytest.raises(MisconfigurationException, match=r"collate_fn \(mixup\) mixes"):
        fit(make_trainer, collate=mixup, workers=1)


def test_without_the_probe_it_is_not_tried(make_trainer):
    privacy = fit(make_trainer, collate=mixup, isolation_probe=False)

    assert privacy.report().isolation == "opted out"


def test_records_that_run_alone_may_not_meet_in_what_is_kept(make_trainer):
    class Mixes:
        before = 0.0

        def __call__(self, samples):
            x, y = default_collate(samples)
            x, self.before = x + self.before, x.mean()
            return x, y

    assert math.isfinite(fit(make_trainer, collate=mixup, engine="one_by_one").epsilon)
    with pytest.raises(MisconfigurationException, match="Mixes"):
        fit(make_trainer, collate=Mixes(), engine="one_by_one")


def test_an_ordinary_one_is_called_as_often_as_there_are_batches_in_its_own_state(make_trainer):
    class Counting:
        calls = 0

        def __init__(self):
            self.sizes = []

        def __call__(self, samples):
            self.sizes.append(len(samples))
            return default_collate(samples)

    collate = Counting()
    privacy = fit(make_trainer, collate=collate)

    assert len(collate.sizes) == 4
    assert privacy.report().isolation.startswith("probed, isolated")


def test_one_that_cannot_be_tried_is_told(make_trainer):
    def no_mean(samples):
        assert all(abs(float(x.mean())) < 1e3 and x.norm() != 0 for x, _ in samples)
        assert {float(x[0]) for x, _ in samples} <= {float(x) for x in X[:, 0]}
        return default_collate(samples)

    privacy = fit(make_trainer, collate=no_mean)

    assert (
        "collate_fn (test_one_that_cannot_be_tried_is_told.<locals>.no_mean) was not tried ("
        in (privacy.report().isolation)
    )


def test_one_that_leaves_samples_out_is_warned_of(make_trainer):
    def without_none(samples):
        return default_collate([sample for sample in samples if sample is not None])

    with pytest.warns(PrivacyWarning, match="leaves out samples that are None"):
        privacy = fit(make_trainer, collate=without_none)

    assert math.isfinite(privacy.epsilon)


# -- hooks between collate_fn and training_step ---------------------------------------------


class Before(Model):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x + x.flip(0), y


class Transfers(Model):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        x, y = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return x - x.mean(0), y


class After(Model):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if self.trainer.training and torch.rand(()) < 0.5:
            share = np.random.beta(1, 1)
            x = share * x + (1 - share) * x.roll(1, 0)
        return x, y


class KeepsMean(Model):
    mean = 0.0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        x, self.mean = x - self.mean, x.mean(0)
        return x, y


class Later(Model):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x + x.flip(0) if self.current_epoch >= 5 else x), y


@pytest.mark.parametrize("kind", [Before, Transfers, After, KeepsMean, Later])
def test_a_hook_that_mixes_records_is_refused(kind, make_trainer):
    with pytest.raises(
        MisconfigurationException, match=rf"{kind.__name__}\.\w+_transfer|to_device"
    ):
        fit(make_trainer, kind())


class Data(L.LightningDataModule):
    def __init__(self, mixes):
        super().__init__()
        self.mixes = mixes

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (x * x[:1] if self.mixes else x * 2), y


def test_a_hook_of_the_data_module_is_refused(make_trainer):
    with pytest.raises(MisconfigurationException, match=r"Data\.on_after_batch_transfer mixes"):
        fit(make_trainer, data=Data(mixes=True))


class Augments(Model):
    """Augments as kornia does: at random for each record, on the device, while it trains."""

    calls = 0

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.calls += 1
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.log("size", 20.0)
        return [part.to(device) for part in batch]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if self.trainer.training:
            x = x * (1 + 0.1 * torch.randn(len(x), 1, device=x.device)) + torch.rand(())
        return x, y


def test_hooks_that_mix_nothing_pass(make_trainer):
    module = Augments()
    module.log = lambda *args, **kwargs: None

    assert fit(make_trainer, module).report().isolation.startswith("probed, isolated")
    assert module.calls == 4
    assert math.isfinite(fit(make_trainer, data=Data(mixes=False)).epsilon)


# -- data sets ------------------------------------------------------------------------------


class Rows(Dataset):
    def __init__(self):
        self.before, self.reads = None, 0

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return X[i], Y[i]


class MixesWithTheOneBefore(Rows):
    def __getitem__(self, i):
        x, self.before = X[i] if self.before is None else (X[i] + self.before) / 2, X[i]
        return x, Y[i]


class MixesInACall(Rows):
    def __getitems__(self, indices):
        rows = X[indices]
        return list(zip(rows - rows.mean(0), Y[indices], strict=True))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [MixesWithTheOneBefore, MixesInACall])
def test_a_data_set_that_mixes_samples_voids_the_run(kind, workers, make_trainer):
    with pytest.raises(VoidedRunError, match=rf"{kind.__name__} gives other samples of a record"):
        fit(make_trainer, dataset=kind(), workers=workers)


def test_without_spot_checks_it_is_not_watched(make_trainer):
    assert math.isfinite(fit(make_trainer, dataset=MixesInACall(), spot_checks=False).epsilon)


class Random(Rows):
    def __getitem__(self, i):
        self.reads += 1
        return X[i] + torch.randn(3) + random.random(), Y[i]


def test_random_samples_pass_and_are_drawn_as_without_the_check(make_trainer):
    def seen(**settings):
        rows = []

        class Sees(Model):
            def training_step(self, batch, batch_idx):
                rows.append(batch[0].detach().clone())
                return super().training_step(batch, batch_idx)

        L.seed_everything(1)
        dataset = Random()
        fit(make_trainer, Sees(), dataset=dataset, seed=3, isolation_probe=False, **settings)
        return torch.cat(rows), dataset.reads

    (watched, reads), (alone, reads_alone) = seen(), seen(spot_checks=False)

    assert torch.equal(watched, alone)
    assert reads == reads_alone


class ByTheClock(Rows):
    clock = 0

    def __getitem__(self, i):
        type(self).clock += 1
        return X[i] + self.clock, Y[i]


def test_what_cannot_be_read_again_is_told(make_trainer):
    privacy = fit(make_trainer, dataset=ByTheClock())

    assert "whether samples depend on each other was not seen" in privacy.report().isolation


class Sequences(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, i):
        return torch.full((2 + i % 3, 3), 0.1 * i), i % 2


def padded(samples):
    x = pad_sequence([x for x, _ in samples], batch_first=True)
    lengths = torch.tensor([len(x) for x, _ in samples])
    return x, lengths, torch.tensor([y for _, y in samples])


class MaskedMean(Model):
    def training_step(self, batch, batch_idx):
        x, lengths, y = batch
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        pooled = (x * mask[..., None]).sum(1) / lengths[:, None]
        return F.cross_entropy(self.layer(pooled), y)


class Mean(Model):
    """Counts the padding, so the longest record moves the gradients of all others."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.layer(batch[0].mean(1)), batch[2])


class NoisyMean(MaskedMean):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + 0 * torch.randn_like(batch[0]).sum()


def test_a_model_that_reads_the_padding_is_refused_before_any_charge(make_trainer, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"\(padded\) pads a batch to its longest"):
        fit(make_trainer, Mean(), dataset=Sequences(), collate=padded)
    assert charges(tmp_path) == [0]


@pytest.mark.parametrize(
    ("model", "said"),
    [(MaskedMean, "were compared"), (NoisyMean, r"were not compared \(the model draws random")],
)
def test_the_report_says_if_batches_of_other_lengths_were_compared(make_trainer, model, said):
    privacy = fit(make_trainer, model(), dataset=Sequences(), collate=padded)
    found = privacy.report().isolation
    assert found.startswith("probed, isolated")
    assert re.search(f"; batches padded to other lengths {said}", found)


def test_records_that_run_alone_are_padded_by_no_other(make_trainer):
    settings = {"dataset": Sequences(), "collate": padded, "engine": "one_by_one"}
    assert "padded" not in fit(make_trainer, Mean(), **settings).report().isolation


def test_nothing_is_said_of_padding_where_there_is_none(make_trainer):
    assert "padded" not in fit(make_trainer).report().isolation
