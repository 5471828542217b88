"""What a mechanism refuses, before anything is charged."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from lightning_dp.accounting import Gaussian
from lightning_dp.boundary import BoundedSum
from lightning_dp.mechanism import BudgetExhausted
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import AbstractSchedule, Constant


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_step_beyond_the_limit_is_refused_before_anything_is_charged_or_asked(limit, trial):
    calls: list[str] = []
    mechanism = trial.make(estimator=trial.Asking(calls), limit=limit)
    for _ in range(limit):
        assert not mechanism.exhausted
        trial.step(mechanism)
    asked = list(calls)

    assert mechanism.exhausted
    with pytest.raises(BudgetExhausted, match=f"another step after {limit}"):
        mechanism.ask(trial.params)

    assert mechanism.ledger.steps == limit
    assert calls == asked


def test_charges_of_unfinished_steps_count_towards_the_limit(trial):
    mechanism = trial.make(limit=2)
    mechanism.ask(trial.params)
    trial.step(mechanism)
    assert mechanism.step == 1
    assert mechanism.exhausted


@pytest.mark.parametrize("clip_norm", [0.5, 1.01, 2.0, math.inf, math.nan])
def test_an_answer_with_another_bound_than_asked_for_is_refused(clip_norm, trial):
    mechanism = trial.make()
    mechanism.ask(trial.params)
    with pytest.raises(RuntimeError, match=f"bounded by {clip_norm}, the query asked for"):
        mechanism.answer(BoundedSum(torch.ones(trial.size), clip_norm))


@pytest.mark.parametrize("factor", [0.999, 0.5, 0.0])
def test_an_estimator_that_asks_for_less_noise_than_planned_is_refused_and_not_charged(
    factor, trial
):
    mechanism = trial.make(estimator=trial.Asking(factor=factor))
    with pytest.raises(RuntimeError, match=r"below the planned 1\.0: the plan is an envelope"):
        mechanism.ask(trial.params)
    assert mechanism.ledger.steps == 0
    assert mechanism.query is None


@dataclass(frozen=True)
class Broken(AbstractSchedule):
    value: float

    def __call__(self, step: int) -> float:
        return self.value


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_schedule_that_is_not_positive_is_refused_and_not_charged(value, trial):
    mechanism = trial.make(schedule=Broken(value))
    with pytest.raises(ValueError, match=f"gives {value} at step 0"):
        mechanism.ask(trial.params)
    assert mechanism.ledger.steps == 0


def test_a_full_batch_plan_books_plain_gaussians():
    assert NoisePlan(1.5, Constant(), FullBatch(), 1.0).event(3) == Gaussian(1.5)
