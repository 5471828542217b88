"""State that follows the records is harmless until something reads it; releases, and later writes."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp.gradients.snapshot import Snapshot, restored
from lightning_dp.isolation.state import Marks, TwinState

EXCHANGED = slice(0, 4)  # the records of a batch that are others in the other world


class Classifier(LightningModule):
    """A linear classifier of 4 numbers in 3 classes, whose hooks subclasses add."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.start()

    def start(self):
        """Add attributes."""

    def losses_of(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.layer(x), y, reduction="none")

    def training_step(self, batch, batch_idx):
        return self.losses_of(batch).mean()


class Fit:
    """Runs epochs of steps, compares their first ones as a private fit does, and notes faults."""

    def __init__(self, model, lr=0.1):
        self.model, self.twins, self.faults = model, TwinState(model), []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        model.trainer.strategy.optimizers = [self.optimizer]
        self.generator = torch.Generator().manual_seed(1)

    def batch(self):
        x = torch.randn(8, 4, generator=self.generator)
        return x, torch.randint(3, (8,), generator=self.generator)

    def run(self, epochs, steps=3):
        for _ in range(epochs):
            for step in range(steps):
                batch = self.batch()
                if step == 0:
                    self.compare(batch)
                self.step(batch)
            self.hook("on_train_epoch_end")
        return self.faults

    def step(self, batch):
        self.optimizer.zero_grad()
        self.model.training_step(batch, 0).backward()
        self.optimizer.step()

    def hook(self, name):
        hook = getattr(self.model, name)
        if (fault := self.twins.run_hook(hook)) is not None:
            self.faults.append(fault)
        hook()

    def compare(self, batch):
        x, y = batch
        others = x.clone(), (y + 1) % 3
        others[0][EXCHANGED] = 9 * torch.randn(4, 4, generator=self.generator)
        gradients, end = self.pass_over(batch)
        _, other = self.pass_over(others)
        if self.twins.has_twins:
            with self.twins.in_place():
                moved, with_twins = self.pass_over(batch)
            if not all(map(torch.equal, gradients, moved)):
                self.faults.append(self.twins.fault())
            self.twins.after_twin(end, with_twins)
        self.twins.after_pair(end, other)

    def pass_over(self, batch):
        with restored(self.model):
            self.model.training_step(batch, 0).backward()
            gradients = [param.grad for param in self.model.parameters()]
            return gradients, Snapshot.of(self.model)


# -- faults ---------------------------------------------------------------------------------------


class Queue(Classifier):
    def start(self):
        self.queue = deque(maxlen=8)

    def training_step(self, batch, batch_idx):
        loss = self.losses_of(batch).mean()
        for key in self.queue:
            loss = loss + (self.layer(batch[0]) @ key).square().mean()
        self.queue.append(self.layer(batch[0])[0].detach())
        return loss


class OwnPlateau(Classifier):
    def start(self):
        self.losses, self.best, self.bad = [], float("inf"), 0

    def training_step(self, batch, batch_idx):
        loss = self.losses_of(batch).mean()
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        loss = sum(self.losses) / len(self.losses)
        self.losses.clear()
        self.best, self.bad = (loss, 0) if loss < self.best else (self.best, self.bad + 1)
        if self.bad > 2:
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5
            self.bad = 0


class WeightsByMetric(Classifier):
    """A metric's state is no fault; a gradient that follows it is."""

    def start(self):
        self.accuracy, self.weight = MulticlassAccuracy(3), 1.0

    def training_step(self, batch, batch_idx):
        self.accuracy(self.layer(batch[0]), batch[1])
        return self.weight * self.losses_of(batch).mean()

    def on_train_epoch_end(self):
        self.weight = 2.0 - float(self.accuracy.compute())
        self.accuracy.reset()


class HasOnlyAfterSome(Classifier):
    """The class's default, unless the latest batch gave a value."""

    rate = 1.0

    def training_step(self, batch, batch_idx):
        loss = self.losses_of(batch).mean() * self.rate
        vars(self).pop("rate", None)
        if batch[0].amax() > 4:  # of exchanged records in these tests
            self.rate = 3.0
        return loss


class HasNotAfterSome(Classifier):
    """The other way around."""

    def training_step(self, batch, batch_idx):
        loss = self.losses_of(batch).mean() * getattr(self, "rate", 1.0)
        self.rate = 3.0
        if batch[0].amax() > 4:
            del self.rate
        return loss


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Queue, "self.queue"),
        (WeightsByMetric, "self.weight"),
        (HasOnlyAfterSome, "self.rate"),
        (HasNotAfterSome, "self.rate"),
    ],
)
def test_gradients_that_follow_kept_records_are_a_fault(kind, name):
    faults = Fit(kind()).run(2)
    assert faults
    assert name in faults[0]


def test_a_rate_by_the_training_loss_is_a_fault_when_it_changes():
    """Without learning the loss goes up and down; after three bad epochs the rate falls."""
    fit = Fit(OwnPlateau(), lr=1e-9)
    faults = fit.run(40)
    assert fit.optimizer.param_groups[0]["lr"] < 1e-9
    assert faults
    assert "on_train_epoch_end() sets lr" in faults[0]
    assert "self.best" in faults[0]


def test_a_threshold_is_found_that_is_far_from_both_worlds():
    model = OwnPlateau()
    fit = Fit(model)
    model.best, model.bad = 1e-3, 2
    fit.compare(fit.batch())
    fit.step(fit.batch())
    fit.hook("on_train_epoch_end")
    assert [fault[:25] for fault in fit.faults] == ["on_train_epoch_end() sets"]


@pytest.mark.parametrize("is_trial", [False, True])
def test_a_hook_that_is_only_tried_takes_no_twins_away(is_trial):
    """Else a scheduler's step that resets a value at the end of an epoch hides it until then."""

    class Latest(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.latest = loss.item()
            return loss

    model = Latest()
    fit = Fit(model)
    fit.compare(fit.batch())
    names = fit.twins.names
    fit.twins.run_hook(lambda: setattr(model, "latest", 0.0), is_trial=is_trial)
    assert names == ("latest",)
    assert fit.twins.names == (names if is_trial else ())


# -- no faults ------------------------------------------------------------------------------------


class ListsLosses(Classifier):
    def start(self):
        self.losses, self.means, self.rate = [], [], 1.0

    def training_step(self, batch, batch_idx):
        loss = self.losses_of(batch).mean()
        self.losses.append((len(self.losses), loss.item()))
        return loss * self.rate / (1 + len(self.losses) // 4)

    def on_train_epoch_end(self):
        self.means.append(sum(loss for _, loss in self.losses) / len(self.losses))
        self.rate *= 0.5
        self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("kind", [Classifier, ListsLosses])
def test_what_nothing_reads_and_what_is_public_are_no_faults(kind):
    fit = Fit(kind())
    assert fit.run(4) == []
    assert fit.twins.has_twins is (kind is ListsLosses)


# -- twins ----------------------------------------------------------------------------------------


def test_what_a_hook_overwrites_is_no_twin_any_more():
    fit = Fit(OwnPlateau())
    fit.compare(fit.batch())
    assert fit.twins.names == ("losses",)
    fit.step(fit.batch())
    fit.hook("on_train_epoch_end")
    assert fit.twins.names == ("best",)


def test_a_twin_keeps_to_its_place_in_a_list_that_has_grown():
    model = ListsLosses()
    fit = Fit(model)
    fit.compare(fit.batch())
    for _ in range(3):
        fit.step(fit.batch())
    real = list(model.losses)
    with fit.twins.in_place():
        moved = list(model.losses)
    assert model.losses == real
    assert [place for place, _ in moved] == [0, 1, 2]
    assert moved[0][1] != real[0][1]
    assert moved[1:] == real[1:]


def test_a_hook_that_raises_elsewhere_keeps_the_twins():
    class Raises(OwnPlateau):
        def on_train_epoch_end(self):
            if not all(0 < loss < 1e3 for loss in self.losses):
                raise ValueError("a loss out of range")

    fit = Fit(Raises())
    fit.compare(fit.batch())
    fit.step(fit.batch())
    fit.hook("on_train_epoch_end")
    assert fit.twins.names == ("losses",)


# -- marks and releases ---------------------------------------------------------------------------


class Marked(Classifier):
    def start(self):
        self.register_buffer("mean", torch.zeros(2))
        self.teacher = nn.Linear(2, 2).requires_grad_(False)


CHANGES = {
    "in place": (lambda m: m.mean.add_(1), ("mean",)),
    "another object": (lambda m: setattr(m, "mean", m.mean + 1), ("mean",)),
    "another address": (lambda m: setattr(m.mean, "data", torch.ones(2)), ("mean",)),
    "new": (lambda m: m.layer.register_buffer("seen", torch.zeros(1)), ("layer.seen",)),
    "frozen": (lambda m: m.teacher.weight.mul_(2), ("teacher.weight",)),
    "trained": (lambda m: m.layer.weight.detach().mul_(2), ()),
    "set free": (lambda m: m.teacher.requires_grad_(True), ()),
    "made frozen": (lambda m: m.layer.requires_grad_(False), ()),
    "nothing": (lambda m: m.mean + 1, ()),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_marks_show_writes_to_buffers_and_frozen_weights(name):
    change, names = CHANGES[name]
    model = Marked()
    before = Marks.of(model)
    change(model)
    assert Marks.of(model).changed_since(before) == names
