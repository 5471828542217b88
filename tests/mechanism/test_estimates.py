"""What an estimate is, and what is charged for it."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dp.accounting import PoissonGaussian
from lightning_dp.estimators import MeanGradient
from lightning_dp.postprocessing import Momentum
from lightning_dp.schedules import Exponential


def test_without_noise_the_estimate_is_the_sum_over_the_expected_batch_size(trial):
    mechanism = trial.make(noise_multiplier=0.0)
    first, second = torch.arange(6.0), torch.full((6,), 0.5)

    estimate = trial.step(mechanism, first, second)

    torch.testing.assert_close(estimate, (first + second) / trial.batch_size)


def test_the_noise_of_the_estimate_is_multiplier_times_clip_norm_over_the_batch_size(trial):
    mechanism = trial.make(noise_multiplier=3.0, estimator=MeanGradient(0.5))
    params = [torch.zeros(20_000)]
    mechanism.ask(params)

    deviation = float(mechanism.tell(params).std())

    assert deviation == pytest.approx(3.0 * 0.5 / trial.batch_size, rel=0.03)


def test_an_empty_batch_releases_pure_noise_and_is_charged(trial):
    mechanism = trial.make()
    estimate = trial.step(mechanism)
    assert (estimate != 0).all()
    assert estimate.dtype == torch.float32
    assert mechanism.ledger.steps == mechanism.step == 1
    assert torch.equal(trial.step(trial.make(noise_multiplier=0.0)), torch.zeros(trial.size))


def test_each_step_is_charged_as_the_plan_says(trial):
    mechanism = trial.make(noise_multiplier=2.0, schedule=Exponential(rate=0.5))
    planned = [mechanism.plan.event(number) for number in range(4)]

    for _ in range(4):
        trial.step(mechanism)

    assert [event for event, _ in mechanism.ledger.history()] == planned
    assert planned[0] == PoissonGaussian(2.0, trial.rate)
    assert planned[3] == PoissonGaussian(2.0 * math.exp(-1.5), trial.rate)


def test_more_noise_than_planned_is_charged_as_planned(trial):
    # The plan is an envelope: ε may not depend on noise that was chosen after seeing releases.
    mechanism = trial.make(noise_multiplier=2.0, estimator=trial.Asking(factor=1.5))
    trial.step(mechanism)
    assert mechanism.ledger.history() == [(PoissonGaussian(2.0, trial.rate), 1)]


def test_postprocessors_are_applied_in_order(trial):
    total = torch.ones(trial.size)
    states = (Momentum(0.5), trial.Doubled())
    mechanism = trial.make(noise_multiplier=0.0, postprocessing=states)

    trial.step(mechanism, total)
    estimate = trial.step(mechanism, torch.zeros(trial.size))

    # The average of 1 and 0 with weights 1/3 and 2/3, then doubled.
    torch.testing.assert_close(estimate, torch.full((trial.size,), 2 / 3 / trial.batch_size))
