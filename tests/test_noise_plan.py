"""Suggested batches and noise: at the budget by independent accounts, with the noise that is stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from lightning_dp import (
    CyclicPoisson,
    FixedOrder,
    IndependentNoise,
    Poisson,
    PrivacyConfig,
    RandomAllocation,
    TruncatedPoisson,
    suggest_batches,
)
from lightning_dp._world import World
from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.accounting.events import RandomAllocationEpoch, TruncatedGaussian
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.run import PrivateRun

N, B, EPOCHS, MOMENTUM = 4000, 200, 3, 0.5
PASS, STEPS = N // B, EPOCHS * N // B
BUDGET = {"target_epsilon": 2.0, "target_delta": 1e-5}


@pytest.fixture(scope="module")
def found():
    return suggest_batches(N, B, EPOCHS, **BUDGET, momentum=MOMENTUM)


def matrix(noise):
    """C of all steps, the longest column at length 1."""
    column = np.linalg.inv(toeplitz(noise.for_steps(STEPS).inverse(STEPS), np.zeros(STEPS)))[:, 0]
    length = noise.for_steps(STEPS).column_norm
    return toeplitz(column, np.zeros(STEPS)) / length


def charged(choice):
    """ε by events, or a sensitivity, written down by hand."""
    z, sampling = choice.noise_multiplier, choice.sampling
    if isinstance(sampling, FixedOrder):  # of all places in a pass
        c = np.abs(matrix(choice.noise))
        worst = max(np.linalg.norm(c[:, place::PASS].sum(1)) for place in range(PASS))
        return gdp_epsilon(worst / z, 1e-5)
    history = {
        Poisson: lambda: [(PoissonGaussian(z, B / N), STEPS)],
        TruncatedPoisson: lambda: [(TruncatedGaussian(z, B / N, sampling.limit, N), STEPS)],
        RandomAllocation: lambda: [(RandomAllocationEpoch(z, PASS, PASS), EPOCHS)],
        CyclicPoisson: lambda: [
            (PoissonGaussian(z, sampling.bands * B / N), math.ceil(STEPS / sampling.bands))
        ],
    }[type(sampling)]()
    return epsilon(history, 1e-5, choice.relation)


def test_every_choice_spends_the_budget_and_no_more(found):
    assert {type(each.sampling) for each in found.table} == {
        Poisson, TruncatedPoisson, RandomAllocation, CyclicPoisson, FixedOrder
    }  # fmt: skip
    for choice in found.table:
        # What λ ** separation makes of the end of a block is at most 1e-3 of it.
        assert 1.99 < charged(choice) <= 2.0 + 1e-9, choice


def test_every_choice_has_the_noise_of_a_fit(found):
    for choice in found.table:
        config = PrivacyConfig(
            **BUDGET, sampling=choice.sampling, noise=choice.noise, relation=choice.relation
        )
        run = PrivateRun(config)
        run.use_batches(
            choice.sampling.plan(
                num_records=N, batch_size=B, accumulate=1, world_size=1, loader_length=PASS
            )
        )
        run.start(STEPS, World(), directory=None)
        assert run.noise_multiplier == choice.noise_multiplier, choice
        assert run.epsilon_of_plan <= 2.0


def test_the_error_is_that_of_sgd_on_noise_alone(found):
    """The iterates of heavy ball, by the dense matrices."""
    momentum = MOMENTUM ** np.arange(STEPS)
    iterates = toeplitz(np.cumsum(momentum), np.zeros(STEPS))
    errors = [
        each.noise_multiplier * np.linalg.norm(iterates @ np.linalg.inv(matrix(each.noise)))
        for each in found.table
    ]
    want = np.array(errors) / errors[0]
    assert [each.error for each in found.table] == pytest.approx(want, rel=1e-6)


def test_it_chooses_what_has_less_noise_under_the_relation_and_else_poisson(found):
    assert isinstance(found.best.sampling, CyclicPoisson) and found.best.error < 0.95
    assert found.best.noise.bands == found.best.sampling.bands
    large = suggest_batches(50_000, 8192, 60, target_epsilon=1.0, target_delta=1e-5)
    assert (large.best.sampling, large.best.noise) == (Poisson(), IndependentNoise())
    bands = [s.bands for each in large.table if isinstance(s := each.sampling, CyclicPoisson)]
    assert max(bands) * 8192 <= 50_000  # b q is at most 1
    # Noise of a fixed order may be less than that of Poisson batches: "zero_out" must be asked for.
    loose = {"target_epsilon": 8.0, "target_delta": 1e-5}
    of_order = min(
        (each for each in suggest_batches(N, B, 1, **loose).table if each.relation == "zero_out"),
        key=lambda each: each.error,
    )
    assert of_order.error < 0.95
    assert suggest_batches(N, B, 1, **loose).best.relation == "add_remove"
    assert suggest_batches(N, B, 1, **loose, relation="zero_out").best.relation == "zero_out"


def test_what_a_fit_refuses_is_not_compared():
    replaced = suggest_batches(N, B, 1, **BUDGET, relation="replace_one")
    assert RandomAllocation not in {type(each.sampling) for each in replaced.table}
    zeroed = suggest_batches(N, B, 0.5, **BUDGET, relation="zero_out")
    assert TruncatedPoisson not in {type(each.sampling) for each in zeroed.table}
    whole = suggest_batches(N, N, 3, **BUDGET)
    assert CyclicPoisson not in {type(each.sampling) for each in whole.table}
