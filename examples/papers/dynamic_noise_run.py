"""The runs of dynamic_noise.py: schedules at a budget, and one cell of the experiment."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from dynamic_noise_data import mnist35, two_clusters
from dynamic_noise_formulas import fit_exponential
from dynamic_noise_influence import quadratic_influence, retraining_influence
from dynamic_noise_model import Problem
from scipy.optimize import brentq
from scratch_ledger import mechanism_of
from torch import Tensor

from lightning_dp.accounting import calibrate
from lightning_dp.accounting.gdp import gdp_delta
from lightning_dp.boundary import bounded_sum
from lightning_dp.estimators import MeanGradient
from lightning_dp.functional import unflatten
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.postprocessing import AbstractPostProcessor
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import AbstractSchedule, Constant, FromInfluence

LEARNING_RATE, CLIP_NORM, MAX_STEPS = 0.1, 4.0, 100
PAPER_BUDGET, EPSILON, DELTA = 0.3927, 4.0, 1e-8
HESSIAN = ("squared", "squared, one std")  # whose influence is computed, not estimated
CHOOSING_SEED = 10_000  # the best T is chosen on other noise than it is judged on


@dataclass(frozen=True)
class Size:
    """Amount of computation."""

    data_scales: tuple[float, ...]
    network_scales: tuple[float, ...]
    grid: tuple[int, ...]
    repeats: int
    choosing_repeats: int
    probes: int
    probe_repeats: int


def descent(
    problem: Problem,
    plan: NoisePlan,
    steps: int,
    seed: int,
    postprocessing: tuple[AbstractPostProcessor, ...] = (),
) -> Iterator[list[Tensor]]:
    """Parameters after each step of private descent: a bare loop around the package's mechanism."""
    params = problem.start(seed)
    mechanism = mechanism_of(plan, steps, len(problem.records.y), seed, postprocessing)
    while not mechanism.exhausted:
        query = mechanism.ask(params)
        mechanism.answer(bounded_sum(problem.gradients(params), query.clip_norm))
        estimate = unflatten(mechanism.tell(params), params)
        params = [p - LEARNING_RATE * g for p, g in zip(params, estimate, strict=True)]
        yield params


def descend(problem: Problem, *what: Any) -> float:
    """The final loss of :func:`descent`."""
    (last,) = deque(descent(problem, *what), maxlen=1)
    return problem.value(last)


@lru_cache(maxsize=4096)
def plan_of(shape: AbstractSchedule, steps: int, budget: str) -> NoisePlan:
    """The shape scaled to spend the paper's R, or what (4, 1e-8) really allows."""
    if budget == "paper":
        spent = math.fsum(shape(step) ** -2 for step in range(steps))
        scale = math.sqrt(spent / PAPER_BUDGET)
    else:
        scale = calibrate(shape, 1.0, steps, EPSILON, DELTA)
    return NoisePlan(scale, shape, FullBatch(), 1.0, MeanGradient(CLIP_NORM))


def exact_budget() -> float:
    """R = Σ 1/σ² = μ² that (4, 1e-8) allows, exactly (calibration stays within 1e-3 of ε below)."""
    return brentq(lambda mu: gdp_delta(mu, EPSILON) - DELTA, 0.01, 10) ** 2


def estimate_influence(problem: Problem, size: Size, *, hessian: bool) -> np.ndarray:
    """q_t, t = 1..100: from the Hessian's eigenvalues, or by retraining around uniform noise."""
    if hessian:
        x = problem.records.x
        eigenvalues = torch.linalg.eigvalsh(x.T @ x / len(x)).clamp(min=0).tolist()
        std = CLIP_NORM / len(x)
        return np.array(
            quadratic_influence(
                eigenvalues, learning_rate=LEARNING_RATE, steps=MAX_STEPS, noise_std=std
            )
        )
    uniform = plan_of(Constant(), MAX_STEPS, "paper").noise_multiplier(0)
    calls = 0

    def train(noise_multipliers: list[float]) -> float:
        nonlocal calls
        seed, calls = calls % size.probe_repeats, calls + 1  # the same noise for every value
        shape = FromInfluence(tuple(sigma**-4.0 for sigma in noise_multipliers))
        plan = NoisePlan(noise_multipliers[0], shape, FullBatch(), 1.0, MeanGradient(CLIP_NORM))
        return descend(problem, plan, MAX_STEPS, seed)

    probes = np.linspace(0, MAX_STEPS - 1, size.probes).round().astype(int).tolist()
    values = (20.0, 80.0, 140.0, 200.0)
    around = [uniform] * MAX_STEPS
    fit = retraining_influence(
        train, around, values=values, repeats=size.probe_repeats, steps=probes
    )
    # What cannot be told from 0 counts as its standard error.
    found = np.maximum(fit.influence, fit.standard_error)
    return np.exp(np.interp(np.arange(MAX_STEPS), fit.steps, np.log(found)))


def shapes(influence: np.ndarray, steps: int) -> dict[str, AbstractSchedule]:
    """Uniform, dynamic (Lemma 4.1; the influence depends on T - t) and the exponential fit to it."""
    dynamic = FromInfluence(tuple((influence[-steps:] / influence[-steps:].max()).tolist()))
    return {
        "uniform": Constant(),
        "exponential": fit_exponential(dynamic, steps),
        "dynamic": dynamic,
    }


@dataclass(frozen=True)
class Task:
    name: str
    folder: str
    data_scale: float
    size: Size

    def problem(self) -> Problem:
        if self.name == "synthetic, logistic":
            return Problem("logistic", two_clusters(self.data_scale))
        each = self.name != "squared, one std"
        records = mnist35(self.folder, self.data_scale, each_feature=each)
        return Problem(self.name.split(",")[0], records)


@dataclass(frozen=True)
class Cell:
    """Results of one loss at one data scale: losses of all repeats by budget and schedule."""

    name: str
    data_scale: float
    influence: np.ndarray
    spread: float
    best_steps: dict[tuple[str, str], int]
    best: dict[tuple[str, str], np.ndarray]
    same: dict[tuple[str, str], np.ndarray]
    start: float


def run_task(task: Task) -> Cell:
    torch.set_num_threads(1)
    problem, size = task.problem(), task.size
    influence = estimate_influence(problem, size, hessian=task.name in HESSIAN)

    def losses(name: str, steps: int, budget: str, seeds: range) -> np.ndarray:
        plan = plan_of(shapes(influence, steps)[name], steps, budget)
        return np.array([descend(problem, plan, steps, seed) for seed in seeds])

    best_steps, best, same = {}, {}, {}
    seeds = range(size.repeats)
    choosing = range(CHOOSING_SEED, CHOOSING_SEED + size.choosing_repeats)
    for budget in ("paper", "exact"):
        for name in ("uniform", "exponential", "dynamic"):
            key = budget, name
            tried = {steps: losses(name, steps, budget, choosing).mean() for steps in size.grid}
            best_steps[key] = min(tried, key=tried.__getitem__)
            best[key] = losses(name, best_steps[key], budget, seeds)
            same[key] = losses(name, MAX_STEPS, budget, seeds)
    roots = np.sqrt(influence)
    spread = float(np.var(roots) / np.mean(influence))
    start = problem.value(problem.start(0))
    return Cell(task.name, task.data_scale, influence, spread, best_steps, best, same, start)
