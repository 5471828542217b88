"""A batch that gets no answer, or a wrong one, ends the run: void, but by a rule that reads no record."""

from __future__ import annotations

import math
import re
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_dp import Checks, Diff2, FullBatch
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.report.__main__ import main as report_command
from tests.zoo import Classifier, flat, mlp, private

CURE = "zero records whose gradients are not finite.*don't skip batches"
SKIPS = f"Skips gave no gradient.*{CURE}"
UNCHECKED = Checks(dry_run=False, comparisons=False)


class Skips(Classifier):
    """Does something else in one batch, automatically or by hand."""

    def __init__(self, way: Any = None, at: int = 3, by_hand: bool | None = None) -> None:
        super().__init__(mlp())
        self.way, self.at, self.steps = way, at, by_hand
        self.automatic_optimization = by_hand is None

    def loss(self, batch: Any) -> Any:
        return super().training_step(batch, 0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return self.way(self, batch, loss) if batch_idx == self.at else loss
        if batch_idx != self.at:
            self.manual_backward(loss)
        if batch_idx != self.at or self.steps:
            self.optimizers().step()
        return None


class Early(Skips):
    """Steps before the last chunk."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class Second(Skips):
    """Every second pass of DIFF2 is at the point before."""

    passes = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.passes += 1
        loss = self.loss(batch)
        return self.way(self, batch, loss) if self.passes == 3 else loss


class Floods(Skips):
    """Flooding from some step on, at a level that synthetic records may never come to."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        return (loss - 1e-3).abs() + 1e-3 if self.global_step >= self.at else loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        return self.optimizers().step()


def returns_none(model: Any, batch: Any, loss: Any) -> None:
    return None


def returns_no_loss(model: Any, batch: Any, loss: Any) -> dict[str, Any]:
    return {"loss": None, "rows": 3}


def detaches(model: Any, batch: Any, loss: Any) -> Any:
    return loss.detach()


def returns_another(model: Any, batch: Any, loss: Any) -> Any:
    return torch.zeros((), requires_grad=True)


def drops_a_row(model: Any, batch: Any, loss: Any) -> Any:
    return model.loss((batch[0][1:], batch[1][1:]))


def is_of_no_record(model: Any, batch: Any, loss: Any) -> Any:
    """For the eye of DistributedDataParallel: of all weights, and of no record."""
    return sum(param.sum() for param in model.parameters()) * 0.0


def void(charged: int) -> dict[str, Any]:
    return {"charged": charged, "released": charged - 1, "voids": True, "gradient_left": True}


LAYERS, ROWS = {"engine": "layers"}, "more or fewer rows than the batch has records"
DIFFERENCES = {"estimator": Diff2(restart_every=5)}
MIXED, MEAN = "abs", "abs.*mean over the records"
CASES: dict[str, tuple[Any, str, dict[str, Any], dict[str, Any]]] = {
    **{
        way.__name__: (lambda way=way: Skips(way), SKIPS, LAYERS, void(4))
        for way in (returns_none, returns_no_loss, detaches, returns_another)
    },
    "returns none, hooks": (lambda: Skips(returns_none), SKIPS, {"engine": "hooks"}, void(4)),
    # Also where the optimizer does not step: that it did not would tell of the records.
    "by hand": (lambda: Skips(by_hand=True), CURE, {}, void(4)),
    "by hand, no step": (lambda: Skips(by_hand=False), CURE, {}, void(4)),
    "the last, no step": (lambda: Skips(at=9, by_hand=False), CURE, {}, void(10)),
    "early": (
        lambda: Early(by_hand=True),
        "before all chunks of the batch",
        {"sampling": FullBatch()},
        void(1),
    ),
    **{
        f"second pass {way.__name__}": (lambda way=way: Second(way), CURE, DIFFERENCES, void(2))
        for way in (returns_none, returns_no_loss, detaches)
    },
    "a row dropped": (lambda: Skips(drops_a_row, 2), ROWS, LAYERS, void(3)),
    "no record": (lambda: Skips(is_of_no_record), r"net\.0", LAYERS, void(4)),
    **{
        f"flooded {at}, {hand}, {engine}": (
            lambda at=at, hand=hand: Floods(at=at, by_hand=hand),
            MEAN if at else MIXED,
            {"engine": engine},
            void(4) if at else {"charged": 1, "gradient_left": True},
        )
        for at in (0, 3)
        for hand in (None, True)
        for engine in ("auto", "hooks")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_without_an_answer_of_its_records_ends_the_run(name, ends):
    make, match, privacy, expected = CASES[name]
    ends(make(), match, privacy={"checks": UNCHECKED, **privacy}, **expected)


def test_an_empty_batch_is_a_step_of_noise_alone(blobs, fit):
    class SkipsStandIns(Skips):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) if self.trainer.train_dataloader.current.size else None

    model, privacy = SkipsStandIns(), private()
    fit(model, privacy, DataLoader(blobs, batch_size=1), max_steps=30)
    assert privacy.steps == 30 and math.isfinite(privacy.epsilon)
    assert not torch.equal(flat(model), flat(Skips()))


def test_an_error_that_is_caught_ends_the_run_at_the_next_batch(fit):
    class Catches(Skips):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            try:
                super().training_step(batch, batch_idx)
            except VoidedRunError:
                self.then = nn.utils.parameters_to_vector(self.parameters()).detach().clone()

    model, privacy = Catches(by_hand=True), private()
    with pytest.raises(VoidedRunError):
        fit(model, privacy, max_epochs=1)
    assert torch.equal(flat(model), model.then)
    assert privacy.steps == 4


@pytest.mark.parametrize("after", [2, 3])  # as a pass ends; in the last one of the fit
def test_a_record_that_is_named_twice_during_fit_voids_the_run(after, blobs, fit):
    class Resamples(Skips):
        """Shows hard examples more often after some steps."""

        def on_train_batch_end(self, *unused: Any) -> None:
            if self.global_step == after:
                subset.indices = [0, *range(39)]

    subset, privacy = Subset(blobs, range(40)), private(checks=Checks())
    with pytest.raises(VoidedRunError, match=r"changed during fit\. Index 0 of .* 2 times"):
        fit(Resamples(at=-1), privacy, DataLoader(subset, 20), max_steps=4)


# -- what is left of a void run ------------------------------------------------------------------


@pytest.fixture
def voided(fit, tmp_path):
    """A run voided at its ninth step, checkpoints every fourth, and one asked for on the way out."""
    model, privacy = Skips(returns_none, 8), private()
    folder = tmp_path / "checkpoints"
    saving = [
        ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, save_on_exception=True),
        OnExceptionCheckpoint(folder),
    ]
    with pytest.raises(VoidedRunError, match=CURE):
        fit(model, privacy, callbacks=saving, max_epochs=1, enable_checkpointing=True)
    return model, privacy, sorted(folder.glob("*.ckpt"))


def test_nothing_is_saved_after_it_and_the_report_command_says_it(voided, tmp_path, capsys):
    model, privacy, checkpoints = voided
    assert [path.name for path in checkpoints] == ["epoch=0-step=4.ckpt", "epoch=0-step=8.ckpt"]
    for report in tmp_path.rglob("privacy_report-*.json"):
        assert "Voided" not in report.read_text()
    with pytest.raises(VoidedRunError, match=CURE):
        model.trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert not (tmp_path / "later.ckpt").exists()
    assert privacy.epsilon == privacy.epsilon_at(1e-3) == math.inf
    assert re.match(r"VOIDED, NOT PRIVATE \(Skips gave no gradient", str(privacy.report()))
    assert not privacy.report().private

    (journal,) = tmp_path.rglob("*.journal")
    for file in ([str(checkpoints[0])], [str(journal), "--delta", "1e-5"]):
        capsys.readouterr()
        assert report_command(file) == 1
        said = capsys.readouterr().out
        assert "ε = inf" in said
        assert re.search("PROBLEM: .*VOIDED.*Skips gave no gradient", said)


def test_it_fits_no_more_and_a_new_callback_does(voided, fit):
    model, privacy, checkpoints = voided
    again = private()
    for path in checkpoints:
        with pytest.raises(VoidedRunError, match="Skips gave no gradient"):
            fit(Skips(), again, ckpt_path=path, max_epochs=2)
    assert again.steps == 0 or again.epsilon == math.inf

    with pytest.raises(VoidedRunError):
        fit(model, privacy, max_epochs=1)
    model.at, new = -1, private()
    with pytest.warns(PrivacyWarning, match="trained before under another privacy ledger"):
        fit(model, new, max_steps=2)
    assert new.steps == 2
    assert math.isfinite(new.epsilon)
    assert not any(part._forward_hooks for part in model.modules())


# -- public stops --------------------------------------------------------------------------------

AT = 3


class Stops(Classifier):
    """Stops in a hook, or returns no loss, by a rule of one's own."""

    def __init__(self, hook: Any = None, step: Any = None) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 3))
        self.hook, self.step, self.latest, self.asked = hook, step, 0.0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return None if self.step and self.step(self, batch, batch_idx, loss) else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        self.asked += 1
        return -1 if self.hook and self.hook(self, batch, batch_idx, None) else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.latest = float(outputs["loss"])


def counts(model: Any, batch: Any, batch_idx: int, loss: Any) -> bool:
    return batch_idx == AT


def reads(model: Any, batch: Any, batch_idx: int, loss: Any) -> bool:
    return batch_idx == AT and bool(batch[0].isfinite().all())


def catches(model: Any, batch: Any, batch_idx: int, loss: Any) -> bool:
    """Whatever goes wrong with the batch, it stops."""
    try:
        return batch_idx == AT and float(batch[0].sum()) < 1e9
    except Exception:
        return True


def reads_a_metric(model: Any, batch: Any, batch_idx: int, loss: Any) -> bool:
    return batch_idx == AT and bool(model.trainer.callback_metrics["loss"] > 0)


def reads_state(model: Any, batch: Any, batch_idx: int, loss: Any) -> bool:
    """A number that the latest batch has left, which no comparison has seen in this form."""
    return batch_idx == AT and model.latest < 50


def reads_the_loss(model: Any, batch: Any, batch_idx: int, loss: Any) -> bool:
    return batch_idx == AT and loss.item() > -1


@pytest.fixture
def stopped(fit, tmp_path):
    def run(model: Any, engine: str, ckpt_path: Any = None, steps: int = 6, **settings: Any) -> Any:
        settings = {"noise_multiplier": 1.0, "target_delta": 1e-5, "engine": engine, **settings}
        privacy = DifferentialPrivacy(**settings)
        saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=AT)
        on = {"max_steps": steps, "max_epochs": -1, "enable_checkpointing": True}
        fit(model, privacy, ckpt_path=ckpt_path, callbacks=[saving], **on)
        return privacy

    return run


IN_HOOK, IN_STEP = "on_train_batch_start returned -1", "training_step returned None"


class StopsFirst(Stops):
    """Before it has the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.global_step == AT else super().training_step(batch, batch_idx)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("make", "engine"),
    [
        (StopsFirst, "layers"),
        (lambda: Stops(counts), "layers"),
        (lambda: Stops(counts), "records"),
        (lambda: Stops(None, counts), "records"),
        (StopsFirst, "records"),
    ],
)
def test_a_rule_of_counters_ends_the_run_and_keeps_epsilon(
    stopped, charges, tmp_path, make, engine
):
    model = make()
    privacy = stopped(model, engine)
    report, event = privacy.report(), PoissonGaussian(1.0, 0.1)
    said = f"{IN_HOOK if model.hook else IN_STEP} at batch_idx={AT}, by a rule that reads no record"
    assert report.stop_reason == said
    expected = PLDAccountant().epsilon([(event, AT + 1)], 1e-5)  # the batch of the stop is charged
    assert report.epsilon == pytest.approx(expected, rel=1e-6)
    assert len(charges()) == AT + 1
    # The module is as before when its rule has been asked.
    assert model.asked == AT + 1 and type(model.trainer) is L.Trainer

    resumed = stopped(Stops(), engine, tmp_path / f"step={AT}.ckpt", AT + 2)
    expected = PLDAccountant().epsilon([(event, AT + 3)], 1e-5)
    assert resumed.epsilon == pytest.approx(expected, rel=1e-6)


HOOK_READS = [reads, catches, reads_a_metric, reads_state]


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("hook", "step", "engine", "options"),
    [
        # Nothing is public where nobody looks at state.
        (counts, None, "layers", {"checks": Checks(comparisons=False)}),
        *((hook, None, "layers", {}) for hook in HOOK_READS),
        *((None, step, "layers", {}) for step in (reads_the_loss, reads_state)),
        *((hook, None, "records", {}) for hook in (reads_state, reads)),
        (None, counts, "layers", {}),  # when it has the loss
        (None, reads_the_loss, "records", {}),
    ],
)
def test_a_rule_that_reads_records_withdraws_epsilon(stopped, hook, step, engine, options):
    with pytest.raises(VoidedRunError, match=r"gave no gradient|depend on self\.latest"):
        stopped(Stops(hook, step), engine, **options)
