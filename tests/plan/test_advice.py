"""Advice before the first step and after the last: from the planner, without contradictions."""

from __future__ import annotations

import math
import re

import pytest
import torch

from lightning_dp.accounting.calibration import calibrate_steps
from lightning_dp.plan.advice import (
    OptimizerSetting,
    after,
    before,
    better_plan,
    changes,
    optimizer_setting,
    planned_rate,
)
from lightning_dp.plan.signal import judge
from lightning_dp.plan.suggestion import ENOUGH, best_plan


def adam(rate):
    return {"optimizer": OptimizerSetting("Adam", "adam", rate)}


GOOD = {"batch_size": 1024, "epochs": 8}


def test_the_numbers_of_a_run_are_in_three_lines(setting):
    first, noise, change = before(setting())
    assert first == (
        "22,000 records, 128 a step on average (q = 0.00582), 344 steps (2 epochs), noise multiplier "
        "z = 0.634, clip norm C = 1"
    )
    assert noise == (
        "noise norm 16.4 per step (gradient norm ≤ 1; it averages out over steps); over the run 4.2 "
        "times the noise of full batches with the same ε (1.5 or less is good)"
    )
    assert change == (
        "try: batch_size=1024 (or batch_size × accumulate_grad_batches), max_epochs=8; lr=0.007 for "
        "Adam (now 0.001), a third of it for pre-trained weights; 176 steps, 1.4 times the noise of "
        "full batches"
    )
    assert "averages" not in before(setting({"size": 100}))[1]
    assert "inf" not in "".join(before(setting({"clip_norm": math.inf})))  # of CubicNewton


def test_the_plan_is_the_planners_with_no_fewer_epochs(setting):
    for epochs in (1, 2, 3):
        best = best_plan(22_000, 3.0, target_delta=1e-5, least_epochs=epochs)
        assert better_plan(setting(epochs=epochs)) == best
    assert better_plan(setting(**GOOD)) is None
    full = better_plan(setting(num_records=300, batch_size=300, epochs=4))
    assert (full.sample_rate, full.steps, round(full.excess, 6)) == (1.0, 100, 1.0)
    replaced = setting({"relation": "replace_one"})
    assert replaced.excess == pytest.approx(setting().excess / 2)


def test_one_plan_is_calibrated_and_the_others_cost_one_epsilon_each(setting, monkeypatch):
    calibrated, given = [], setting({"num_records": 21_987})  # of no other test: noise is cached

    def counted(steps, *budget):
        calibrated.append(steps)
        return calibrate_steps(steps, *budget)

    monkeypatch.setattr("lightning_dp.plan.training_plan.calibrate_steps", counted)
    plan = better_plan(given)

    assert len(calibrated) == 1
    assert plan.excess <= ENOUGH < plan.changed(batch_size=plan.batch_size // 2).excess
    assert plan.changed(epochs=int(plan.epochs) // 2).excess > ENOUGH


@pytest.mark.parametrize(
    ("rate", "advised"),
    [(0.007, None), (0.003, None), (0.02, None), (0.3, "0.007"), (1e-4, "0.007")],
)
def test_a_rate_that_is_far_from_the_planners_is_named(rate, advised, setting):
    lines = changes(setting(adam(rate), **GOOD))
    assert bool(lines) == (advised is not None)
    if advised:
        assert lines == [
            f"try: lr={advised} for Adam (now {rate:g}), a third of it for pre-trained weights"
        ]
    near = changes(setting(adam(0.005)))
    assert "max_epochs=8" in near[0] and "lr=" not in near[0]


def test_the_rate_of_sgd_follows_noise_and_momentum(setting):
    def rate(momentum, **changed):
        optimizer = OptimizerSetting("SGD", "sgd", 0.1, momentum)
        return planned_rate(setting({"optimizer": optimizer, **changed}))

    given = setting()
    noise = given.noise_multiplier / given.batch_size
    assert rate(0.0) == pytest.approx(0.09 / (noise * math.sqrt(344)))
    assert rate(0.9) == pytest.approx(rate(0.0) / 10)
    assert rate(0.0, clip_norm=0.5) == pytest.approx(2 * rate(0.0))
    assert rate(0.0, size=100) is None  # hardly any noise: it sets no scale


def test_the_peak_of_a_one_cycle_schedule_is_the_rate():
    weights = torch.nn.Linear(3, 2).parameters()
    optimizer = torch.optim.Adam(weights, lr=1e-3)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=100)
    found, size, weight = optimizer_setting(optimizer)
    assert (found.learning_rate, found.argument, size) == (0.02, "max_lr", 8)
    assert weight == pytest.approx(math.sqrt(2 / 3))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"steps": 37, "is_calibrated": False},
            "after 37 of 344 steps; leave noise_multiplier out",
        ),
        ({"steps": 37}, "after 37 of 344 steps; part of it was spent before"),
        ({"steps": 37, "steps_before": 9}, "after 37 of 344 steps; a resumed run keeps its noise"),
        ({"target_epsilon": 4e6}, "ε = 4e+06 promises next to nothing"),
    ],
    ids=str,
)
def test_a_budget_that_ends_early_or_promises_nothing_is_a_line(changed, words, setting):
    lines = before(setting(changed))
    assert words in lines[1] and len(lines) <= 4


def test_a_resumed_or_spent_run_cannot_change_its_batches(setting):
    lines = before(setting({"steps_before": 100}))
    assert "resumed after 100 of 344 steps" in lines[0] and "try" not in "".join(lines)
    assert before(setting({"steps_before": 344})) == before(setting({"steps": 0})) == []


@pytest.mark.parametrize("epsilon", [1e-9, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("delta", [1e-300, 1e-4])
@pytest.mark.parametrize("noise_multiplier", [1e-9, 1e9])
def test_no_legal_setting_ends_in_an_error(epsilon, delta, noise_multiplier, setting, quick):
    changed = {
        "target_epsilon": epsilon,
        "target_delta": delta,
        "noise_multiplier": noise_multiplier,
    }
    for optimizer in ("adam", "sgd"):
        kind = OptimizerSetting(optimizer, optimizer, 0.1)
        assert before(setting({**changed, "optimizer": kind}))


# -- after -------------------------------------------------------------------------------------

LEARNS, STILL = [10.0] * 100, [0.0] * 100
JUMPS = [20.0] * 20 + [(-1) ** (step // 2) * 30.0 for step in range(180)]
ENDS = "For another training, whose ε adds to this one on the same records: "


@pytest.mark.parametrize(
    ("strengths", "changed", "plan", "words"),
    [
        (STILL, adam(0.007), GOOD, "No gradient signal above the noise was found"),
        (
            STILL,
            adam(0.007),
            GOOD,
            "Check that the loss is a finite number on synthetic data, then",
        ),
        (STILL, {}, {}, "then try less noise over the run, as advised at the start."),
        (LEARNS, adam(0.003), GOOD, f"{ENDS}lr=0.009 for Adam (now 0.003) or more epochs."),
        (LEARNS, adam(0.02), GOOD, f"{ENDS}more epochs."),  # 0.06 would be taken back at the start
        (LEARNS, adam(0.3), GOOD, f"{ENDS}more epochs."),  # the start advised a smaller rate
        (LEARNS, {}, {}, "Follow the advice at the start in another training."),
        (LEARNS, {"optimizer": None}, GOOD, f"{ENDS}more epochs."),
        (LEARNS, {"target_epsilon": None, **adam(0.002)}, {}, "For another training: lr=0.006"),
        (JUMPS, adam(0.01), GOOD, f"{ENDS}lr=0.003 for Adam (now 0.01) or a rate that decays."),
        (JUMPS, adam(1e-4), GOOD, f"{ENDS}a rate that decays."),
        ([30.0 * 0.9**step for step in range(100)], {}, {}, None),  # it fades away: no fault
    ],
)
def test_the_end_adds_what_the_releases_show(strengths, changed, plan, words, setting, signal_of):
    lines = after(setting(changed, **plan), signal_of(strengths))
    assert "try: " not in "".join(lines) and "batch_size" not in "".join(lines)
    assert words in lines[0] if words else lines == []


def test_followed_advice_ends_in_silence(setting, signal_of):
    """No rate that the end advises is taken back at the next start, nor the other way round."""
    for rate in (1e-4, 1e-3, 3e-3, 7e-3, 2e-2, 0.1, 1.0):
        for strengths in (LEARNS, JUMPS):
            given = setting(adam(rate), **GOOD)
            start, (end,) = "".join(changes(given)), after(given, signal_of(strengths))
            if found := re.search(r"lr=([\d.e-]+)", end):
                assert not start
                assert not changes(setting(adam(float(found[1])), **GOOD))


def test_noise_alone_is_seldom_taken_for_learning(signal_of):
    verdicts = [judge(signal_of([0.0] * 50, size=20, seed=seed)) for seed in range(120)]
    # 1.2 are expected at most; 7 or more have a chance below 1 in 1000. But the largest of many
    # sums is not small: a threshold for a single one would not do.
    assert sum(verdict.learns for verdict in verdicts) <= 6
    assert sum(verdict.largest > 2.0 for verdict in verdicts) > 60
    assert 3.4 < verdicts[0].threshold < 4.0


@pytest.mark.parametrize(
    "strengths",
    [[4.0] * 200, [12.0] * 30 + [0.0] * 170, [0.0] * 170 + [12.0] * 30],
    ids=["always", "early", "late"],
)
def test_a_direction_is_found_whenever_it_was_there(strengths, signal_of):
    # The noise norm of a thousand entries is 32, so no single release shows it.
    assert judge(signal_of(strengths)).learns
