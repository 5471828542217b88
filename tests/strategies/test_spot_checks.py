"""Spot checks on real runs: what they find, what they let pass, and that they leave no trace."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import time
from collections import deque

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_dp import CubicNewton, Diff2, FullBatch, Storm
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.isolation import record_gradients
from lightning_dp.strategies import spot_checks

N, WIDTH, CLASSES = 240, 6, 3


class Base(L.LightningModule):
    """A classifier; what a case changes is `loss`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def loss(self, x, y):
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data():
    generator = torch.Generator().manual_seed(0)
    x = 40 * torch.rand(N, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (N,), generator=generator))


@pytest.fixture
def fit(make_trainer):
    def run(model, steps=34, privacy=None, dataset=None, batch_size=16, **trainer):
        settings = {"noise_multiplier": 1.0, "target_delta": 1e-5, "seed": 0}
        settings |= {"isolation_probe": False, "loss_graph_check": False}
        callback = DifferentialPrivacy(**settings | (privacy or {}))
        arguments = {"max_steps": steps, "max_epochs": -1, "logger": False} | trainer
        trainer = make_trainer(callbacks=[callback, *arguments.pop("callbacks", [])], **arguments)
        trainer.fit(model, DataLoader(dataset or data(), batch_size=batch_size))
        return trainer.strategy.private_run

    return run


# -- what is found ---------------------------------------------------------------------------------


class BranchOnRealValues(Base):
    def loss(self, x, y):
        return super().loss(x / x.mean() if x.max() > 1 else x, y)


class Centred(Base):
    def loss(self, x, y):
        logits = self.net(x)
        return F.cross_entropy(logits - logits.mean(0), y)


class SameLabels(Base):
    def loss(self, x, y):
        z = self.net(x / 40)
        same = (y[:, None] == y[None]).float()
        return (torch.cdist(z, z) * same).mean(1).mean()


class WeightedByRarity(Base):
    def loss(self, x, y):
        counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
        return (F.cross_entropy(self.net(x / 40), y, reduction="none") / counts[y]).mean()


class HardOnes(Base):
    def loss(self, x, y):
        losses = F.cross_entropy(self.net(x / 40), y, reduction="none")
        return (losses * (losses >= losses.median())).mean()


class SkipsLargeBatches(Base):
    def loss(self, x, y):
        loss = super().loss(x / 40, y)
        return loss * (1.0 if x.sum() > 40 * WIDTH * len(x) * 0.4 else 0.1)


class ClosureOfTheStep(Base):
    """Each record's weight depends on records before it, kept in a closure."""

    def __init__(self):
        super().__init__()
        seen = []
        self.note = seen.append
        self.mean = lambda: sum(seen) / len(seen)

    def loss(self, x, y):
        for row in x:
            self.note(float(row.mean()))
        return super().loss(x / self.mean(), y)


class Prefix(Base):
    def loss(self, x, y):
        return super().loss(x.cumsum(0) / 40, y)


class Centre(Base):
    """A buffer that keeps the mean: in every checkpoint."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))

    def loss(self, x, y):
        self.centre.copy_(x.mean())
        return super().loss(x / 40, y)


class ByHand(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(x, y)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class MixesByHand(ByHand):
    def loss(self, x, y):
        return super().loss(x / 40 + (x / 40).mean(0), y)


class LaterEpoch(Base):
    def loss(self, x, y):
        x = x / 40
        return super().loss(x + x.mean(0) if self.current_epoch else x, y)


BAD = [
    BranchOnRealValues,
    Centred,
    SameLabels,
    WeightedByRarity,
    HardOnes,
    SkipsLargeBatches,
    ClosureOfTheStep,
    Prefix,
    MixesByHand,
    LaterEpoch,
]


@pytest.mark.parametrize("model", BAD, ids=[each.__name__ for each in BAD])
def test_modules_that_couple_records_end_the_run(fit, model):
    with pytest.raises(VoidedRunError, match="found by a spot check"):
        fit(model())


def test_a_buffer_of_the_records_ends_the_run(fit):
    with pytest.raises(VoidedRunError, match=r"into weights or buffers.*centre"):
        fit(Centre())


def test_without_spot_checks_it_trains(fit):
    run = fit(Centred(), steps=3, privacy={"spot_checks": False})
    assert run.steps == 3
    assert run.spot_checks == 0


class MixingLayer(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def test_the_first_module_that_mixes_is_named(fit):
    model = Base()
    model.net = nn.Sequential(nn.Linear(WIDTH, 4), MixingLayer(), nn.Linear(4, CLASSES))
    with pytest.raises(VoidedRunError, match=r"outputs of net\.1 \(MixingLayer\)"):
        fit(model)


def test_a_nan_filter_is_found_where_real_records_have_nan(fit):
    class Filter(Base):
        def loss(self, x, y):
            losses = F.cross_entropy(self.net(x.nan_to_num() / 40), y, reduction="none")
            keep = ~x.isnan().any(1)
            return (losses * keep).sum() / keep.sum().clamp(min=1)

    records = data()
    records.tensors[0][::2, 0] = float("nan")
    with pytest.raises(VoidedRunError, match="found by a spot check"):
        fit(Filter(), dataset=records)


# -- what is no fault ------------------------------------------------------------------------------


class Vae(Base):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def loss(self, x, y):
        mean, log_variance = self.encode(x / 40).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean**2 + log_variance.exp() - log_variance - 1).sum(1) / 2
        return (F.mse_loss(self.decode(z), x / 40, reduction="none").sum(1) + divergence).mean()


class Diffusion(Base):
    def __init__(self):
        super().__init__()
        self.denoise = nn.Linear(WIDTH + 1, WIDTH)

    def loss(self, x, y):
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        noisy = (1 - t) * x / 40 + t * noise
        return F.mse_loss(self.denoise(torch.cat([noisy, t], 1)), noise)


class Dropout(Base):
    def loss(self, x, y):
        return super().loss(F.dropout(x / 40, 0.3), y)


class Augments(Base):
    """In place, with random numbers of three libraries."""

    def loss(self, x, y):
        x += random.random() + np.random.rand()
        x *= 1 + 0.1 * torch.rand(len(x), 1)
        return super().loss(x / 40, y)


class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def loss(self, x, y):
        return super().loss(x / 40 + torch.randn(x.shape, generator=self.generator), y)


class Unseeded(Base):
    """No state can be put back: nothing can be said."""

    def loss(self, x, y):
        noise = np.random.default_rng().normal(size=x.shape)
        return super().loss(x / 40 + torch.tensor(noise, dtype=x.dtype), y)


class DrawsByRecord(Base):
    """How many random numbers are drawn depends on records; who draws what does not."""

    def loss(self, x, y):
        rows = [row + random.random() if row[0] > 20 else row for row in x / 1]
        return super().loss(torch.stack(rows) / 40, y)


class Clock(Base):
    def loss(self, x, y):
        self.began = time.perf_counter()
        return super().loss(x / 40, y)


class KeepsLosses(Base):
    """Ordinary notes that no gradient depends on."""

    def __init__(self):
        super().__init__()
        self.losses, self.outputs, self.counts = [], deque(maxlen=3), {}

    def loss(self, x, y):
        loss = super().loss(x / 40, y)
        self.losses.append(loss.item())
        self.outputs.append(loss.detach())
        self.last = self.net(x / 40).detach()
        return loss


class Metrics(Base):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)

    def loss(self, x, y):
        logits = self.net(x / 40)
        self.log("accuracy", self.accuracy(logits, y), on_step=True, on_epoch=True)
        self.log_dict({"mean": x.mean()}, prog_bar=True)
        return F.cross_entropy(logits, y)


class Teacher(Base):
    """A teacher that follows the student, between steps."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def loss(self, x, y):
        with torch.no_grad():
            soft = self.teacher(x / 40).softmax(1)
        return F.cross_entropy(self.net(x / 40), soft) + super().loss(x / 40, y)

    def on_train_batch_end(self, *unused):
        with torch.no_grad():
            self.teacher.weight.mul_(0.99)


class Experts(Base):
    """Routes with index_select: the groups of an expert have other sizes in other batches."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def loss(self, x, y):
        gates = self.route(x / 40).softmax(1)
        outputs = torch.stack([expert(x / 40) for expert in self.experts], 1)
        chosen = gates.argmax(1)
        rows = torch.arange(len(x))
        return F.cross_entropy(outputs[rows, chosen] * gates[rows, chosen, None], y)


class TinyGradients(Base):
    def loss(self, x, y):
        return super().loss(x / 40, y) * 1e-9


class WideRange(Base):
    """Records whose gradients differ by many orders of magnitude."""

    def loss(self, x, y):
        return super().loss(x / 40 * 10.0 ** (y[:, None] * 4 - 6).float(), y)


class Counts(Base):
    """A public schedule."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def loss(self, x, y):
        self.calls += 1
        return super().loss(x / 40, y) * (1 + 1 / self.calls)


class PublicBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def loss(self, x, y):
        self.steps += 1
        return super().loss(x / 40, y) / self.steps


class Dictionary(Base):
    def training_step(self, batch):
        x, y = batch
        return {"loss": self.loss(x / 40, y), "x": x}


class RaisesOnOthers(Base):
    """Synthetic or repeated records may not be legal."""

    def loss(self, x, y):
        if len({tuple(row.tolist()) for row in x}) < len(x):
            raise ValueError("repeated")
        return super().loss(x / 40, y)


class ReadsTrainer(Base):
    def loss(self, x, y):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        assert self.optimizers() is not None
        return super().loss(x / 40, y) * (1 + rate + self.global_step / 100)


class OrdinaryByHand(ByHand):
    def loss(self, x, y):
        return super().loss(x / 40, y)


class Multi(Base):
    def loss(self, x, y):
        z = self.net(x / 40)
        return F.cross_entropy(z, y) + 0.1 * z.square().mean() + 0.01 * z.abs().sum(1).mean()


class Half(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.to(torch.bfloat16)

    def loss(self, x, y):
        return F.cross_entropy(self.net(x.bfloat16() / 40), y)


class NanRecords(Base):
    def loss(self, x, y):
        return super().loss(torch.where(x[:, :1] > 30, torch.nan, x / 40), y)


class DrawsOfItsOwn(Base):
    """How many numbers its own generator draws depends on records."""

    def __init__(self):
        super().__init__()
        self.generator = random.Random(3)

    def loss(self, x, y):
        rows = [row + self.generator.random() if row[0] > 20 else row for row in x / 1]
        return super().loss(torch.stack(rows) / 40, y)


class Shuffles(Base):
    def loss(self, x, y):
        order = torch.randperm(len(x))
        return super().loss(x[order] / 40, y[order])


class SortsByLength(Base):
    """As packed sequences are."""

    def loss(self, x, y):
        order = x.norm(dim=1).argsort(descending=True)
        return super().loss(x[order] / 40, y[order])


class TableOfTheLength(Base):
    """Positions, made anew when another length comes; never saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def loss(self, x, y):
        length = int(x[:, 0].max())
        if self.table is None or len(self.table) != length:
            self.table = torch.linspace(0, 1, length)
        return super().loss(x / 40, y)


class NoSchedule(Base):
    """An iterator, which cannot be put back; also in a buffer."""

    def __init__(self):
        super().__init__()
        self.count = itertools.count(1)
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, x, y):
        self.seen.fill_(next(self.count))
        return super().loss(x / 40, y) / self.seen


class CoarseClock(Base):
    def loss(self, x, y):
        return super().loss(x / 40, y) * (1 + int(time.time() * 30) % 3)


ORDINARY = [
    Vae,
    Diffusion,
    Dropout,
    Augments,
    OwnGenerator,
    Unseeded,
    DrawsByRecord,
    Clock,
    KeepsLosses,
    Metrics,
    Teacher,
    Experts,
    TinyGradients,
    WideRange,
    Counts,
    PublicBuffer,
    Dictionary,
    RaisesOnOthers,
    ReadsTrainer,
    OrdinaryByHand,
    Multi,
    Half,
    NanRecords,
    DrawsOfItsOwn,
    Shuffles,
    SortsByLength,
    TableOfTheLength,
    NoSchedule,
    CoarseClock,
]


PROBED = (Vae, Experts, Metrics, Teacher)  # then the kinds of records are those it found
QUICK = [Diffusion, Augments, Unseeded, DrawsByRecord, Experts, Half, NanRecords, WideRange]
QUICK += [DrawsOfItsOwn, Shuffles, SortsByLength, TableOfTheLength, NoSchedule, CoarseClock]


@pytest.mark.filterwarnings("ignore::lightning_dp._warnings.PrivacyWarning")
@pytest.mark.parametrize("model", QUICK, ids=[each.__name__ for each in QUICK])
def test_ordinary_modules_train(fit, model):
    run = fit(model(), steps=5)
    assert run.voided is None
    assert run.spot_checks >= 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_dp._warnings.PrivacyWarning")
@pytest.mark.parametrize("model", ORDINARY, ids=[each.__name__ for each in ORDINARY])
def test_ordinary_modules_train_for_long(fit, model):
    for seed in range(3):
        probed = seed == 2 and model in PROBED
        run = fit(model(), steps=200, privacy={"seed": seed, "isolation_probe": probed})
        assert run.voided is None
        assert run.spot_checks >= 20


@pytest.mark.parametrize(
    ("privacy", "trainer"),
    [
        ({"engine": "hooks"}, {}),
        pytest.param({"engine": "functional"}, {}, marks=pytest.mark.slow),
        ({}, {"accumulate_grad_batches": 3}),
        ({"sampling": FullBatch()}, {}),
        ({"estimator": Diff2(3, 1.0, 1.0)}, {}),
        pytest.param({"estimator": Storm(0.5, 1.0, 1.0)}, {}, marks=pytest.mark.slow),
        ({"isolation_probe": True}, {}),
    ],
    ids=["hooks", "functional", "accumulated", "full batch", "diff2", "storm", "probed"],
)
@pytest.mark.parametrize("model", [Multi, Centred], ids=["ordinary", "coupled"])
def test_all_kinds_of_steps(fit, privacy, trainer, model):
    if privacy.get("isolation_probe") and model is Centred:
        pytest.skip("the probe refuses it first")
    goes_on = model is Multi
    expected = contextlib.nullcontext() if goes_on else pytest.raises(VoidedRunError)
    with expected:
        run = fit(model(), steps=3, privacy=privacy, **trainer)
        assert run.spot_checks == 3


# -- no trace --------------------------------------------------------------------------------------


def trajectory(fit, make, checks, **arguments):
    """Weights, states of random generators and what was logged, after each step."""
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, module, *unused):
            weights = [param.detach().clone() for param in module.parameters()]
            metrics = {name: float(v) for name, v in trainer.callback_metrics.items()}
            states = (random.getstate()[1][:3], np.random.get_state()[2], torch.get_rng_state())
            seen.append((weights, metrics, states))

    L.seed_everything(7)
    model = make()
    fit(model, steps=4, privacy={"spot_checks": checks}, callbacks=[Watch()], **arguments)
    plain = {k: v for k, v in vars(model).items() if isinstance(v, int | float | list)}
    return seen, plain, {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize(
    "make",
    [
        Augments,
        OwnGenerator,
        Metrics,
        OrdinaryByHand,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (Dropout, Counts, PublicBuffer, KeepsLosses)
        ),
    ],
    ids=lambda each: each.__name__,
)
def test_a_check_leaves_no_trace(fit, make):
    with_checks, attributes, state = trajectory(fit, make, checks=True)
    without, attributes_without, state_without = trajectory(fit, make, checks=False)
    assert attributes == attributes_without
    assert state.keys() == state_without.keys()
    assert all(torch.equal(state[name], state_without[name]) for name in state)
    for (weights, metrics, states), (others, other_metrics, other_states) in zip(
        with_checks, without, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
        assert metrics == other_metrics
        assert states[:2] == other_states[:2]
        assert torch.equal(states[2], other_states[2])


@pytest.mark.slow  # alone: other tests of one process may turn the log off
def test_nothing_is_printed_or_logged_twice(fit, capsys, caplog):
    class Talks(Base):
        def loss(self, x, y):
            print("a step of mine")
            logging.getLogger("mine").warning("a step of mine")
            return super().loss(x / 40, y)

    fit(Talks(), steps=3)
    assert capsys.readouterr().out.count("a step of mine") == 3
    assert sum(record.getMessage() == "a step of mine" for record in caplog.records) == 3


def test_released_gradients_stay_where_they_are(fit):
    """Lightning keeps the last private gradient until the closure sets it to zero."""

    class Looks(Base):
        seen = ()

        def loss(self, x, y):
            grads = [None if p.grad is None else p.grad.clone() for p in self.parameters()]
            self.seen = (*self.seen, grads)
            return super().loss(x / 40, y)

    model = Looks()
    fit(model, steps=3, privacy={"engine": "hooks"})
    assert len(model.seen) == 3
    assert all(grad is not None for grads in model.seen[1:] for grad in grads)


# -- the checker itself ----------------------------------------------------------------------------


def faults():
    moved = record_gradients.moved

    def never(before, after, rows, tolerance):
        return record_gradients.Movement.NONE

    def only_norms(before, after, rows, tolerance):
        same = record_gradients.Glimpse(after.norms, before.entries, before.share)
        return moved(before, same, rows, tolerance)

    return {"never": never, "only norms": only_norms}


class TurnsGradients(Base):
    """Turns each gradient, and keeps its length."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(WIDTH, 2, bias=False)

    def loss(self, x, y):
        signs = torch.sign(x.mean(0) - 20)
        return (self.net(x / 40 * signs) * torch.tensor([1.0, -1.0])).sum(1).mean()


@pytest.mark.parametrize("fault", ["never", "only norms"])
def test_planted_faults_in_the_comparison_let_bad_modules_pass(fit, monkeypatch, fault):
    with pytest.raises(VoidedRunError):
        fit(TurnsGradients())
    monkeypatch.setattr(spot_checks, "moved", faults()[fault])
    assert fit(TurnsGradients()).voided is None


def test_a_pass_with_nothing_exchanged_leaves_the_engine_as_it_is(make_trainer):
    """At the first batch of an own collate_fn: which of its parts hold records is not known yet."""

    class Scaled(Base):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def loss(self, x, y):
            return super().loss(x * self.scale, y)

    def collate(samples):
        return tuple(torch.stack(each) for each in zip(*samples, strict=True))

    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5, seed=0)
    trainer = make_trainer(callbacks=[privacy], max_steps=3)
    trainer.fit(Scaled(), DataLoader(data(), batch_size=16, collate_fn=collate))
    assert trainer.strategy.private_run.spot_checks >= 2
    engine = trainer.strategy.private_run.engine
    assert engine.startswith("bookkeeping, with the functions")


def test_what_all_records_share_may_once_have_as_many_rows(fit, make_trainer):
    """A mask from collate_fn, of as many rows as there are records in some batches."""

    class Shared(Base):
        def training_step(self, batch, batch_idx):
            x, _, weights = batch
            return (self.net(x / 40) * weights.mean() * weights[0]).square().mean()

    def collate(samples):
        x, y = zip(*samples, strict=True)
        return torch.stack(x), torch.stack(y), torch.linspace(1, 3, 16)

    settings = {"noise_multiplier": 1.0, "target_delta": 1e-5, "seed": 0}
    settings |= {"isolation_probe": False, "loss_graph_check": False}
    trainer = make_trainer(callbacks=[DifferentialPrivacy(**settings)], max_steps=40, max_epochs=-1)
    trainer.fit(Shared(), DataLoader(data(), batch_size=16, collate_fn=collate))
    assert trainer.strategy.private_run.voided is None


def test_cubic_newton_is_checked(fit):
    class Newton(Base):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

        def loss(self, x, y):
            return super().loss(x / 40, y)

    estimator = CubicNewton(1.0, 1.0, 1)
    assert fit(Newton(), steps=3, privacy={"estimator": estimator}).spot_checks == 3


def test_a_check_takes_no_memory_for_weights_that_nobody_writes(fit):
    shared = []

    class Watching(Base):
        def loss(self, x, y):
            loss = super().loss(x, y)
            shared.append(all(torch._C._is_cow_tensor(param) for param in self.parameters()))
            return loss

    model = Watching()
    fit(model, steps=1)

    assert shared == [True]  # in the real pass; what the other one notes is put back
    assert not any(map(torch._C._is_cow_tensor, model.parameters()))
