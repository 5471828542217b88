"""Doors by which numbers come into a training, its plan, its accounting and its audit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from dynamic_noise_influence import quadratic_influence
from lightning.pytorch import LightningModule

from lightning_dp import (
    AdaptiveQuantile,
    Automatic,
    BandedNoise,
    BatchPlan,
    CubicNewton,
    CyclicPoisson,
    Diff2,
    DPAdamW,
    FixedOrder,
    LambdaCGD,
    LaplacianSmoothing,
    MeanGradient,
    Momentum,
    PrivacyConfig,
    Term,
    TruncatedPoisson,
    UserLevel,
    Workload,
    fix,
    losses_of_records,
    rows_of_records,
    suggest_batches,
)
from lightning_dp.accounting import (
    ZCDP,
    ApproximateDP,
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    calibrate,
    delta,
    epsilon,
    epsilon_text,
    trade_off,
)
from lightning_dp.accounting.calibration import affordable_steps
from lightning_dp.accounting.events import (
    CyclicRound,
    FixedOrderPass,
    PoissonRound,
    RandomAllocationEpoch,
    TruncatedGaussian,
)
from lightning_dp.accounting.gdp import gdp_delta, gdp_epsilon
from lightning_dp.accounting.pld import epsilon_curve
from lightning_dp.audit import check_isolation
from lightning_dp.audit.bounds import one_run_p_value
from lightning_dp.boundary import Query
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.config import Checks
from lightning_dp.estimators import Storm, Traits
from lightning_dp.federated import InverseRootSteps
from lightning_dp.functional import clip_factors, laplacian_smoothing, random_k, shared_mask
from lightning_dp.metrics import PrivacyBudget
from lightning_dp.plan import TrainingPlan, learning_rate, plan_training, suggest
from lightning_dp.plotting import plot_schedule
from lightning_dp.schedules import (
    Cosine,
    DynamicGD,
    DynamicMomentum,
    Exponential,
    Polynomial,
    StepDecay,
)
from lightning_dp.search import Search

STEPS = [(Gaussian(3.0), 10)]


@wraps(rows_of_records)
def rows_inside(**arguments: Any) -> None:
    """Enter the context, which looks at its arguments then."""
    with rows_of_records(**arguments):
        pass


@wraps(Search)
def search_in_a_new_folder(**arguments: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Search(folder=folder, **arguments)


def batch_of_four() -> TrainingPlan:
    return plan_training(100, 4, epochs=3, target_epsilon=3.0, target_delta=1e-5)


BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-5}


CONFIGURATION = {
    "target_epsilon": 3.0,
    "target_delta": 1e-5,
    "max_grad_norm": 1.0,
    "noise_multiplier": 1.0,
    "seed": 3,
    "advice": True,
    "count_clipped": False,
    "secure_noise": False,
    "augmentations": 2,
}


class OneLayer(LightningModule):
    """Enough of a module to be probed."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()


def door(call: Callable[..., Any], **good: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a public callable with good arguments for it."""
    return call, good


TRAINING = [
    door(DifferentialPrivacy, **CONFIGURATION),
    door(PrivacyConfig, **CONFIGURATION),
    door(UserLevel, ids=["a"], most_rows=3),
    door(BatchPlan, num_records=9, sample_rate=0.5, chunks_per_step=1, steps_per_epoch=2),
    door(
        Traits,
        period=3,
        queries_per_step=1,
        longest_silence=2,
        uses_hessian=False,
        estimates_gradient=True,
    ),
    door(epsilon_text, digits=3, epsilon=1.0),
    door(InverseRootSteps, eta0=0.1, beta=0.01),
    door(MeanGradient, max_grad_norm=1.0),
    door(Diff2, restart_every=3, max_grad_norm=1.0, diff_norm=1.0, split=1.5, restart_rate=2.0),
    door(Diff2, step_length=0.1, restart_every=3, split="optimal"),
    door(Automatic, gamma=0.1),
    door(AdaptiveQuantile, target=0.3, rate=0.1, least=0.5, most=2.0),
    door(DPAdamW, floor=0.1, params=[torch.nn.Parameter(torch.zeros(1))]),
    door(Storm, momentum=0.5, max_grad_norm=1.0, diff_norm=1.0),
    door(
        CubicNewton,
        strong_convexity=1.0,
        hessian_lipschitz=1.0,
        inner_steps=2,
        max_grad_norm=1.0,
        max_hessian_norm=1.0,
        keep=3,
        mask_seed=0,
        box=1.0,
        weight_decay=0.0,
        max_step_size=0.1,
        fresh_batches=False,
    ),
    door(
        CubicNewton, keep_fraction=0.5, strong_convexity=1.0, hessian_lipschitz=1.0, inner_steps=2
    ),
    door(Momentum, beta=0.9),
    door(LaplacianSmoothing, sigma=1.0, per_parameter=False),
    door(laplacian_smoothing, sigma=1.0, v=torch.ones(3)),
    door(rows_inside, records=2, owners=torch.zeros(3).long()),
    door(clip_factors, clip_norm=1.0, norms=torch.ones(3)),
    door(Exponential, rate=0.1),
    door(Cosine, steps=10, end=0.5),
    door(Polynomial, steps=10, end=0.5, power=2.0),
    door(StepDecay, every=10, factor=0.5),
    door(DynamicGD, kappa=10.0),
    door(DynamicGD.recommended_steps, kappa=10.0, alpha=0.1),
    door(DynamicMomentum, kappa=100.0, eta0=1.0, beta=0.5, steps=10),
    door(DynamicMomentum.recommended_steps, kappa=10.0, eta0=1.0, alpha=0.1),
    door(Term, weight=1.0),
    door(Query, clip_norm=1.0, noise_multiplier=1.0, count_weight=0.1, terms=(Term(),)),
    door(Gaussian, noise_multiplier=1.0),
    door(ApproximateDP, epsilon=0.5, delta=1e-07, relation="add_remove", what="a table"),
    door(ZCDP, rho=0.1, relation="add_remove", what="a table"),
    door(PoissonGaussian, noise_multiplier=1.0, sample_rate=0.1),
    door(PoissonRound, sample_rate=0.1, noise_multipliers=(1.0, 2.0)),
    door(CyclicRound, noise_multiplier=1.0, sample_rate=0.1, steps=4),
    door(FixedOrderPass, noise_multiplier=1.0, steps=4),
    door(TruncatedGaussian, noise_multiplier=1.0, sample_rate=0.1, limit=9, num_records=50),
    door(RandomAllocationEpoch, noise_multiplier=1.0, batches=8, steps=4),
    door(BandedNoise, bands=4),
    door(LambdaCGD, lam=0.9),
    door(Workload, momentum=0.9, final_rate=0.1),
    door(CyclicPoisson, bands=4),
    door(FixedOrder, shuffle=True),
    door(TruncatedPoisson, limit=9, num_records=50),
    door(suggest_batches, num_records=100, batch_size=4, epochs=3, momentum=0.5, **BUDGET),
    door(epsilon, delta=1e-05, events=STEPS),
    door(delta, epsilon=1.0, events=STEPS),
    door(gdp_delta, mu=1.0, epsilon=1.0),
    door(gdp_epsilon, mu=1.0, delta=1e-05),
    door(PLDAccountant, rtol=0.001, spacing=0.1),
    door(calibrate, sample_rate=1.0, steps=3, epsilon=1.0, delta=1e-05, shape=(1.0, 1.0, 1.0)),
    door(affordable_steps, limit=10, epsilon=1.0, delta=1e-05, plan=Gaussian(3.0)),
    door(epsilon_curve, delta=1e-05, plan=Gaussian(3.0), at_steps=[1, 2]),
    door(PrivacyBudget, target_delta=1e-05),
    door(PrivacyBudget(1e-05).update, noise_multiplier=1.0, sample_rate=0.1, steps=1),
    door(quadratic_influence, learning_rate=0.1, steps=3, noise_std=1.0, eigenvalues=[1.0]),
    door(
        plot_schedule, steps=3, scale=1.0, sample_rate=0.1, delta=1e-05, schedule=Exponential(0.1)
    ),
    door(shared_mask, seed=1, round_=0, size=10, keep=3),
    door(random_k, keep=3, seed=1, round_=0, u=torch.ones(10)),
    door(Checks, dry_run=True, loss_graph=True, comparisons=True),
    door(
        check_isolation,
        loss_graph_check=True,
        max_grad_norm=1.0,
        module=OneLayer(),
        samples=torch.zeros(4, 3),
    ),
    door(fix, channels_per_group=2, attention=False, model=torch.nn.Linear(2, 2)),
    door(
        losses_of_records,
        shift=True,
        ignore_index=-100,
        tokens_per_record=3.0,
        logits=torch.zeros(2, 3, 5),
        labels=torch.ones(2, 3, dtype=torch.int64),
    ),
    door(trade_off, delta=1e-05, history=STEPS),
    door(plan_training, num_records=100, batch_size=4, epochs=3, **BUDGET),
    door(plan_training, steps=3, num_records=100, batch_size=4, **BUDGET),
    door(TrainingPlan, num_records=100, batch_size=4, steps=3, noise_multiplier=1.0, **BUDGET),
    door(suggest, num_records=100, records_per_second=10.0, seconds=100.0, least_steps=4, **BUDGET),
    door(
        learning_rate,
        size=0.1,
        max_grad_norm=1.0,
        momentum=0.5,
        plan=batch_of_four(),
        optimizer="sgd",
    ),
    door(search_in_a_new_folder, trials=2, steps=3, sample_rate=0.1, **BUDGET),
    door(one_run_p_value, canaries=10, guesses=8, correct=7, epsilon=1.0, delta=1e-05),
]
