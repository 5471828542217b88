"""Through a real Trainer, CubicNewton is what its formulas say, number for number."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import CubicNewton, FullBatch
from tests.normal_values import NormalValues
from tests.zoo import private

RECORDS, SIZE, SEED = 48, 6, 11


def same_noise() -> Callable[[int], Any]:
    """The noise that ``seed`` makes, drawn again."""
    rng = np.random.Generator(np.random.PCG64DXSM([SEED, 0]))
    return NormalValues(rng)


def newton(**changes: Any) -> CubicNewton:
    """Bounds that some records exceed and others do not."""
    options: dict[str, Any] = {
        "strong_convexity": 0.7,
        "hessian_lipschitz": 1.5,
        "inner_steps": 4,
        "max_grad_norm": 0.8,
        "max_hessian_norm": 0.4,
        "weight_decay": 0.05,
        "mask_seed": 3,
    }
    return CubicNewton(**{**options, **changes})


def rounds_of(batches: list[list[int]], estimator: CubicNewton) -> list[list[list[int]]]:
    """For each round the batch of each inner step."""
    tau = estimator.inner_steps
    if not estimator.fresh_batches:
        return [[batch] * tau for batch in batches]
    return [batches[start : start + tau] for start in range(0, len(batches), tau)]


BATCHES = ("full in chunks", "Poisson", "Poisson accumulated")
# the same without noise is a weaker test: once for each kind of batch
ROUNDS = [
    *itertools.product(BATCHES, (None, 1, 4), (False, True), (1.0,)),
    *itertools.product(BATCHES, (4,), (False,), (0.0,)),
]


def is_default(batches: str, keep: int | None, fresh: bool, noise: float) -> bool:
    """A third of the rounds, in which each value is."""
    return (BATCHES.index(batches) + (keep or 0) // 2 + 2 * (keep == 1) + fresh) % 3 == 0


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("batches", "keep", "fresh", "noise"),
    [each if is_default(*each) else pytest.param(*each, marks=pytest.mark.slow) for each in ROUNDS],
)
def test_rounds_equal_the_twin(fit, twin, batches, keep, fresh, noise):
    options: dict[str, Any] = {"batch_size": 20, "sampling": FullBatch()}
    trainer: dict[str, Any] = {"max_epochs": 8}
    size = 48.0
    if batches.startswith("Poisson"):
        accumulate = 1 if batches == "Poisson" else 3
        options, size = {"batch_size": 12 // accumulate}, 12.0
        trainer = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    estimator = newton(keep=keep, fresh_batches=fresh)
    fit(
        estimator,
        noise_multiplier=noise,
        seed=SEED if noise else None,
        trainer=trainer,
        **options,
    )

    drawn = same_noise() if noise else np.zeros
    oracle = twin(estimator, keep or SIZE, noise, drawn, size)
    expected = oracle.rounds(rounds_of(fit.model.batches, estimator), fit.start)

    assert len(fit.model.batches) == fit.privacy.steps == 8
    np.testing.assert_allclose(fit.model.flat.numpy(), expected, rtol=0, atol=1e-12)
    assert np.linalg.norm(expected - fit.start) > 0.02


@pytest.mark.parametrize("changes", [
    {"box": 0.3, "strong_convexity": 0.05},
    {"max_step_size": 0.5, "strong_convexity": 0.05},
    {"inner_steps": 1},
    {"hessian_lipschitz": 0.0, "weight_decay": 0.0},
    {"keep_fraction": 0.5},
])  # fmt: skip
@pytest.mark.few(2)
def test_every_option_is_in_the_twin_too(fit, twin, changes):
    estimator = newton(**changes)
    trainer = {"max_epochs": 2}
    fit(estimator, noise_multiplier=1.0, seed=SEED, trainer=trainer)
    keep = 3 if "keep_fraction" in changes else SIZE
    oracle = twin(estimator, keep, 1.0, same_noise(), 12.0)
    expected = oracle.rounds(rounds_of(fit.model.batches, estimator), fit.start)
    np.testing.assert_allclose(fit.model.flat.numpy(), expected, rtol=0, atol=1e-12)
    assert np.linalg.norm(expected - fit.start) > 0.02


def test_the_learning_rate_is_the_step_scale_and_a_scheduler_may_change_it(fit, twin):
    def halving(params: Any) -> Any:
        optimizer = torch.optim.SGD(params, lr=0.6)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch"}]

    estimator = newton()
    fit(
        estimator,
        optimizer=halving,
        noise_multiplier=0.0,
        sampling=FullBatch(),
        batch_size=RECORDS,
        trainer={"max_epochs": 2},
    )
    first, second = (twin(estimator, SIZE, 0.0, np.zeros, 48.0, rate) for rate in (0.6, 0.3))
    whole = [[list(range(RECORDS))] * 4]
    expected = second.rounds(whole, first.rounds(whole, fit.start))
    np.testing.assert_allclose(fit.model.flat.numpy(), expected, rtol=0, atol=1e-12)


# -- limits --------------------------------------------------------------------------------------


class Quadratic(L.LightningModule):
    """Least squares: the Hessian is constant, and Newton's method is exact in one step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1, bias=False).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self.net(x)[:, 0] - y).square().mean() / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_without_noise_and_clipping_one_round_is_the_newton_step(make_trainer):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(30, generator=generator, dtype=torch.float64)
    exact = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    smallest = float(torch.linalg.eigvalsh(x.T @ x / 30)[0])
    privacy = private(
        noise_multiplier=0.0,
        sampling=FullBatch(),
        estimator=CubicNewton(smallest, 0.0, 60, 1e6, 1e6),
    )
    model = Quadratic()
    make_trainer(max_epochs=1, callbacks=[privacy]).fit(
        model, DataLoader(TensorDataset(x, y), batch_size=30)
    )
    torch.testing.assert_close(model.net.weight[0], exact, rtol=0, atol=1e-2)


@pytest.mark.slow
def test_rounds_without_noise_reach_the_optimum(fit, optimum):
    estimator = CubicNewton(0.5, 0.1, 40, 1e3, 1e3, weight_decay=0.02)
    fit(
        estimator,
        noise_multiplier=0.0,
        sampling=FullBatch(),
        batch_size=RECORDS,
        trainer={"max_epochs": 25},
    )
    np.testing.assert_allclose(fit.model.flat.numpy(), optimum(0.02), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_random_coordinates_reach_the_optimum_as_well(fit, optimum):
    """No factor d/k: each round minimises over its own coordinates."""
    estimator = CubicNewton(0.5, 0.1, 10, 1e3, 1e3, weight_decay=0.02, keep=3)
    fit(
        estimator,
        noise_multiplier=0.0,
        sampling=FullBatch(),
        batch_size=RECORDS,
        trainer={"max_epochs": 250},
    )
    np.testing.assert_allclose(fit.model.flat.numpy(), optimum(0.02), rtol=0, atol=2e-2)


# -- who moves, and when -------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [False, True])
def test_validation_sees_the_averaged_iterate_of_whole_rounds(fit, twin, fresh):
    estimator = newton(fresh_batches=fresh)
    fit(
        estimator,
        noise_multiplier=0.0,
        validate=True,
        trainer={"max_epochs": 2, "val_check_interval": 1, "num_sanity_val_steps": 0},
    )
    oracle = twin(estimator, SIZE, 0.0, np.zeros, 12.0)
    rounds = rounds_of(fit.model.batches, estimator)
    ends = [fit.start, *(oracle.rounds(rounds[: t + 1], fit.start) for t in range(len(rounds)))]
    done = [step // 4 if fresh else step for step in range(1, 9)]
    seen = np.stack([each.numpy() for each in fit.model.seen])
    np.testing.assert_allclose(seen, np.stack([ends[t] for t in done]), rtol=0, atol=1e-12)
