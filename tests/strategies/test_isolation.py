"""Comparisons in a fit: in every kind of step, without a trace; what they name, count and report."""

from __future__ import annotations

import contextlib
import random
import re
import sys

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp import (
    AdaptiveQuantile,
    Automatic,
    Checks,
    CubicNewton,
    Diff2,
    FixedOrder,
    FullBatch,
    PerGroup,
    Poisson,
    Storm,
    TruncatedPoisson,
)
from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.isolation.check import Check, Schedule
from lightning_dp.isolation.replay import HOOKS_OF_STEP
from lightning_dp.sampling.loader import Chunk
from lightning_dp.strategies import isolation
from tests.zoo import Classifier, mlp

N, WIDTH, CLASSES = 240, 6, 3


class Base(Classifier):
    """A classifier of which a case changes ``loss``."""

    def __init__(self):
        super().__init__(mlp(), lambda params: torch.optim.SGD(params, lr=0.05))

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def loss(self, x, y):
        return F.cross_entropy(self.net(x), y)


class Centred(Base):
    def loss(self, x, y):
        logits = self.net(x)
        return F.cross_entropy(logits - logits.mean(0), y)


class ByHand(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        optimizer.step()


class CentredByHand(ByHand):
    loss = Centred.loss


class ClippedByHand(ByHand):
    """Write to gradients, of which there are none before the release."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()


class CentredClippedByHand(ClippedByHand):
    loss = Centred.loss


class WithCritic(ByHand):
    """Two optimizers, of which one never sees a record."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        private, public = self.optimizers()
        for optimizer, loss in (
            (public, self.critic(torch.ones(4, 2)).mean()),
            (private, self.loss(*batch)),
        ):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        parts = (self.net.parameters(), self.critic.parameters())
        return [torch.optim.SGD(part, lr=0.05) for part in parts]


class CentredWithCritic(WithCritic):
    loss = Centred.loss


def mixes(samples):
    x, y = default_collate(samples)
    return x - x.mean(0), y


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (N,), generator=generator))


@pytest.fixture
def fit(make_trainer):
    def run(model, steps=3, privacy=None, collate=None, records=None, **trainer):
        settings = {"noise_multiplier": 1.0, "target_delta": 1e-5, "seed": 0}
        settings |= {"checks": Checks(dry_run=False, loss_graph=False)}
        callback = DifferentialPrivacy(**settings | (privacy or {}))
        arguments = {"max_steps": steps, "max_epochs": -1} | trainer
        trainer = make_trainer(callbacks=[callback, *arguments.pop("callbacks", [])], **arguments)
        run.trainer = trainer
        records = data() if records is None else records
        trainer.fit(model, DataLoader(records, batch_size=16, collate_fn=collate))
        return trainer.strategy.private_run

    return run


# -- kinds of steps --------------------------------------------------------------------------------

GROUPS = PerGroup({"*.weight": 0.5, "*.bias": 0.2})
KINDS = {
    "layers": (Base, Centred, {"engine": "layers"}, {}),
    "hooks": (Base, Centred, {"engine": "hooks"}, {}),
    "ghost": (Base, Centred, {"engine": "ghost"}, {}),
    "accumulated": (Base, Centred, {}, {"accumulate_grad_batches": 3}),
    "full batch": (Base, Centred, {"sampling": FullBatch()}, {}),
    "diff2": (Base, Centred, {"estimator": Diff2(3, 1.0, 1.0)}, {}),
    "storm": (Base, Centred, {"estimator": Storm(0.5, 1.0, 1.0)}, {}),
    "automatic": (Base, Centred, {"clipping": Automatic()}, {}),
    "groups": (Base, Centred, {"clipping": GROUPS}, {}),
    "groups, ghost": (Base, Centred, {"clipping": GROUPS, "engine": "ghost"}, {}),
    "adaptive": (Base, Centred, {"clipping": AdaptiveQuantile()}, {}),
    "by hand": (ByHand, CentredByHand, {}, {}),
    "by hand, clipped": (ClippedByHand, CentredClippedByHand, {}, {}),
    "cubic newton": (Base, Base, {"estimator": CubicNewton(1.0, 1.0, 1)}, {}),
    "coordinates": (Base, Centred, {"estimator": CubicNewton(1.0, 1.0, 1, keep_fraction=0.5)}, {}),
    "two optimizers": (WithCritic, CentredWithCritic, {"private_optimizer": 0}, {}),
}


@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("kind", "couples"),
    [(k, c) for k in KINDS for c in (False, True) if (k, c) != ("cubic newton", True)],
)
def test_all_kinds_of_steps_are_compared(fit, kind, couples):
    ordinary, coupled, privacy, trainer = KINDS[kind]
    expected = pytest.raises(VoidedRunError, match=r"more than 0\.05 C")
    with expected if couples else contextlib.nullcontext():
        run = fit((coupled if couples else ordinary)(), privacy=privacy, **trainer)
        assert run.spot_checks == run.steps >= 2
        assert run.not_compared == {}


def test_records_that_run_alone_need_no_comparison(fit):
    run = fit(
        Base(), privacy={"engine": "one_by_one", "checks": Checks(loss_graph=False)}, collate=mixes
    )

    assert run.spot_checks == 0
    assert run.isolation == "by construction: each record runs alone"


# -- words and counts ------------------------------------------------------------------------------


class Penalised(Base):
    """A penalty on the loss's gradient, which no other engine sees for each record."""

    def loss(self, x, y):
        x = x.clone().requires_grad_()
        loss = super().loss(x, y)
        return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()


@torch.library.custom_op("lightning_dp_tests::less_the_mean", mutates_args=())
def less_the_mean(x: torch.Tensor) -> torch.Tensor:
    """Return a copy; its rule for many records at once is wrong, and mixes them."""
    return x.clone()


less_the_mean.register_fake(torch.empty_like)
less_the_mean.register_autograd(lambda context, gradient: gradient.clone())


@less_the_mean.register_vmap
def _of_many(info, in_dims, x):
    rows = x.movedim(in_dims[0], 0)
    return rows - 0.9 * rows.mean(0, keepdim=True), 0


class OwnOperator(Base):
    def loss(self, x, y):
        return F.cross_entropy(less_the_mean(self.net(x)), y)


def test_the_dry_run_compares_records_that_run_alone_in_one_pass(fit):
    with pytest.raises(MisconfigurationException, match="OwnOperator couples the records"):
        fit(OwnOperator(), privacy={"engine": "records", "checks": Checks()})


def test_without_a_dry_run_a_step_compares_records_that_run_alone(fit):
    without = {"engine": "records", "checks": Checks(dry_run=False)}
    with pytest.raises(VoidedRunError, match="OwnOperator: when some records of a batch"):
        fit(OwnOperator(), privacy=without)
    fit(Base(), privacy=without)


class Cancelled(Base):
    def loss(self, x, y):
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        return (losses - losses.mean()).mean()


@pytest.mark.parametrize("engine", ["layers", "ghost", "hooks", "records", "one_by_one"])
def test_a_loss_that_gives_no_record_a_gradient_warns(engine, fit):
    with pytest.warns(
        PrivacyWarning, match=r"The loss of Cancelled gives .* no gradient.*noise alone"
    ):
        fit(Cancelled(), steps=1, privacy={"engine": engine, "checks": Checks()})


class CancelledByHand(Cancelled):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        optimizer.zero_grad()


def test_a_loss_without_a_gradient_is_tried_without_a_step_of_the_real_optimizer(fit):
    with pytest.warns(PrivacyWarning, match=r"The loss of CancelledByHand gives .* no gradient"):
        fit(CancelledByHand(), steps=1, privacy={"checks": Checks()})


def test_records_one_after_the_other_are_announced_with_their_cost(fit):
    message = r"^Each record runs alone, .* other \(4 synthetic ones took ([\d.]+) times as long as"
    with pytest.warns(PrivacyWarning, match=message) as caught:
        fit(Penalised(), privacy={"checks": Checks(comparisons=False)})
    said = [each for each in map(str, (w.message for w in caught)) if each.startswith("Each")]
    assert len(said) == 1 and float(re.match(message, said[0])[1]) > 1.5


class NotesReasons(Penalised):
    def on_train_end(self):
        self.reasons = self.trainer.strategy._fit.step.engine.choice.reasons


@pytest.mark.parametrize("dry", [True, False])
def test_lines_of_code_are_named_for_synthetic_samples_alone(fit, dry):
    checks, model = Checks(dry_run=dry, comparisons=False), NotesReasons()
    with pytest.warns(PrivacyWarning) if dry else contextlib.nullcontext():
        fit(model, privacy={"engine": "records", "checks": checks})

    (reason,) = model.reasons
    assert ("line " in reason.text) is dry


class DrawsByRecord(Base):
    """Draw as many random numbers as the records say."""

    def loss(self, x, y):
        for _ in range(int(1000 * x.sum()) % 97):
            random.random()
        return super().loss(x, y)


def test_what_was_not_compared_is_counted_with_its_reason(fit):
    run = fit(DrawsByRecord())

    assert run.spot_checks == 3
    assert 1 <= sum(run.not_compared.values()) <= 3
    assert all("random numbers" in reason for reason in run.not_compared)


class Writes(L.Callback):
    """Keeps something in a buffer, where no comparison runs it."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.scale.fill_(float(batch[0].mean()))


class WithBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))


def test_a_buffer_that_a_callback_writes_is_saved_only_if_it_is_declared(fit, tmp_path):
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1)
    arguments = {"callbacks": [Writes(), save], "enable_checkpointing": True}
    with pytest.raises(MisconfigurationException, match=r"\['scale'\].*public_state="):
        fit(WithBuffer(), **arguments)
    assert not list(tmp_path.rglob("*.ckpt"))

    run = fit(
        WithBuffer(),
        privacy={"checks": Checks(dry_run=False, loss_graph=False, public_state=["scale"])},
        **arguments,
    )
    assert "scale (declared, not checked)" in " ".join(run.not_covered)
    assert list(tmp_path.rglob("*.ckpt"))


class Latest(Base):
    """Keeps what each batch overwrites: in every world of a step it is that of its own batch."""

    latest, best, box = None, 0.0, 0.2

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.latest = batch[0][0].clone()

    def writes(self):
        with torch.no_grad():
            self.net[0].weight[0] = self.latest

    def clamps(self):
        with torch.no_grad():
            for param in self.parameters():
                param.clamp_(-self.box, self.box)

    def follows(self):
        if float(self.latest.sum()) > self.best:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
        self.best = float(self.latest.sum())


class CallbackIntoWeights(L.Callback):
    """Writes a record into a trained weight: no comparison runs it, so none clears it."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with torch.no_grad():
            module.net[0].weight[0] = batch[0][0]


def acting(hook, act, **more):
    """A model that does it in a hook, besides what it keeps."""

    def run(self, *arguments):
        if hook == "on_train_batch_end":
            Latest.on_train_batch_end(self, *arguments)
        getattr(self, act)()

    run.__name__ = hook  # which a message names
    return type("Acts", (Latest,), {hook: run, **more})


WRITTEN = r"weights \['net.0.weight'\] were written to"
INTO_WEIGHTS = acting("on_train_epoch_end", "writes")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "engine", "said"),
    [
        (INTO_WEIGHTS, "layers", WRITTEN),
        (INTO_WEIGHTS, "records", WRITTEN),
        (acting("on_train_end", "writes"), "layers", WRITTEN),
        (
            acting("on_train_epoch_end", "follows"),
            "records",
            r"on_train_epoch_end\(\) sets lr .* by self.latest",
        ),
    ],
)
def test_what_the_latest_batch_left_is_in_no_checkpoint(fit, tmp_path, kind, engine, said):
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    arguments = {"callbacks": [save], "enable_checkpointing": True}
    arguments |= {"limit_train_batches": 3, "max_steps": -1, "max_epochs": 1}
    with pytest.raises((MisconfigurationException, VoidedRunError), match=said):
        fit(kind(), privacy={"engine": engine}, **arguments)
        fit.trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert not (tmp_path / "last.ckpt").exists()


class ScalesByMetric(Base):
    """Weighs the losses of an epoch by their mean in the last one."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()

    def loss(self, x, y):
        loss = super().loss(x, y)
        self.mean.update(loss.detach())
        return loss * self.scale

    def on_train_epoch_end(self):
        self.scale = float(self.mean.compute())
        self.mean.reset()


@pytest.mark.parametrize("engine", ["layers", "records", "one_by_one"])
def test_what_metrics_count_of_records_weighs_none(fit, engine):
    with pytest.raises(VoidedRunError, match=r"depend on self\.scale"):
        fit(ScalesByMetric(), 9, {"engine": engine}, limit_train_batches=2)


BY_BATCH = "validation_step, or a hook of its batches, sets lr of an optimizer, and what earlier"


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        *((f"on_validation_{at}", r"\(\) sets lr .* by self.latest")
          for at in ("start", "epoch_start", "epoch_end", "end")),
        *((hook, BY_BATCH)
          for hook in ("validation_step", "on_validation_batch_start", "on_validation_batch_end")),
    ],
)  # fmt: skip
def test_nothing_in_validation_sets_a_rate_by_what_the_latest_batch_left(fit, hook, said):
    rows = TensorDataset(torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64))
    kind = acting(hook, "follows", val_dataloader=lambda self: DataLoader(rows))
    with pytest.raises(VoidedRunError, match=said):
        fit(kind(), 9, num_sanity_val_steps=0, val_check_interval=1)


def test_no_batch_of_validation_ends_a_fit_in_which_records_are_kept(fit):
    rows = TensorDataset(torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64))
    more = {
        "ends": lambda self: setattr(self.trainer, "should_stop", self.trainer.global_step > 5),
        "val_dataloader": lambda self: DataLoader(rows),
    }
    with pytest.raises(VoidedRunError, match="or a hook of its batches, sets should_stop"):
        kind = acting("on_validation_batch_end", "ends", **more)
        fit(kind(), 9, num_sanity_val_steps=0, val_check_interval=1)


class InBackward(WithBuffer):
    """Keeps what a hook of the backward pass sees of the records."""

    def __init__(self, reads):
        super().__init__()
        self.reads, self.seen = reads, 0.0
        self.net[1].register_full_backward_hook(self.keep)

    def keep(self, module, given, gradients):
        seen = gradients[0].detach().abs().mean()
        self.seen = seen if self.reads else 0.0
        self.scale.copy_(0.0 if self.reads else seen)

    def loss(self, x, y):
        return super().loss(x, y) * (1 + 100 * self.seen)


@pytest.mark.parametrize(("reads", "said"), [(False, "scale"), (True, "self.seen")])
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_the_backward_pass_keeps_is_compared(fit, reads, said, dry_run):
    checks = {"checks": Checks(dry_run=dry_run, loss_graph=False)}
    with pytest.raises((MisconfigurationException, VoidedRunError), match=said):
        fit(InBackward(reads), 3, {"engine": "layers", **checks})


class InHook(Base):
    """Keeps the loss of a batch, or what was kept of it, and lets the next step follow it."""

    seen = latest = 0.0

    def loss(self, x, y):
        loss = super().loss(x, y)
        self.latest = loss.detach().clone()
        return loss * (1 + 100 * self.seen)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def keeping(hook):
    """Return a model that keeps the loss in a hook."""

    def keep(self, *given, **named):
        getattr(InHook, hook)(self, *given, **named)
        self.seen = given[0].detach() if hook == "on_before_backward" else self.latest

    return type("Keeps", (InHook,), {hook: keep})()


@pytest.mark.parametrize("hook", HOOKS_OF_STEP)
def test_what_the_hooks_of_a_step_keep_is_compared(fit, hook):
    with pytest.raises(VoidedRunError, match=r"self\.seen"):
        fit(keeping(hook), 3, {"engine": "layers"})


class StepsByHook(InHook):
    """Sets the learning rate when the optimizer is about to step, and steps by what it is asked for."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * float(self.rate(self))
        self.optimizers().step(closure)


def test_learning_rates_of_optimizer_step_follow_no_record(fit):
    with pytest.raises((MisconfigurationException, VoidedRunError), match="optimizers' settings"):
        fit(StepsByHook(lambda model: model.latest), 3, {"engine": "layers"})

    run = fit(StepsByHook(lambda model: 1 / (1 + model.global_step)), 3, {"engine": "layers"})
    assert (run.steps, dict(run.not_compared)) == (3, {})


class SetsTheRate(InHook):
    """Sets the learning rate by what an earlier step has left."""

    def on_train_batch_start(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + float(self.latest))


def test_learning_rates_follow_no_record_of_earlier_steps(fit):
    with pytest.raises(VoidedRunError, match=r"settings of .* depend on self\.latest"):
        fit(SetsTheRate(), 3, {"engine": "layers"})


@pytest.mark.parametrize("engine", ["layers", "records"])
def test_weights_that_a_callback_writes_are_never_cleared(fit, tmp_path, engine):
    save = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=6)
    arguments = {"callbacks": [CallbackIntoWeights(), save], "enable_checkpointing": True}
    with pytest.raises((MisconfigurationException, VoidedRunError), match=r"net.0.weight"):
        fit(Base(), 8, {"engine": engine}, **arguments)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_comparisons_that_a_change_requires_are_in_no_count(fit, monkeypatch):
    """Records may have caused them: how many there were is not to be seen."""
    made = []

    def noted(*args):
        made.append(Check(*args))
        return made[-1]

    monkeypatch.setattr(isolation, "Check", noted)
    run = fit(Base(), 8, callbacks=[CallbackIntoWeights()])
    schedule = Schedule(run.ledger.id)
    due = [step for step in range(8) if schedule.is_due(step, 0, begins_epoch=step == 0)]
    assert len(made) == 8
    assert run.spot_checks == len(due) < 8
    assert run.not_compared == {}


def test_a_comparison_lists_the_units_of_a_batch_once(fit):
    """And not once for each of its places, which takes seconds for thousands of them."""
    code, calls = Chunk.units.fget.__code__, []

    def note(frame, event, argument):
        calls.extend([event] * (event == "call" and frame.f_code is code))

    sys.setprofile(note)
    try:
        run = fit(Base(), 4)
    finally:
        sys.setprofile(None)
    assert len(calls) == run.spot_checks > 0


CLAMPED = acting("on_train_batch_end", "clamps")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        (CLAMPED, "layers"),
        (acting("on_train_epoch_end", "clamps"), "layers"),
        (acting("on_train_batch_end", "clamps", box=100.0), "layers"),  # which changes none
        (CLAMPED, "records"),
    ],
)
def test_functions_of_released_weights_are_saved_from_the_first_step_on(
    fit, tmp_path, kind, engine
):
    kinds = {"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}
    saves = [
        L.pytorch.callbacks.ModelCheckpoint(tmp_path / str(i), save_top_k=-1, **each)
        for i, each in enumerate(kinds)
    ]
    arguments = {"callbacks": saves, "enable_checkpointing": True, "limit_train_batches": 3}
    fit(kind(), privacy={"engine": engine}, max_steps=-1, max_epochs=2, **arguments)
    assert [len(list((tmp_path / str(i)).glob("*.ckpt"))) for i in range(2)] == [6, 2]


# -- faults that a comparison names ----------------------------------------------------------------


class CouplesOnce(Base):
    """Mixes the records of its first batch alone, by a counter that this batch moves."""

    calls = 0

    def loss(self, x, y):
        self.calls += 1
        logits = self.net(x)
        return F.cross_entropy(logits - logits.mean(0) * (self.calls == 1), y)


class MeanOfTheBatch(Base):
    """A transfer hook leaves what all records share; functions drop."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.mean = batch[0].mean(0)
        return batch

    def loss(self, x, y):
        return super().loss(F.dropout(x - 3 * self.mean, 0.2), y)


class Words(Base):
    """Functions drop, by the padded shape; a branch splits the records that run alone."""

    def __init__(self, splits=False):
        super().__init__()
        self.words, self.splits = nn.Embedding(9, WIDTH), splits

    def loss(self, x, y):
        is_word = (x > 0)[..., None]
        h = F.dropout(self.hidden(x) * is_word, 0.3)
        if self.splits and bool(is_word.all()):
            h = 1.0 * h
        return F.cross_entropy(self.net(h.sum(1) / is_word.sum(1)), y)

    def hidden(self, x):
        return self.words(x)


class FromTheRight(Words):
    """Attention by places that are counted from the end of the padding."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(12, WIDTH)

    def hidden(self, x):
        places = torch.arange(x.shape[1]).flip(0).expand(len(x), -1)
        h = (self.words(x) + self.places(places))[:, None]
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.3)[:, 0]


def padded(samples):
    x, y = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(x, batch_first=True), torch.stack(y)


def texts():
    lengths = [3 + i % 8 for i in range(N)]
    return [(torch.randint(1, 9, (n,)), torch.tensor(n % CLASSES)) for n in lengths]


DRY = {"checks": Checks(loss_graph=False)}
MIXES = r"first in the batch itself, made by collate_fn \(mixes\)"


@pytest.mark.parametrize(
    ("make", "privacy", "collate", "records", "said"),
    [
        # A step is compared from the state that it began with.
        (CouplesOnce, {}, None, None, r"more than 0\.05 C"),
        (Base, {"engine": "auto"}, mixes, None, MIXES),
        (Base, {"engine": "hooks"}, mixes, None, MIXES),
        # What a transfer hook leaves is seen where records run alone.
        (MeanOfTheBatch, {"engine": "records"}, None, None, r"moves by more than|mean"),
        # Places that depend on the padding.
        *(
            (FromTheRight, {"engine": engine, **DRY}, padded, texts, "moves by more than")
            for engine in ("layers", "records")
        ),
    ],
)
def test_a_comparison_names_what_mixes(fit, make, privacy, collate, records, said):
    with pytest.raises((MisconfigurationException, VoidedRunError), match=said):
        fit(make(), 12, privacy, collate, records and records())


@pytest.mark.parametrize("engine", ["layers", "records"])
def test_models_that_pad_and_drop_train(fit, engine):
    run = fit(Words(engine == "records"), 12, {"engine": engine, **DRY}, padded, texts())
    assert run.steps == 12 and run.spot_checks > 5
    assert run.isolation == "compared on synthetic samples"


# -- no trace --------------------------------------------------------------------------------------


class Busy(Base):
    """Draws numbers of all kinds, edits its batch, logs, counts, and keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(3)
        self.accuracy, self.losses, self.calls = MulticlassAccuracy(CLASSES), [], 0

    def loss(self, x, y):
        self.steps += 1
        self.calls += 1
        x *= 1 + 0.1 * torch.rand(len(x), 1) + random.random() + np.random.rand()
        logits = self.net(F.dropout(x + torch.randn(x.shape, generator=self.generator), 0.3))
        self.log("accuracy", self.accuracy(logits, y), on_step=True, on_epoch=True)
        loss = F.cross_entropy(logits, y)
        self.losses.append(loss.item())
        return loss


class Watch(L.Callback):
    """Notes weights, states of random generators and logged values after each step."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *unused):
        state = [each.tolist() for each in module.state_dict().values()]
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        drawn = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
        self.seen.append((state, logged, drawn, module.calls, list(module.losses)))


@pytest.mark.parametrize("engine", ["layers", "hooks"])
def test_a_comparison_leaves_no_trace(fit, engine):
    def trajectory(checks):
        watch = Watch()
        L.seed_everything(7)
        run = fit(
            Busy(),
            4,
            {
                "checks": Checks(dry_run=False, loss_graph=False, comparisons=checks),
                "engine": engine,
            },
            callbacks=[watch],
        )
        return watch.seen, run.spot_checks

    (seen, looks), (plain, none) = trajectory(True), trajectory(False)

    assert looks in (3, 4)  # one step in sixty is due besides
    assert none == 0
    assert seen == plain


def test_released_gradients_stay_where_they_are(fit):
    """Lightning keeps the last private gradient until the closure sets it to zero."""

    class Looks(Base):
        seen = ()

        def loss(self, x, y):
            grads = [None if p.grad is None else p.grad.clone() for p in self.parameters()]
            self.seen = (*self.seen, grads)
            return super().loss(x, y)

    model = Looks()
    fit(model, privacy={"engine": "hooks"})
    assert len(model.seen) == 3
    assert all(grad is not None for grads in model.seen[1:] for grad in grads)


# -- several physical batches of a step ------------------------------------------------------------


class Alternating(Base):
    """Every other physical batch climbs."""

    def training_step(self, batch, batch_idx):
        return (-1) ** batch_idx * self.loss(*batch)


class Logging(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(*batch)
        if batch_idx % 2:
            self.log("loss", loss)
        return loss


@pytest.mark.parametrize("engine", ["auto", "records"])
@pytest.mark.parametrize(
    "sampling", [FullBatch(), FixedOrder(), TruncatedPoisson(100), Poisson()], ids=repr
)
def test_a_gradient_may_follow_batch_idx_only_where_each_record_draws_it(sampling, engine, fit):
    """Elsewhere the number of the records before decides it."""
    privacy = {"sampling": sampling, "engine": engine, "checks": Checks()}
    privacy["relation"] = "zero_out" if sampling == FixedOrder() else "add_remove"
    trainer = {} if sampling == FullBatch() else {"accumulate_grad_batches": 2}
    assert fit(Logging(), 2, privacy, **trainer).step == 2
    refused = pytest.raises(MisconfigurationException, match="batch_idx")
    with contextlib.nullcontext() if sampling == Poisson() else refused:
        fit(Alternating(), 2, privacy, **trainer)
