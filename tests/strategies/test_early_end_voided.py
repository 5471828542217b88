"""A chunk that has records and gets no answer, or a wrong one, ends the run and withdraws its claim."""

from __future__ import annotations

import math
import re

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_dp import Checks, Diff2, FullBatch
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.gradients import CoupledLossError
from lightning_dp.report.__main__ import main as report_command
from tests.zoo import Classifier, private

CURE = r"zero records whose gradients are not finite.*don't skip batches"


def returns_none(model, loss):
    return None


def returns_a_dictionary_without_loss(model, loss):
    return {"loss": None, "rows": 3}


def detaches_the_loss(model, loss):
    return loss.detach()


def returns_another_loss(model, loss):
    return torch.zeros((), requires_grad=True)


WAYS = [
    returns_none,
    returns_a_dictionary_without_loss,
    detaches_the_loss,
    returns_another_loss,
]


@pytest.fixture
def skipping(classifier):
    """Gives no answer for one batch."""

    class Skipping(classifier):
        way, at = staticmethod(returns_none), 3

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return self.way(self, loss) if batch_idx == self.at else loss

    return Skipping


@pytest.fixture
def skipping_by_hand(classifier):
    """The same with manual optimization."""

    class ByHand(classifier):
        at, steps = 3, True

        def __init__(self, *args):
            super().__init__(*args)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer, loss = self.optimizers(), super().training_step(batch, batch_idx)
            if batch_idx != self.at:
                self.manual_backward(loss)
            if batch_idx != self.at or self.steps:
                optimizer.step()

    return ByHand


@pytest.mark.parametrize(
    ("way", "engine"), [*((way, "layers") for way in WAYS), (returns_none, "hooks")]
)
def test_a_chunk_without_an_answer_is_never_released(
    way, engine, skipping, mlp, loader, make_trainer, weights, at_each_step
):
    model, seen = skipping(mlp()), []
    model.way = lambda *args: way(*args)
    watch = at_each_step(lambda trainer, module: seen.append(weights(module)))
    privacy = private(engine=engine)

    with pytest.raises(VoidedRunError, match=f"Skipping gave no gradient.*{CURE}"):
        make_trainer(max_epochs=1, callbacks=[privacy, watch]).fit(model, loader)

    assert len(seen) == 3
    assert torch.equal(weights(model), seen[-1])
    assert privacy.steps == 4
    assert privacy.epsilon == math.inf


@pytest.mark.parametrize(("at", "steps"), [(3, True), (3, False), (9, False)])
def test_manual_optimization_without_a_backward_pass(at, steps, skipping_by_hand, mlp, fit):
    """Also where the optimizer does not step: that it did not would tell of the records."""
    model, privacy = skipping_by_hand(mlp()), private()
    model.steps, model.at = steps, at

    with pytest.raises(VoidedRunError, match=CURE):
        fit(model, privacy, max_epochs=1)

    assert privacy.epsilon == math.inf


def test_a_step_before_the_last_chunk(classifier, mlp, fit):
    class Early(classifier):
        def __init__(self, *args):
            super().__init__(*args)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    privacy = private(sampling=FullBatch())

    with pytest.raises(VoidedRunError, match=r"before all chunks of the batch"):
        fit(Early(mlp()), privacy, max_epochs=1)


@pytest.mark.parametrize("way", WAYS[:3])
def test_a_second_pass_without_an_answer(way, classifier, mlp, fit):
    """Every second pass is at the point before."""

    class Second(classifier):
        passes = 0

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.passes += 1
            return way(self, loss) if self.passes == 3 else loss

    privacy = private(estimator=Diff2(restart_every=5))

    with pytest.raises(VoidedRunError, match=CURE):
        fit(Second(mlp()), privacy, max_epochs=1)

    assert privacy.steps == 2


def test_rows_that_are_no_records_are_found_at_any_batch(classifier, mlp, fit):
    class DropsOne(classifier):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return super().training_step((x[1:], y[1:]) if batch_idx == 2 else batch, batch_idx)

    privacy = private(engine="layers")

    with pytest.raises(VoidedRunError, match="more or fewer rows than the batch has records"):
        fit(DropsOne(mlp()), privacy, max_epochs=1)

    assert privacy.epsilon == math.inf


def test_what_an_engine_refuses_at_a_later_batch_withdraws_what_was_released(classifier, mlp, fit):
    """A loss for the eye of DistributedDataParallel: of all weights, and of no record."""

    class Zero(classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                return sum(param.sum() for param in self.parameters()) * 0.0
            return super().training_step(batch, batch_idx)

    privacy = private(engine="layers")

    with pytest.raises(VoidedRunError, match=r"net\.0"):
        fit(Zero(mlp()), privacy, max_epochs=1)

    assert privacy.epsilon == math.inf


def test_an_empty_batch_is_a_step_of_noise_alone(classifier, mlp, blobs, fit, weights):
    class SkipsStandIns(classifier):
        def training_step(self, batch, batch_idx):
            if not self.trainer.train_dataloader.current.size:
                return None
            return super().training_step(batch, batch_idx)

    model, privacy = SkipsStandIns(mlp()), private()
    before = weights(model)

    fit(model, privacy, DataLoader(blobs, batch_size=1), max_steps=30)

    assert privacy.steps == 30
    assert math.isfinite(privacy.epsilon)
    assert not torch.equal(weights(model), before)


# -- what is left of a voided run --------------------------------------------------------------


@pytest.fixture
def voided(skipping, mlp, loader, make_trainer, tmp_path):
    """A run voided at its ninth step, checkpoints every fourth, and one asked for on the way out."""
    model, privacy = skipping(mlp()), private()
    model.at = 8
    folder = tmp_path / "checkpoints"
    keeping = [
        ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, save_on_exception=True),
        OnExceptionCheckpoint(folder),
    ]
    trainer = make_trainer(max_epochs=1, enable_checkpointing=True, callbacks=[privacy, *keeping])
    with pytest.raises(VoidedRunError, match=CURE):
        trainer.fit(model, loader)
    return trainer, model, privacy, sorted(folder.glob("*.ckpt"))


def test_nothing_is_saved_after_it_and_the_report_command_says_it(voided, tmp_path, capsys):
    trainer, _, privacy, checkpoints = voided

    assert [path.name for path in checkpoints] == ["epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt"]
    for report in tmp_path.rglob("privacy_report-*.json"):
        assert "Voided" not in report.read_text()
    with pytest.raises(VoidedRunError, match=CURE):
        trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert not (tmp_path / "later.ckpt").exists()
    assert privacy.epsilon == privacy.epsilon_at(1e-3) == math.inf
    assert re.match(r"VOIDED, NOT PRIVATE \(Skipping gave no gradient", str(privacy.report()))
    assert not privacy.report().private

    (journal,) = tmp_path.rglob("*.journal")
    for file in ([str(checkpoints[0])], [str(journal), "--delta", "1e-5"]):
        capsys.readouterr()
        assert report_command(file) == 1
        said = capsys.readouterr().out
        assert "ε = inf" in said
        assert re.search("PROBLEM: .*VOIDED.*Skipping gave no gradient", said)


def test_it_fits_no_more_and_a_new_callback_does(voided, classifier, mlp, fit, tmp_path):
    _, model, privacy, checkpoints = voided
    again = private()
    for path in checkpoints:
        with pytest.raises(VoidedRunError, match="Skipping gave no gradient"):
            fit(classifier(mlp()), again, ckpt_path=path, max_epochs=2)
    assert again.steps == 0 or again.epsilon == math.inf

    with pytest.raises(VoidedRunError):
        fit(model, privacy, max_epochs=1)
    model.at, new = -1, private()
    with pytest.warns(PrivacyWarning, match="trained before under another privacy ledger"):
        fit(model, new, max_steps=2)
    assert new.steps == 2
    assert math.isfinite(new.epsilon)
    assert not any(part._forward_hooks for part in model.modules())


def test_an_error_that_is_caught_ends_the_run_at_the_next_batch(
    skipping_by_hand, mlp, fit, weights
):
    class Catches(skipping_by_hand):
        def training_step(self, batch, batch_idx):
            try:
                super().training_step(batch, batch_idx)
            except VoidedRunError:
                self.then = nn.utils.parameters_to_vector(self.parameters()).detach().clone()

    model, privacy = Catches(mlp()), private()

    with pytest.raises(VoidedRunError):
        fit(model, privacy, max_epochs=1)

    assert torch.equal(weights(model), model.then)
    assert privacy.steps == 4


# -- a loss that mixes records by more than sums: refused before the first release, void after it


class Flooded(L.LightningModule):
    """Flooding from some step on, at a level that synthetic records may never come to."""

    def __init__(self, first: int, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.first, self.automatic_optimization = first, not by_hand

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if self.trainer.global_step >= self.first:
            loss = (loss - 1e-3).abs() + 1e-3
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_flooded(fit, first: int, by_hand: bool, engine: str) -> None:
    privacy = private(engine=engine)
    records = TensorDataset(torch.rand(60, 3), torch.arange(60) % 2)
    fit(Flooded(first, by_hand), privacy, DataLoader(records, batch_size=20), max_epochs=2)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("engine", ["auto", "hooks"])
def test_it_is_refused_at_the_first_batch(engine, by_hand, fit):
    with pytest.raises(CoupledLossError, match="abs"):
        fit_flooded(fit, 0, by_hand, engine)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("engine", ["auto", "hooks"])
def test_after_a_release_the_run_is_void(engine, by_hand, fit):
    with pytest.raises(VoidedRunError, match=r"abs.*mean over the records"):
        fit_flooded(fit, 3, by_hand, engine)


# -- data sets whose records change or are read together during a fit ----------------------------


class Resamples(Classifier):
    """Shows hard examples more often after some steps."""

    def __init__(self, subset, after):
        super().__init__(nn.Linear(3, 2))
        self.subset, self.after = subset, after

    def on_train_batch_end(self, *unused):
        if self.global_step == self.after:
            self.subset.indices = [0, *range(39)]


@pytest.mark.parametrize("after", [2, 3])  # as a pass ends; in the last one of the fit
def test_a_record_that_is_named_twice_during_fit_voids_the_run(fit, after):
    subset = Subset(TensorDataset(torch.randn(40, 3), torch.arange(40) % 2), range(40))
    privacy = private(checks=Checks())
    with pytest.raises(VoidedRunError, match=r"changed during fit\. Index 0 of .* 2 times"):
        fit(Resamples(subset, after), privacy, DataLoader(subset, 20), max_steps=4)
