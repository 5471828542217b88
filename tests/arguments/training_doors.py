"""Doors by which numbers come into a training, its plan, its accounting and its audit."""

from __future__ import annotations

import tempfile
from functools import wraps
from typing import Any

import torch
from dynamic_noise_influence import quadratic_influence
from lightning.pytorch import LightningModule

from lightning_dp import (
    BatchPlan,
    CubicNewton,
    Diff2,
    LaplacianSmoothing,
    MeanGradient,
    Momentum,
    PrivacyConfig,
    Term,
    fix,
    losses_of_records,
    rows_of_records,
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
from lightning_dp.accounting.events import PoissonRound
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
from lightning_dp.sampling.schemes import factorisations, largest_chunk
from lightning_dp.schedules import (
    Cosine,
    DynamicGD,
    DynamicMomentum,
    Exponential,
    Polynomial,
    StepDecay,
)
from lightning_dp.search import Search
from tests.arguments.door import Door

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
}
FLAGS = ("advice", "count_clipped")


class OneLayer(LightningModule):
    """Enough of a module to be probed."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()


TRAINING = [
    Door(DifferentialPrivacy, CONFIGURATION, whole=("seed",), flags=FLAGS),
    Door(PrivacyConfig, CONFIGURATION, whole=("seed",), flags=FLAGS),
    Door(
        BatchPlan,
        {"num_records": 9, "sample_rate": 0.5, "chunks_per_step": 1, "steps_per_epoch": 2},
        whole=("num_records", "chunks_per_step", "steps_per_epoch"),
    ),
    Door(
        Traits,
        {
            "period": 3,
            "queries_per_step": 1,
            "longest_silence": 2,
            "uses_hessian": False,
            "estimates_gradient": True,
        },
        whole=("period", "queries_per_step"),
        flags=("uses_hessian", "estimates_gradient"),
    ),
    Door(epsilon_text, {"digits": 3}, whole=("digits",), others={"epsilon": 1.0}),
    Door(InverseRootSteps, {"eta0": 0.1, "beta": 0.01}),
    Door(MeanGradient, {"max_grad_norm": 1.0}),
    Door(
        Diff2,
        {
            "restart_every": 3,
            "max_grad_norm": 1.0,
            "diff_norm": 1.0,
            "split": 1.5,
            "restart_rate": 2.0,
        },
        whole=("restart_every",),
    ),
    Door(Diff2, {"step_length": 0.1}, others={"restart_every": 3, "split": "optimal"}),
    Door(Storm, {"momentum": 0.5, "max_grad_norm": 1.0, "diff_norm": 1.0}),
    Door(
        CubicNewton,
        {
            "strong_convexity": 1.0,
            "hessian_lipschitz": 1.0,
            "inner_steps": 2,
            "max_grad_norm": 1.0,
            "max_hessian_norm": 1.0,
            "keep": 3,
            "mask_seed": 0,
            "box": 1.0,
            "weight_decay": 0.0,
            "max_step_size": 0.1,
            "fresh_batches": False,
        },
        whole=("inner_steps", "keep", "mask_seed"),
        flags=("fresh_batches",),
    ),
    Door(
        CubicNewton,
        {"keep_fraction": 0.5},
        others={"strong_convexity": 1.0, "hessian_lipschitz": 1.0, "inner_steps": 2},
    ),
    Door(Momentum, {"beta": 0.9}),
    Door(LaplacianSmoothing, {"sigma": 1.0, "per_parameter": False}, flags=("per_parameter",)),
    Door(laplacian_smoothing, {"sigma": 1.0}, others={"v": torch.ones(3)}),
    Door(rows_inside, {"records": 2}, whole=("records",), others={"owners": torch.zeros(3).long()}),
    Door(clip_factors, {"clip_norm": 1.0}, others={"norms": torch.ones(3)}),
    Door(Exponential, {"rate": 0.1}),
    Door(Cosine, {"steps": 10, "end": 0.5}, whole=("steps",)),
    Door(Polynomial, {"steps": 10, "end": 0.5, "power": 2.0}, whole=("steps",)),
    Door(StepDecay, {"every": 10, "factor": 0.5}, whole=("every",)),
    Door(DynamicGD, {"kappa": 10.0}),
    Door(DynamicGD.recommended_steps, {"kappa": 10.0, "alpha": 0.1}),
    Door(
        DynamicMomentum,
        {"kappa": 100.0, "eta0": 1.0, "beta": 0.5, "steps": 10},
        whole=("steps",),
    ),
    Door(DynamicMomentum.recommended_steps, {"kappa": 10.0, "eta0": 1.0, "alpha": 0.1}),
    Door(Term, {"weight": 1.0}),
    Door(
        Query,
        {"clip_norm": 1.0, "noise_multiplier": 1.0, "count_weight": 0.1},
        others={"terms": (Term(),)},
    ),
    Door(Gaussian, {"noise_multiplier": 1.0}),
    Door(
        ApproximateDP,
        {"epsilon": 0.5, "delta": 1e-7},
        others={"relation": "add_remove", "what": "a table"},
    ),
    Door(ZCDP, {"rho": 0.1}, others={"relation": "add_remove", "what": "a table"}),
    Door(PoissonGaussian, {"noise_multiplier": 1.0, "sample_rate": 0.1}),
    Door(PoissonRound, {"sample_rate": 0.1}, others={"noise_multipliers": (1.0, 2.0)}),
    Door(epsilon, {"delta": 1e-5}, others={"events": STEPS}),
    Door(delta, {"epsilon": 1.0}, others={"events": STEPS}),
    Door(gdp_delta, {"mu": 1.0, "epsilon": 1.0}),
    Door(gdp_epsilon, {"mu": 1.0, "delta": 1e-5}),
    Door(PLDAccountant, {"rtol": 1e-3, "spacing": 0.1}),
    Door(
        calibrate,
        {"sample_rate": 1.0, "steps": 3, "epsilon": 1.0, "delta": 1e-5},
        whole=("steps",),
        others={"shape": (1.0, 1.0, 1.0)},
    ),
    Door(
        affordable_steps,
        {"limit": 10, "epsilon": 1.0, "delta": 1e-5},
        whole=("limit",),
        others={"plan": Gaussian(3.0)},
    ),
    Door(
        epsilon_curve,
        {"delta": 1e-5},
        others={"plan": Gaussian(3.0), "at_steps": [1, 2]},
    ),
    Door(PrivacyBudget, {"target_delta": 1e-5}),
    Door(
        PrivacyBudget(1e-5).update,
        {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 1},
        whole=("steps",),
    ),
    Door(
        quadratic_influence,
        {"learning_rate": 0.1, "steps": 3, "noise_std": 1.0},
        whole=("steps",),
        others={"eigenvalues": [1.0]},
    ),
    Door(
        plot_schedule,
        {"steps": 3, "scale": 1.0, "sample_rate": 0.1, "delta": 1e-5},
        whole=("steps",),
        others={"schedule": Exponential(0.1)},
    ),
    Door(factorisations, {"logical_batch_size": 12}, whole=("logical_batch_size",)),
    Door(
        largest_chunk,
        {
            "logical_batch_size": 10,
            "accumulate": 1,
            "world_size": 1,
            "num_records": 100,
            "relative_rate": 1.0,
            "chance": 0.1,
        },
        whole=("accumulate", "world_size"),
    ),
    Door(
        shared_mask,
        {"seed": 1, "round_": 0, "size": 10, "keep": 3},
        whole=("seed", "round_", "size", "keep"),
    ),
    Door(
        random_k,
        {"keep": 3, "seed": 1, "round_": 0},
        whole=("keep", "seed", "round_"),
        others={"u": torch.ones(10)},
    ),
    Door(
        Checks,
        {"dry_run": True, "loss_graph": True, "comparisons": True},
        flags=("dry_run", "loss_graph", "comparisons"),
    ),
    Door(
        check_isolation,
        {"loss_graph_check": True, "max_grad_norm": 1.0},
        flags=("loss_graph_check",),
        others={"module": OneLayer(), "samples": torch.zeros(4, 3)},
    ),
    Door(
        fix,
        {"channels_per_group": 2, "attention": False},
        whole=("channels_per_group",),
        flags=("attention",),
        others={"model": torch.nn.Linear(2, 2)},
    ),
    Door(
        losses_of_records,
        {"shift": True, "ignore_index": -100, "tokens_per_record": 3.0},
        whole=("ignore_index",),
        flags=("shift",),
        others={"logits": torch.zeros(2, 3, 5), "labels": torch.ones(2, 3, dtype=torch.int64)},
    ),
    Door(trade_off, {"delta": 1e-5}, others={"history": STEPS}),
    Door(
        plan_training,
        {"num_records": 100, "batch_size": 4, "epochs": 3, **BUDGET},
        whole=("num_records", "batch_size", "epochs"),
    ),
    Door(
        plan_training,
        {"steps": 3},
        whole=("steps",),
        others={"num_records": 100, "batch_size": 4, **BUDGET},
    ),
    Door(
        TrainingPlan,
        {"num_records": 100, "batch_size": 4, "steps": 3, "noise_multiplier": 1.0, **BUDGET},
        whole=("num_records", "batch_size", "steps"),
    ),
    Door(
        suggest,
        {
            "num_records": 100,
            "records_per_second": 10.0,
            "seconds": 100.0,
            "least_steps": 4,
            **BUDGET,
        },
        whole=("num_records", "least_steps"),
    ),
    Door(
        learning_rate,
        {"size": 0.1, "max_grad_norm": 1.0, "momentum": 0.5},
        others={"plan": batch_of_four(), "optimizer": "sgd"},
    ),
    Door(
        search_in_a_new_folder,
        {"trials": 2, "steps": 3, "sample_rate": 0.1, **BUDGET},
        whole=("trials", "steps"),
    ),
    Door(
        one_run_p_value,
        {"canaries": 10, "guesses": 8, "correct": 7, "epsilon": 1.0, "delta": 1e-5},
        whole=("canaries", "guesses", "correct"),
    ),
]
