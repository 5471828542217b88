"""The cost of DIFF2: one budget for two kinds of steps, nothing for a step without a query."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

from lightning_dp import Diff2, FullBatch
from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting import PLDAccountant, PoissonGaussian, calibrate
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import BoundedSum, Release
from lightning_dp.estimators import Storm
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import Poisson
from lightning_dp.schedules import Constant, Exponential

DELTA = 1e-5
RECORDS = 60


def epsilon(events: Any) -> float:
    return PLDAccountant().epsilon(events, DELTA, "add_remove")


# -- noise of the two kinds of steps -------------------------------------------------------------

# n = 16,512, R = 2000, ε = 3, δ = 1e-5, u = 1.25.
TABLE = [
    (6, 0.003442, 0.015373, 28.4, 126.9),
    (20, 0.001883, 0.016417, 15.5, 135.5),
    (60, 0.001098, 0.016700, 9.1, 137.9),
    (200, 0.000596, 0.016801, 4.9, 138.7),
]


@pytest.mark.parametrize("row", TABLE)
@pytest.mark.parametrize("relation", ["replace_one", "add_remove"])
def test_exact_noise(row, relation):
    diff2 = Diff2(row[0])
    scale = calibrate(diff2.relative_noise, 1.0, 2000, 3.0, DELTA, relation)
    pair = np.array([scale, scale * diff2.relative_noise(1)])  # noise over C on the sum
    if relation == "replace_one":
        expected, pair = row[1:3], pair / 16_512
    else:
        expected = row[3:5]
    # The table's split counts the restarts of 2000 steps; ours those of whole intervals.
    assert pair == pytest.approx(expected, rel=0.012)


@pytest.mark.parametrize(("interval", "length"), [(20, 0.01), (20, 0.5), (200, 0.1)])
def test_the_optimal_split_has_the_least_noise(interval, length):
    """Over all splits of one budget: E|noise in v|², averaged over the steps of an interval."""

    def noise_energy(diff2: Diff2) -> float:
        shape = np.array([diff2.relative_noise(step) for step in range(interval)])
        z1, z2 = np.array([1.0, shape[1]]) * math.sqrt((shape**-2.0).sum())
        c1, c2 = diff2.max_grad_norm, diff2.diff_norm * length
        return float(np.mean([(z1 * c1) ** 2 + k * (z2 * c2) ** 2 for k in range(interval)]))

    best = Diff2(interval, 2.0, 3.0, split="optimal", step_length=length)
    near = [Diff2(interval, 2.0, 3.0, split=1 + (best.u - 1) * f) for f in (0.5, 0.8, 1.25, 2)]
    assert noise_energy(best) < min(noise_energy(other) for other in near)


# -- a budget ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize(
    ("sampling", "schedule", "restart_rate"),
    [
        (FullBatch(), Exponential(rate=0.1), 1.0),
        (Poisson(), Constant(), 3.0),
        pytest.param(Poisson(), Exponential(rate=0.1), 1.0, marks=pytest.mark.slow),
        pytest.param(FullBatch(), Constant(), 3.0, marks=pytest.mark.slow),
    ],
)
def test_calibrated_noise_spends_the_budget_and_no_more(fit, sampling, schedule, restart_rate):
    options = {"max_epochs": 7 if sampling == FullBatch() else 2}
    fit(
        estimator=Diff2(4, diff_norm=0.5, restart_rate=restart_rate),
        sampling=sampling,
        noise_schedule=schedule,
        target_epsilon=2.0,
        trainer=options,
    )
    assert 0.998 * 2 < fit.privacy.epsilon <= 2
    charged = fit.privacy._run.ledger.history()
    assert sum(count for _, count in charged) == (7 if sampling == FullBatch() else 10)
    assert epsilon(charged) == fit.privacy.epsilon == fit.privacy.report().epsilon_of_plan


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
def test_training_stops_before_the_kind_of_step_that_does_not_fit(fit):
    fit(
        estimator=Diff2(4, split=1.25),
        noise_multiplier=2.0,
        target_epsilon=1.5,
        trainer={"max_epochs": 40},
    )
    diff2, q = Diff2(4), 12 / RECORDS
    events = [PoissonGaussian(2.0 * diff2.relative_noise(t), q) for t in range(200)]
    spent = [epsilon([(event, 1) for event in events[:n]]) for n in range(30)]
    expected = max(n for n, cost in enumerate(spent) if cost <= 1.5)
    assert fit.privacy.steps == expected > 4
    assert fit.privacy.epsilon == pytest.approx(spent[expected], rel=1e-6)


class Look(L.Callback):
    """After each batch, the ε that is shown and the one that was spent."""

    def __init__(self, fit: Any) -> None:
        self.fit = fit
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        value = float(trainer.callback_metrics["privacy/epsilon"])
        self.seen.append((value, self.fit.privacy.epsilon))


@pytest.fixture
def look(fit: Any) -> Look:
    return Look(fit)


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize("shown", [1, 3])
def test_epsilon_shown_is_never_below_what_was_spent(fit, look, shown):
    fit(
        estimator=Diff2(5),
        noise_multiplier=1.5,
        callbacks=(look,),
        trainer={"max_epochs": 3, "log_every_n_steps": shown, "enable_checkpointing": False},
    )
    assert len(look.seen) == 15
    assert all(value >= spent * (1 - 1e-6) for value, spent in look.seen)
    exact = [pair for step, pair in enumerate(look.seen, 1) if step % shown == 0]
    assert [v for v, _ in exact] == pytest.approx([s for _, s in exact], rel=1e-5)


def test_epsilon_shown_is_not_below_when_cheap_steps_are_left_out(fit, look):
    """lr = 0: only the restarts are charged, and three of them cost more than the first three steps."""
    fit(
        estimator=Diff2(5),
        noise_multiplier=1.5,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        callbacks=(look,),
        trainer={"max_epochs": 3, "log_every_n_steps": 1, "enable_checkpointing": False},
    )
    assert fit.privacy.steps == 3
    assert len(look.seen) == 15
    assert all(value >= spent * (1 - 1e-6) for value, spent in look.seen)


# -- nothing asked -------------------------------------------------------------------------------


def waiting(params: Any) -> dict[str, Any]:
    """No learning rate after steps 0, 1, 2 and 5: x does not move in steps 1, 2, 3 and 6."""
    optimizer = torch.optim.SGD(params, lr=0.3)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: float(t not in (0, 1, 2, 5)))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize("sampling", [FullBatch(), Poisson()])
def test_where_x_did_not_move_nothing_is_charged(fit, sampling):
    fit(
        estimator=Diff2(5),
        noise_multiplier=2.0,
        sampling=sampling,
        optimizer=waiting,
        trainer={"max_epochs": 10 if sampling == FullBatch() else 2},
    )
    mechanism = fit.privacy._run.mechanism
    assert mechanism.step == 10
    assert fit.trainer.global_step == 10
    event = mechanism.plan.event
    assert fit.privacy._run.ledger.history() == [(event(0), 2), (event(1), 4)]  # 4, 7, 8 and 9
    assert mechanism.unasked == [(event(1), 4)]
    # What must be claimed if results decided which steps to leave out:
    report = fit.privacy.report()
    assert report.epsilon == epsilon([(event(0), 2), (event(1), 4)])
    assert report.epsilon_of_plan == pytest.approx(epsilon([(event(0), 2), (event(1), 8)]))


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
def test_steps_that_ask_nothing_make_no_room_for_dear_ones(fit):
    """The budget affords 11 steps of the plan; ten cheap ones fewer must not add a restart."""
    options: dict[str, Any] = {
        "estimator": Diff2(11),
        "noise_multiplier": 1.0,
        "target_epsilon": epsilon(
            [(PoissonGaussian(1.0 * Diff2(11).relative_noise(t), 0.2), 1) for t in range(11)]
        )
        * 1.0001,
        "trainer": {"max_epochs": 10},
    }

    def frozen(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)

    fit(**options)
    assert fit.privacy.steps == 11
    fit(optimizer=frozen, **options)
    assert fit.privacy.steps == 1
    assert fit.privacy._run.mechanism.step == 11
    assert fit.privacy.epsilon <= options["target_epsilon"]


def test_unasked_steps_are_in_the_checkpoint():
    def make() -> Mechanism:
        ledger = Ledger()
        ledger.begin("run")
        plan = NoisePlan(1.0, Constant(), Poisson(), 0.1, Diff2(3))
        return Mechanism(plan, (), ledger, FixedGuard(math.inf), 100, NoiseSource(0), World())

    mechanism, params = make(), [torch.ones(3)]
    for _ in range(3):
        query = mechanism.ask(params)
        if query is not None:
            mechanism.answer(BoundedSum(torch.ones(3), query.clip_norm))
        mechanism.tell(params)
    assert (mechanism.step, mechanism.ledger.steps) == (3, 1)

    resumed = make()
    resumed.load_state_dict(mechanism.state_dict())
    assert resumed.unasked == mechanism.unasked == [(resumed.plan.event(1), 2)]
    assert not resumed.is_begun


# -- stability -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("factor", [0.95, 1.05])
def test_feedback_is_warned_of_once_above_one(factor, recwarn):
    diff2 = Diff2(10, diff_norm=3.0)
    params, v = [torch.zeros(2)], torch.tensor([3.0, 4.0])
    state = diff2.init(params)
    _, state = diff2.tell(state, params, 0, Release(v, noise_std=1.0))
    noise_std = factor * 5.0 / math.sqrt(2 * 10)
    for step in (1, 2):
        _, state = diff2.tell(state, params, step, Release(torch.zeros(2), noise_std))
    messages = [str(warning.message) for warning in recwarn.list]
    assert len(messages) == (1 if factor > 1 else 0)
    assert all("has 1.1 times the norm of the estimate" in message for message in messages)


def test_what_is_recommended_does_not_feed_back():
    for size in (10, 1_000, 1_000_000):
        advice = Diff2.recommend(
            3.0, DELTA, steps=2000, num_records=16_512, size=size, smoothness=3.0
        )
        assert advice.feedback <= 1 + 1e-9
        assert 1 <= advice.estimator.restart_every <= 2000
        scale = calibrate(advice.estimator.relative_noise, 1.0, 2000, 3.0, DELTA)
        factor = advice.estimator.feedback(
            advice.learning_rate,
            noise_multiplier=scale * advice.estimator.relative_noise(1),
            batch_size=16_512,
            size=size,
        )
        assert factor == pytest.approx(advice.feedback)


@pytest.mark.parametrize("estimator", [Diff2(10), Storm(0.1)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_diverged_parameters_are_refused_before_the_charge(estimator, value):
    ledger = Ledger()
    ledger.begin("run")
    plan = NoisePlan(1.0, Constant(), Poisson(), 0.1, estimator)
    mechanism = Mechanism(plan, (), ledger, FixedGuard(math.inf), 100, NoiseSource(0), World())
    mechanism.ask([torch.ones(3)])
    mechanism.tell([torch.ones(3)])
    with pytest.raises(RuntimeError, match=r"no longer finite.*diverged.*Lower the learning rate"):
        mechanism.ask([torch.tensor([1.0, value, 1.0])])
    assert ledger.steps == 1


# -- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"restart_every": 0}, "restart_every=0 must be a whole number of at least 1"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0 must be finite and greater than 0"),
        ({"max_grad_norm": math.inf}, "max_grad_norm=inf must be finite"),
        ({"diff_norm": -1.0}, r"diff_norm=-1\.0 must be finite and greater than 0"),
        ({"restart_rate": 0.5}, r"restart_rate=0\.5 must be in \[1, inf\)"),
        ({"split": 1.0}, r"split=1\.0 must be 'paper', 'optimal', or a finite number above 1"),
        ({"split": "best"}, "split='best' must be"),
        ({"split": "optimal"}, "step_length=None must be finite and greater than 0"),
        ({"split": "optimal", "step_length": -1.0}, r"step_length=-1\.0 must be finite"),
        ({"step_length": 1.0}, "is used by split='optimal' only"),
    ],
)
def test_bad_arguments_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        Diff2(**{"restart_every": 10, **arguments})


@pytest.mark.parametrize("momentum", [0.0, 1.1, math.nan])
def test_bad_momentum_is_refused(momentum):
    with pytest.raises(ValueError, match=r"Storm\(momentum="):
        Storm(momentum)


def test_the_two_gradients_are_weighted_one_and_minus_one():
    diff2, point = Diff2(5, diff_norm=2.0), torch.zeros(3)
    state = {"estimate": torch.ones(3), "point": point, "warned": False}
    query = diff2.ask(state, [torch.tensor([3.0, 0.0, 4.0])], 1, 1.0)
    assert query is not None
    assert [term.weight for term in query.terms] == [1.0, -1.0]
    assert query.terms[0].point is None and query.terms[1].point is point
    assert query.clip_norm == 2.0 * 5.0
