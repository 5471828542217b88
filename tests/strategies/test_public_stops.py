"""Stops by a rule that reads no record end the run and keep ε; all others withdraw it."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.accounting.journal import read_journal
from lightning_dp.callbacks import DifferentialPrivacy

AT, N, BATCH, Z, DELTA = 3, 128, 16, 1.0, 1e-5


class Base(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.latest, self.limit = nn.Linear(4, 2), 0.0, AT

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class HookCounts(Base):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == self.limit else None


class StepCounts(Base):
    def training_step(self, batch, batch_idx):
        return None if self.global_step == AT else super().training_step(batch, batch_idx)


class StepCountsLate(Base):
    """By a rule of counters, when it has the loss."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == AT else loss


class HookReads(Base):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == AT and bool(batch[0].isfinite().all()) else None


class HookCatches(Base):
    """Whatever goes wrong with the batch, it stops."""

    def on_train_batch_start(self, batch, batch_idx):
        try:
            return -1 if batch_idx == AT and float(batch[0].sum()) < 1e9 else None
        except Exception:
            return -1


class HookReadsMetric(Base):
    def on_train_batch_start(self, batch, batch_idx):
        stops = batch_idx == AT and self.trainer.callback_metrics["loss"] > 0
        return -1 if stops else None


class HookReadsState(Base):
    """A number that the latest batch has left, which no comparison has seen in this form."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.latest = float(outputs["loss"])

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == AT and self.latest < 50 else None


class StepReads(Base):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == AT and loss.item() > -1 else loss


class StepReadsState(HookReadsState):
    on_train_batch_start = Base.on_train_batch_start

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == AT and self.latest < 50 else loss


@pytest.fixture
def fit(make_trainer, tmp_path):
    def run(model, engine, ckpt_path=None, steps=6, **settings):
        privacy = DifferentialPrivacy(
            noise_multiplier=Z, target_delta=DELTA, max_grad_norm=1.0, engine=engine, **settings
        )
        saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=AT)
        trainer = make_trainer(
            callbacks=[privacy, saving], max_steps=steps, max_epochs=-1, enable_checkpointing=True
        )
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(N, 4, generator=generator), torch.arange(N) % 2
        trainer.fit(model, DataLoader(TensorDataset(x, y), BATCH), ckpt_path=ckpt_path)
        return privacy

    return run


PUBLIC = [
    (HookCounts, "layers", "on_train_batch_start returned -1"),
    (HookCounts, "records", "on_train_batch_start returned -1"),
    (StepCounts, "layers", "training_step returned None"),
    (StepCounts, "records", "training_step returned None"),
    (StepCountsLate, "records", "training_step returned None"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "engine", "event"), PUBLIC)
def test_a_rule_of_counters_ends_the_run_and_keeps_epsilon(fit, tmp_path, kind, engine, event):
    privacy = fit(kind(), engine)

    report = privacy.report()
    expected = PLDAccountant().epsilon([(PoissonGaussian(Z, BATCH / N), AT + 1)], DELTA)
    assert report.stop_reason == f"{event} at batch_idx={AT}, by a rule that reads no record"
    assert report.epsilon == pytest.approx(expected, rel=1e-6)  # the batch of the stop is charged
    (journal,) = tmp_path.rglob("*.journal")
    assert sum(n for run in read_journal(journal)[1].values() for _, n in run) == AT + 1

    resumed = fit(Base(), engine, ckpt_path=tmp_path / f"step={AT}.ckpt", steps=AT + 2)
    expected = PLDAccountant().epsilon([(PoissonGaussian(Z, BATCH / N), AT + 3)], DELTA)
    assert resumed.epsilon == pytest.approx(expected, rel=1e-6)


READS = [HookReads, HookCatches, HookReadsMetric, HookReadsState, StepReads, StepReadsState]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, "layers") for kind in [*READS, StepCountsLate]),
        *((kind, "records") for kind in (HookReads, HookReadsState, StepReads)),
    ],
)
def test_a_rule_that_reads_records_withdraws_epsilon(fit, kind, engine):
    with pytest.raises(VoidedRunError, match=r"gave no gradient|depend on self\.latest"):
        fit(kind(), engine)


def test_nothing_is_public_where_nobody_looks_at_state(fit):
    with pytest.raises(VoidedRunError, match="gave no gradient"):
        fit(HookCounts(), "layers", checks=Checks(comparisons=False))


def test_the_module_is_as_before_when_its_rule_has_been_asked(fit):
    class Counts(HookCounts):
        asked = 0

        def on_train_batch_start(self, batch, batch_idx):
            self.asked += 1
            return super().on_train_batch_start(batch, batch_idx)

    model = Counts()
    fit(model, "layers")
    assert model.asked == AT + 1
    assert type(model.trainer) is L.Trainer
