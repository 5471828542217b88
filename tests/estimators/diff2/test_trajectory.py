"""Through a real Trainer, difference estimators are what the papers write, number for number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dp import Diff2, FullBatch, MeanGradient
from lightning_dp.accounting import PLDAccountant
from lightning_dp.estimators import Storm
from tests.normal_values import NormalValues

RECORDS = 60
SEED = 11


def same_noise() -> Callable[[], Any]:
    """The noise that ``seed`` makes, drawn again."""
    rng = np.random.Generator(np.random.PCG64DXSM([SEED, 0]))
    return partial(NormalValues(rng), 15)


def no_noise() -> Any:
    return np.zeros(15)


BATCHES = ("full", "full in chunks", "Poisson", "Poisson accumulated")
# without noise numbers agree more closely: once for each kind of batch
RUNS = [
    *itertools.product(BATCHES, (2,), (1.0,)),
    *itertools.product(BATCHES[2:], (5,), (0.0,)),
    *(
        pytest.param(*run, marks=pytest.mark.slow)
        for run in (
            *itertools.product(BATCHES, (1, 5, 100), (1.0,)),
            *itertools.product(BATCHES[:2], (5,), (0.0,)),
        )
    ),
]


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
@pytest.mark.parametrize(("batches", "restart_every", "noise"), RUNS)
def test_diff2_equals_its_twin(fit, twin, batches, restart_every, noise):
    options: dict[str, Any] = {"batch_size": 60, "sampling": FullBatch()}
    trainer = {"max_epochs": 7}
    if batches == "full in chunks":
        options["batch_size"] = 25
    if batches.startswith("Poisson"):
        accumulate = 1 if batches == "Poisson" else 3
        options = {"batch_size": 12 // accumulate}
        trainer = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    # Radii that some records exceed and others do not.
    estimator = Diff2(restart_every, max_grad_norm=1.2, diff_norm=0.5, split=3.0)
    fit(
        estimator=estimator,
        noise_multiplier=noise,
        seed=SEED if noise else None,
        trainer=trainer,
        **options,
    )

    size = 12.0 if batches.startswith("Poisson") else 60.0
    steps = [(batch, size) for batch in fit.model.batches]
    ratio = math.sqrt((restart_every - 1) / (3.0 - 1))
    oracle = twin(
        same_noise() if noise else no_noise, lambda t: noise * (ratio if t % restart_every else 1)
    )
    expected = oracle.diff2(steps, fit.start, lr=0.3, T=restart_every, C1=1.2, C2=0.5)

    assert len(steps) == fit.privacy.steps == (10 if batches.startswith("Poisson") else 7)
    np.testing.assert_allclose(fit.model.flat.numpy(), expected, atol=2e-5 * (1 + 10 * noise))
    assert np.linalg.norm(expected - fit.start) > 0.05


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize(
    "momentum", [0.7, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.1, 1.0))]
)
def test_storm_equals_its_twin(fit, twin, momentum, noise):
    estimator = Storm(momentum, max_grad_norm=1.2, diff_norm=0.5)
    fit(
        estimator=estimator,
        noise_multiplier=noise,
        seed=SEED if noise else None,
        trainer={"max_epochs": 2},
    )

    steps = [(batch, 12.0) for batch in fit.model.batches]
    oracle = twin(same_noise() if noise else no_noise, lambda t: noise)
    expected = oracle.storm(steps, fit.start, lr=0.3, a=momentum, C1=1.2, C2=0.5)
    np.testing.assert_allclose(fit.model.flat.numpy(), expected, atol=2e-5 * (1 + 10 * noise))


@pytest.mark.parametrize("estimator", [Diff2(1, max_grad_norm=0.7), Storm(1.0, max_grad_norm=0.7)])
def test_without_differences_it_is_dp_sgd_bit_for_bit(fit, estimator):
    options = {"noise_multiplier": 1.0, "seed": SEED, "trainer": {"max_epochs": 2}}
    expected = fit(estimator=MeanGradient(0.7), **options).model.flat
    assert torch.equal(fit(estimator=estimator, **options).model.flat, expected)


def test_any_optimizer_may_use_the_estimate(fit):
    """Without noise and clipping v is the gradient itself, whatever the optimizer."""

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.05)

    options = {
        "noise_multiplier": 0.0,
        "optimizer": adam,
        "sampling": FullBatch(),
        "trainer": {"max_epochs": 8},
    }
    estimator = Diff2(restart_every=4, max_grad_norm=1e3, diff_norm=1e3)
    expected = fit(max_grad_norm=math.inf, **options).model.flat
    actual = fit(estimator=estimator, **options).model.flat
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


# -- batches of restarts -------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_restarts_on_larger_batches_equal_the_twin(fit, twin, noise, workers):
    estimator = Diff2(3, max_grad_norm=1.2, diff_norm=0.5, split=3.0, restart_rate=4.0)
    fit(
        estimator=estimator,
        batch_size=4,
        workers=workers,
        noise_multiplier=noise,
        seed=SEED if noise else None,
        trainer={"max_epochs": 2, "accumulate_grad_batches": 2},
    )

    sizes = [len(batch) for batch in fit.model.batches]
    assert len(sizes) == 16
    assert 24 < np.mean(sizes[::3]) < 40  # 32 on average
    assert np.mean(sizes[1::3] + sizes[2::3]) < 16  # 8 on average
    steps = [(b, 32.0 if t % 3 == 0 else 8.0) for t, b in enumerate(fit.model.batches)]
    oracle = twin(same_noise() if noise else no_noise, lambda t: noise)
    expected = oracle.diff2(steps, fit.start, lr=0.3, T=3, C1=1.2, C2=0.5)
    np.testing.assert_allclose(fit.model.flat.numpy(), expected, atol=1e-3 if noise else 2e-5)


def test_larger_batches_of_restarts_are_charged_at_their_rate(fit):
    estimator = Diff2(3, split=3.0, restart_rate=4.0)
    fit(estimator=estimator, batch_size=8, noise_multiplier=2.0, trainer={"max_epochs": 3})

    q = 8 / RECORDS
    history = fit.privacy._run.ledger.history()
    events = [(*event.pair, count) for event, count in history]
    assert events == [(2.0, 4 * q, 8), (2.0, q, 16)]
    assert fit.privacy.epsilon == PLDAccountant().epsilon(history, 1e-5, "add_remove")


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
def test_a_rate_above_one_is_the_full_batch(fit):
    estimator = Diff2(4, restart_rate=100.0)
    fit(estimator=estimator, batch_size=12, noise_multiplier=5.0, trainer={"max_epochs": 1})
    assert [len(batch) == RECORDS for batch in fit.model.batches] == [True, *[False] * 3, True]
