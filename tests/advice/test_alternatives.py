"""What another batch or more epochs would give: close to the exact calibration, in no time."""

from __future__ import annotations

import math
import time

import pytest

from lightning_dp.advice.alternatives import Alternatives
from lightning_dp.plan import plan_training
from lightning_dp.plan.suggestion import ENOUGH, LEAST_STEPS, best_plan

SETTINGS = [
    (22_000, 128, 2, 3.0, 1e-5),
    (60_000, 256, 10, 8.0, 1e-6),
    (300, 32, 4, 8.0, 1e-3),
    (50_000, 500, 3, 1.0, 1e-6),
]


def exact(arguments, batch_size, epochs):
    num_records, _, _, epsilon, delta = arguments
    return plan_training(
        num_records, batch_size, epochs=epochs, target_epsilon=epsilon, target_delta=delta
    )


@pytest.mark.parametrize("arguments", SETTINGS, ids=str)
def test_noise_over_the_run_at_hand_is_exact_and_others_are_close(arguments, setting):
    names = ("num_records", "batch_size", "epochs", "epsilon", "delta")
    found = Alternatives.of(setting(**dict(zip(names, arguments, strict=True))))
    _, batch, epochs, *_ = arguments

    assert found.excess == pytest.approx(exact(arguments, batch, epochs).excess, rel=1e-9)
    for other in ((4 * batch, epochs), (batch, 4 * epochs)):
        assert found.at(*other).excess == pytest.approx(exact(arguments, *other).excess, rel=0.15)
    better = found.better()
    plan = exact(arguments, better.batch_size, better.epochs)
    assert better.steps == plan.steps >= LEAST_STEPS
    assert better.excess == pytest.approx(plan.excess, rel=0.08)
    assert better.noise_multiplier == pytest.approx(plan.noise_multiplier, rel=0.08)
    assert plan.excess < 1.1 * ENOUGH
    assert better.epochs >= epochs


def test_from_one_epoch_the_choice_is_the_planners(setting):
    better = Alternatives.of(setting(epochs=1)).better()
    best = best_plan(22_000, 3.0, target_delta=1e-5)
    assert (better.batch_size, better.epochs) == (best.batch_size, round(best.epochs))


def test_a_good_setting_is_left_as_it_is(setting):
    assert Alternatives.of(setting(batch_size=1024, epochs=8)).better() is None


def test_full_batches_stay_full_and_their_noise_is_exact(setting):
    found = Alternatives.of(setting(num_records=300, batch_size=300, epochs=4))
    assert found.excess == pytest.approx(1.0, rel=1e-3)
    better = found.better()
    assert (better.batch_size, better.steps) == (300, LEAST_STEPS)
    exactly = plan_training(
        300, 300, steps=LEAST_STEPS, target_epsilon=3.0, target_delta=1e-5
    ).noise_multiplier
    assert better.noise_multiplier == pytest.approx(exactly, rel=1e-3)


def test_twice_the_noise_of_add_remove_is_the_least_of_replace_one(setting):
    base = Alternatives.of(setting())
    other = Alternatives.of(setting({"relation": "replace_one"}))
    assert other.excess == pytest.approx(base.excess / 2)


@pytest.mark.parametrize(
    "changed",
    [
        {"target_epsilon": None},
        {"is_constant": False},
        {"noise_multiplier": 0.0},
        {"steps": math.inf},
        {"steps": 0},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_without_budget_steps_or_noise_there_is_nothing_to_compare(changed, setting):
    assert Alternatives.of(setting(changed)) is None


def test_a_search_takes_milliseconds(setting):
    given = setting(num_records=1_000_000, batch_size=256, epochs=1, epsilon=1.0, delta=1e-7)
    started = time.process_time()
    Alternatives.of(given).better()
    assert time.process_time() - started < 0.1
