"""Spot checks on real runs: what they find, what they let pass, and that they leave no trace."""

from __future__ import annotations

import contextlib
import logging
import random

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dp import CubicNewton, Diff2, FullBatch, Storm
from lightning_dp.accounting.events import VoidedRunError
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.isolation import record_gradients
from lightning_dp.strategies import spot_checks
from tests.strategies.spot_checks.coupling_models import BAD, Centre, Centred, MixingLayer
from tests.strategies.spot_checks.ordinary_models import (
    CLASSES,
    ORDINARY,
    PROBED,
    QUICK,
    WIDTH,
    Augments,
    Base,
    CoarseClock,
    Counts,
    DrawsOfItsOwn,
    Dropout,
    KeepsLosses,
    Metrics,
    Multi,
    NoSchedule,
    OrdinaryByHand,
    OwnGenerator,
    PublicBuffer,
    Shuffles,
    SortsByLength,
    TableOfTheLength,
    data,
)


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
        ({}, {"accumulate_grad_batches": 3}),
        ({"sampling": FullBatch()}, {}),
        ({"estimator": Diff2(3, 1.0, 1.0)}, {}),
        pytest.param({"estimator": Storm(0.5, 1.0, 1.0)}, {}, marks=pytest.mark.slow),
        ({"isolation_probe": True}, {}),
    ],
    ids=["hooks", "accumulated", "full batch", "diff2", "storm", "probed"],
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
