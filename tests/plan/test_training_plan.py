"""A plan has the noise of a run, the numbers of its formulas, and a rate at which noise is a weight."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_dp import FullBatch, Poisson, PrivacyConfig
from lightning_dp._world import World
from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.plan import learning_rate, plan_training, weight_size
from lightning_dp.run import PrivateRun

BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-5}


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("batch_size", "sampling"), [(100, Poisson()), (4000, FullBatch())])
def test_the_noise_is_that_of_a_run(batch_size, sampling, relation):
    run = PrivateRun(PrivacyConfig(**BUDGET, sampling=sampling, relation=relation))
    batches = sampling.plan(
        num_records=4000,
        batch_size=batch_size,
        accumulate=1,
        world_size=1,
        loader_length=math.ceil(4000 / batch_size),
    )
    run.use_batches(batches)
    run.start(3 * batches.steps_per_epoch, World(), directory=None)

    plan = plan_training(4000, batch_size, epochs=3, **BUDGET, relation=relation)

    assert plan.steps == 3 * batches.steps_per_epoch
    assert plan.sample_rate == batches.sample_rate
    assert plan.records_per_step == batches.expected_batch_size
    assert plan.noise_multiplier == pytest.approx(run.noise_multiplier, rel=2e-3)


def test_the_budget_is_kept_and_used():
    plan = plan_training(4000, 100, epochs=3, **BUDGET)
    spent = epsilon([(PoissonGaussian(plan.noise_multiplier, 0.025), 120)], delta=1e-5)
    assert 0.998 * 3 <= spent <= 3


def test_the_noise_vector_has_its_length():
    plan = plan_training(4000, 100, epochs=3, **BUDGET)
    rng = np.random.default_rng(0)
    drawn = 0.5 * plan.noise_multiplier * rng.standard_normal((50, 10_000)) / 100

    measured = np.linalg.norm(drawn, axis=1).mean()

    assert plan.noise_length(10_000, max_grad_norm=0.5) == pytest.approx(measured, rel=0.01)


def test_the_noise_of_the_run_is_that_of_a_mean_over_its_steps():
    plan = plan_training(4000, 100, epochs=3, **BUDGET)
    rng = np.random.default_rng(0)
    releases = plan.noise_multiplier * rng.standard_normal((plan.steps, 10_000)) / 100

    measured = releases.mean(axis=0).std()

    assert plan.noise_of_the_run == pytest.approx(measured, rel=0.03)


def test_the_excess_of_many_steps_is_that_of_the_central_limit():
    plan = plan_training(100_000, 500, steps=20_000, **BUDGET)
    z = plan.noise_multiplier
    assert plan.excess == pytest.approx(z * math.sqrt(math.expm1(z**-2)), rel=0.02)
    assert plan.excess > 1.05


def test_a_change_keeps_the_epochs_and_calibrates_anew():
    plan = plan_training(1000, 30, epochs=4, **BUDGET)
    assert plan.changed(batch_size=120) == plan_training(1000, 120, epochs=4, **BUDGET)
    assert plan.changed(epochs=5) == plan_training(1000, 30, epochs=5, **BUDGET)
    assert plan.changed(steps=7) == plan_training(1000, 30, steps=7, **BUDGET)
    tighter = plan_training(1000, 30, epochs=4, target_epsilon=1.0, target_delta=1e-5)
    assert plan.changed(target_epsilon=1.0) == tighter


# -- the learning rate -------------------------------------------------------------------------

WALK = plan_training(4000, 100, epochs=3, target_epsilon=3.0, target_delta=1e-5)


def walk(optimizer, weights, noise):
    """Root mean square of what steps on noise alone do to weights that were 0."""
    for _ in range(WALK.steps):
        weights.grad = noise * torch.randn_like(weights)
        optimizer.step()
    return weights.detach().square().mean().sqrt().item()


def test_sgd_walks_by_the_size():
    torch.manual_seed(0)
    weights = nn.Parameter(torch.zeros(5000))
    rate = learning_rate(WALK, 0.1, optimizer="sgd", max_grad_norm=0.3)
    moved = walk(torch.optim.SGD([weights], lr=rate), weights, 0.3 * WALK.noise_batch_ratio)
    assert moved == pytest.approx(0.1, rel=0.05)


def test_sgd_with_momentum_walks_by_the_size():
    torch.manual_seed(0)
    weights = nn.Parameter(torch.zeros(5000))
    rate = learning_rate(WALK, 0.1, optimizer="sgd", momentum=0.9)
    optimizer = torch.optim.SGD([weights], lr=rate, momentum=0.9)
    assert walk(optimizer, weights, WALK.noise_batch_ratio) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_walks_by_about_the_size_whatever_the_noise(kind):
    for noise in (1e-4, 1.0):
        torch.manual_seed(0)
        weights = nn.Parameter(torch.zeros(5000))
        moved = walk(kind([weights], lr=learning_rate(WALK, 0.1)), weights, noise)
        assert moved == pytest.approx(0.1, rel=0.35)


def test_a_weight_has_the_size_that_keeps_a_signals_size():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 5), nn.GroupNorm(2, 8), nn.Linear(40, 30))
    for layer in (module[0], module[2]):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    drawn = torch.cat([layer.weight.flatten() for layer in (module[0], module[2])])

    size = weight_size(param.shape for param in module.parameters())

    assert size == pytest.approx(drawn.square().mean().sqrt().item(), rel=0.05)
