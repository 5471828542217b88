"""When does noise that decreases over the run beat constant noise at equal privacy?

    python examples/papers/dynamic_noise.py --data DIR [--quick] [--output DIR]

Reproduces the experiments of "On Dynamic Noise Influence in Differential Private Learning"
(anonymous submission, Appendix D) with this package's own pieces, and then goes beyond them:

1. Full batches: final training loss of exponential and dynamic noise relative to uniform noise,
   over data scales, at the paper's budget (R = 0.3927, there called (4, 1e-8)-DP) and at the one
   that (4, 1e-8) really allows. Squared and logistic loss and a 2-layer network on MNIST35
   (1000 images of 3 and 5, PCA to 60 dimensions), logistic loss on two synthetic clusters.
   "One std" divides all components by one number instead of each by its own; "retrained" estimates
   the influence by retraining, as for the other losses, instead of from the Hessian.
2. Poisson minibatches, calibrated by PLD accounting, through an ordinary Trainer: MNIST-10
   logistic regression and a small CNN at ε = 0.5, 1 and 3.

DIR holds mnist.npz or torchvision's MNIST/raw; LIGHTNING_DP_DATA does the same. Pictures go to
./outputs/dynamic_noise. As in the paper, preprocessing, the choice of T and the estimates of the
influence look at the data and are not paid for: these are experiments on public data. Seeds are
fixed so that the tables can be made again, which no private run may do.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import dynamic_noise_minibatches as minibatches
import matplotlib.pyplot as plt
import numpy as np
import torch
from dynamic_noise_data import DATA_VARIABLE, Records, has_mnist, mnist35, two_clusters
from scipy.optimize import brentq
from torch import Tensor

from lightning_dp.accounting import calibrate, gdp_delta, gdp_epsilon
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.clipping import AbstractPerSampleGradients, bounded_sum
from lightning_dp.estimators import MeanGradient
from lightning_dp.functional import unflatten
from lightning_dp.influence import quadratic_influence, retraining_influence
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise import NoiseSource
from lightning_dp.plan import NoisePlan
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import AbstractSchedule, Constant, FromInfluence
from lightning_dp.schedules.fit import fit_exponential
from lightning_dp.world import World

LEARNING_RATE, CLIP_NORM, MAX_STEPS, HIDDEN = 0.1, 4.0, 100, 100
PAPER_BUDGET, EPSILON, DELTA = 0.3927, 4.0, 1e-8
OUTPUT = Path("outputs/dynamic_noise")
HESSIAN = ("squared", "squared, one std")  # whose influence is computed, not estimated
CHOOSING_SEED = 10_000  # the best T is chosen on other noise than it is judged on


@dataclass(frozen=True)
class Size:
    """How much is computed."""

    data_scales: tuple[float, ...]
    network_scales: tuple[float, ...]
    grid: tuple[int, ...]
    repeats: int
    choosing_repeats: int
    probes: int
    probe_repeats: int


FULL = Size(
    data_scales=(2, 5, 10, 15, 20, 30),
    network_scales=(2, 10, 25),
    grid=(1, 2, 3, 5, 8, 12, 18, 27, 40, 60, 80, 100),
    repeats=30,
    choosing_repeats=6,
    probes=9,
    probe_repeats=16,
)
QUICK = Size((5, 15), (10,), (3, 10, 30, 100), 20, 3, 4, 4)


# -- models: a vectorised answer to "what is the clipped sum of the gradients?" ------------------


class LayerGradients(AbstractPerSampleGradients):
    """Per-sample gradients of linear layers, never formed: record i of a layer has the gradient
    outer(delta_i, input_i), of norm ‖delta_i‖ ‖input_i‖."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self.layers = layers

    @property
    def count(self) -> int:
        return len(self.layers[0][0])

    def norms(self) -> Tensor:
        parts = [delta.square().sum(1) * inputs.square().sum(1) for delta, inputs in self.layers]
        return torch.stack(parts).sum(0).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        keep = (weights != 0).unsqueeze(1)
        sums = [
            torch.where(keep, delta * weights.unsqueeze(1), 0).T @ torch.where(keep, inputs, 0)
            for delta, inputs in self.layers
        ]
        return torch.cat([part.reshape(-1) for part in sums])

    def combine(self, weight, others):
        raise NotImplementedError("Full-batch descent asks for the gradient at one point only.")


@dataclass(frozen=True)
class Problem:
    """A loss on records: its value, and its per-sample gradients by hand."""

    loss: str
    records: Records

    def start(self, seed: int) -> list[Tensor]:
        """Zeros; for the network Kaiming-uniform weights, the bias as a last column."""
        d = self.records.x.shape[1]
        if self.loss != "network":
            return [torch.zeros(1, d, dtype=torch.float64)]
        generator = torch.Generator().manual_seed(seed)

        def layer(rows: int, columns: int) -> Tensor:
            bound = columns**-0.5
            weights = torch.rand(rows, columns + 1, generator=generator) * 2 - 1
            return weights.double() * bound

        return [layer(HIDDEN, d), layer(1, HIDDEN)]

    def _forward(self, params: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output for each record, and the inputs of each layer."""
        inputs = [self.records.x]
        if self.loss == "network":
            inputs = [with_one(self.records.x)]
            inputs.append(with_one((inputs[0] @ params[0].T).relu()))
        return (inputs[-1] @ params[-1].T).squeeze(1), inputs

    def value(self, params: list[Tensor]) -> float:
        output, _ = self._forward(params)
        if self.loss == "squared":
            return float((output - self.records.y).square().mean() / 2)
        return float(torch.nn.functional.softplus(-self.records.y * output).mean())

    def gradients(self, params: list[Tensor]) -> LayerGradients:
        output, inputs = self._forward(params)
        y = self.records.y
        delta = output - y if self.loss == "squared" else -y * torch.sigmoid(-y * output)
        layers = [(delta.unsqueeze(1), inputs[-1])]
        if self.loss == "network":
            back = delta.unsqueeze(1) * params[1][:, :-1] * (inputs[1][:, :-1] > 0)
            layers.insert(0, (back, inputs[0]))
        return LayerGradients(layers)


def with_one(x: Tensor) -> Tensor:
    """A column of ones for the bias."""
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)


def descend(problem: Problem, plan: NoisePlan, steps: int, seed: int) -> float:
    """The final loss of private gradient descent: a bare loop around the package's mechanism."""
    params = problem.start(seed)
    ledger = Ledger()
    ledger.begin("descent")
    mechanism = Mechanism(
        plan=plan,
        postprocessing=(),
        ledger=ledger,
        guard=FixedGuard(steps),
        num_records=len(problem.records.y),
        noise=NoiseSource(seed),
        world=World(),
    )
    while not mechanism.exhausted:
        query = mechanism.ask(params)
        mechanism.answer(bounded_sum(problem.gradients(params), query.clip_norm))
        estimate = unflatten(mechanism.tell(params), params)
        params = [p - LEARNING_RATE * g for p, g in zip(params, estimate, strict=True)]
    return problem.value(params)


# -- schedules at a budget -----------------------------------------------------------------------


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


# -- one cell of the experiment ------------------------------------------------------------------


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


# -- tables and pictures -------------------------------------------------------------------------


def relative(other: np.ndarray, base: np.ndarray) -> tuple[float, float, float]:
    """Mean, standard deviation and standard error of the paired relative difference, in percent."""
    difference = 100 * (other - base) / base.mean()
    spread = float(difference.std(ddof=1))
    return float(difference.mean()), spread, spread / math.sqrt(len(difference))


def sign(small: np.ndarray, large: np.ndarray) -> str:
    """<, > or = (within two standard errors of the paired difference, or 0.05 %)."""
    mean, _, error = relative(small, large)
    return "=" if abs(mean) <= 2 * error + 0.05 else "<" if mean < 0 else ">"


def order(losses: dict[str, np.ndarray]) -> tuple[str, bool]:
    """The three in the claimed order with the signs between them, and whether it holds."""
    first = sign(losses["dynamic"], losses["exponential"])
    second = sign(losses["exponential"], losses["uniform"])
    return f"dyn {first} exp {second} uni", ">" not in (first, second)


def percent(value: float) -> str:
    """With a sign; by its power of ten where it is beyond all bounds."""
    return f"{value:+.1f}" if abs(value) < 1000 else f"{value:+.0e}"


def print_table(name: str, cells: list[Cell], budget: str, repeats: int) -> None:
    print(f"\n### {name}: final training loss relative to uniform noise, {repeats} repeats\n")
    print(
        "| data scale | Var(√q)/E q | T uni/exp/dyn | uniform | exponential | dynamic | order "
        "| T = 100: uniform | exponential | dynamic | order |\n" + "|---" * 11 + "|"
    )
    for cell in cells:
        steps = "/".join(str(cell.best_steps[budget, n]) for n in NAMES)
        row = f"| {cell.data_scale:g} | {cell.spread:.3f} | {steps} "
        for results in (cell.best, cell.same):
            losses = {n: results[budget, n] for n in NAMES}
            base = losses["uniform"]
            row += f"| {base.mean():.4f} ± {base.std(ddof=1):.4f} "
            for other in NAMES[1:]:
                mean, spread, _ = relative(losses[other], base)
                row += f"| {percent(mean)} ± {percent(spread)[1:]} % "
            row += f"| {order(losses)[0]} "
        print(row + "|")


NAMES = ("uniform", "exponential", "dynamic")


def print_verdict(cells: list[Cell], budget: str) -> None:
    """How often the claim held, by how much the influence varies."""
    print(f"\n### The claim dynamic <= exponential <= uniform ({budget} budget, 2 SE per cell)\n")
    columns = "claim holds | dyn < uni | dyn > uni | median gain of dyn"
    print(f"| Var(√q)/E q | cells | best T: {columns} | T = 100: {columns} |")
    print("|---" * 10 + "|")
    for low, high in ((0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 1)):
        inside = [cell for cell in cells if low <= cell.spread < high]
        if not inside:
            continue
        row = f"| {low:g} to {high:g} | {len(inside)} "
        for results in ("best", "same"):
            by_cell = [{n: getattr(c, results)[budget, n] for n in NAMES} for c in inside]
            held = sum(order(losses)[1] for losses in by_cell)
            signs = [sign(losses["dynamic"], losses["uniform"]) for losses in by_cell]
            gains = [-relative(losses["dynamic"], losses["uniform"])[0] for losses in by_cell]
            row += f"| {held} | {signs.count('<')} | {signs.count('>')} "
            row += f"| {percent(float(np.median(gains)))} % "
        print(row + "|")


def draw(cells: list[Cell], path: Path) -> None:
    """Relative losses over data scales with Var(√q)/E q, and the influences below."""
    names = list(dict.fromkeys(cell.name for cell in cells))
    figure, axes = plt.subplots(2, len(names), figsize=(3.4 * len(names), 6), squeeze=False)
    for column, name in enumerate(names):
        of_name = [cell for cell in cells if cell.name == name]
        scales = [cell.data_scale for cell in of_name]
        top, bottom = axes[:, column]
        for color, other in (("C1", "exponential"), ("C2", "dynamic")):
            for style, results in (("-", "best"), (":", "same")):
                rows = [
                    relative(getattr(c, results)["exact", other], getattr(c, results)[U])
                    for c in of_name
                ]
                means, errors = [r[0] for r in rows], [2 * r[2] for r in rows]
                label = f"{other}, {'best T' if results == 'best' else 'T = 100'}"
                top.errorbar(scales, means, errors, color=color, ls=style, marker=".", label=label)
        top.axhline(0, color="grey", lw=0.8)
        low, high = top.get_ylim()
        top.set_ylim(max(low, -15), min(max(high, 1), 10))  # some go through the ceiling
        top.set(title=name, xlabel="data scale")
        right = top.twinx()
        right.plot(scales, [c.spread for c in of_name], color="k", ls="--", lw=0.8)
        right.set_ylim(0, 1)
        right.set_yticks([] if column < len(names) - 1 else [0, 0.5, 1])
        for cell in of_name:
            bottom.semilogy(
                cell.influence / cell.influence.sum(), label=f"scale {cell.data_scale:g}"
            )
        bottom.set(xlabel="step t")
        bottom.set_ylim(bottom=max(bottom.get_ylim()[0], 1e-12))
    axes[0, 0].set_ylabel("loss relative to uniform, % (2 SE)")
    axes[1, 0].set_ylabel("influence q_t (sum 1)")
    axes[0, 0].legend(fontsize=7)
    axes[1, 0].legend(fontsize=7)
    figure.suptitle("(4, 1e-8)-DP, full batches; dashed: Var(√q)/E q (right axis, 0 to 1)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


U = ("exact", "uniform")


def protocol(pool: ProcessPoolExecutor, folder: str, size: Size, output: Path) -> None:
    """Part 1."""
    linear = (*HESSIAN, "squared, retrained", "logistic", "synthetic, logistic")
    tasks = [Task("network", folder, scale, size) for scale in size.network_scales]
    tasks += [Task(name, folder, scale, size) for name in linear for scale in size.data_scales]
    cells = list(pool.map(run_task, tasks))
    cells = [cell for name in (*linear, "network") for cell in cells if cell.name == name]
    exact = exact_budget()
    paper = gdp_epsilon(math.sqrt(PAPER_BUDGET), DELTA)
    print("\n## 1. Full batches, the paper's protocol")
    print(
        f"\nR = {PAPER_BUDGET} is ({paper:.3f}, {DELTA:g})-DP exactly; ({EPSILON:g}, {DELTA:g}) "
        f"allows R = {exact:.4f} (add/remove)."
    )
    for budget, value in (("paper", PAPER_BUDGET), ("exact", exact)):
        print(f"\n## Budget: {budget}, R = {value:.4f}")
        for name in (*linear, "network"):
            of_name = [cell for cell in cells if cell.name == name]
            print_table(name, of_name, budget, size.repeats)
        print_verdict(cells, budget)
    draw(cells, output / "full_batch.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help=f"folder of MNIST (or set {DATA_VARIABLE})")
    parser.add_argument("--quick", action="store_true", help="a small part, in about 2 minutes")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the pictures")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    folder = options.data or os.environ.get(DATA_VARIABLE, "")
    if not has_mnist(folder):
        raise SystemExit(2)
    options.output.mkdir(parents=True, exist_ok=True)
    print("# Dynamic noise\n\n    python examples/papers/dynamic_noise.py --data DIR", end="")
    print(" --quick" if options.quick else "")
    packages = ("lightning-dp", "torch", "lightning", "opacus", "numpy", "scipy")
    print(f"\nPython {sys.version.split()[0]}, {', '.join(f'{p} {version(p)}' for p in packages)}")
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        protocol(pool, folder, QUICK if options.quick else FULL, options.output)
        print(f"\n({time.perf_counter() - start:.0f} s)", flush=True)
        minibatches.compare(pool, folder, options.output, quick=options.quick)
    print(f"\n({time.perf_counter() - start:.0f} s in all; pictures in {options.output})")


if __name__ == "__main__":
    main()
