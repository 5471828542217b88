"""Compare every method of the package with DP-SGD, at equal ε and equal tuning effort.

python examples/papers/all_methods.py --out all.jsonl                      # tune, then the table's runs
python examples/papers/all_methods.py --out all.jsonl --report results     # the page, from the file

Two problems for the table, a9a by logistic regression and the first 6,000 digits of MNIST (2 x 2 pixels
averaged; with all of them and so few passes, ε made no difference) by a small CNN; and the digits of
scikit-learn, for which nothing is downloaded. All runs of a problem draw equally many
records. ``--jobs`` runs processes side by side, ``--minutes`` ends in order; the same command goes on.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from archives import DATA_VARIABLE
from common import (
    FEWEST_PAIRS,
    NOISES,
    RUNGS,
    TUNING_SEED,
    Agenda,
    Group,
    Outcome,
    Results,
    Run,
    Setting,
    Summary,
    design,
    final,
    holm,
    load,
    paired_p,
    run_all,
    table,
    tuning,
)
from scratch_ledger import ScratchLedger, mechanism_of
from torch import Tensor, nn
from trainee import Trainee

from lightning_dp import PrivacyWarning
from lightning_dp._noise import random_generator
from lightning_dp.accounting import calibrate, epsilon
from lightning_dp.boundary import BoundedSum, Query
from lightning_dp.estimators import AbstractEstimator, CubicNewton, Diff2, MeanGradient, Storm
from lightning_dp.federated import AsyncClient, AsyncPlan, AsyncServer, ClientPrivacy
from lightning_dp.federated.asynchronous import InverseSteps, PolynomialSizes
from lightning_dp.functional import flatten, unflatten
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.postprocessing import AbstractPostProcessor, LaplacianSmoothing, Momentum
from lightning_dp.sampling import Poisson
from lightning_dp.schedules import AbstractSchedule, Constant, Exponential

DELTA = 1e-5
EPSILONS = (1.0, 3.0, 0.3, 8.0)  # in the order of the work
FIRST_NOISES = 5  # of each cell, before any is filled up
CLIENTS, LAG = 5, 2

# -- problems --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A model, its data, and what is tuned of every method.

    Args:
        epochs: of every run, whatever its batch size: all runs draw equally many records.
        batches, clips: B and C.
        paths: s T, the number of steps T times the length s = η C of the longest step of SGD: what
            the parameters can go at most. Of AdamW s is 3 η √d.
        by_accuracy: the criterion of tuning and of the table; else cross-entropy.
    """

    name: str
    title: str
    make: Callable[[], nn.Module]
    epochs: int
    batches: tuple[int, ...]
    clips: tuple[float, ...]
    paths: tuple[float, ...]
    by_accuracy: bool

    def score(self, outcome: Outcome) -> float:
        """Of tuning, on validation records; larger is better."""
        return outcome.validation[1] if self.by_accuracy else -outcome.validation[0]

    def criterion(self, outcome: Outcome) -> float:
        """Of the table, on test records; larger is better."""
        return 100 * outcome.test[1] if self.by_accuracy else -outcome.test[0]


def logistic_regression() -> nn.Module:
    layer = nn.Linear(123, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def small_cnn() -> nn.Module:
    """Of 14 x 14 pixels: 2,114 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 4, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 2, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 3 * 3, 10)),
    )


def digits_cnn() -> nn.Module:
    """Of 8 x 8 pixels: 938 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 2 * 2, 10)),
    )


PROBLEMS = {
    problem.name: problem
    for problem in (
        Problem(
            *("a9a", "a9a, logistic regression", logistic_regression, 10),
            *((512, 2048, 8192), (1.5, 3.0, 6.0), (80.0, 160.0, 320.0, 640.0, 1280.0), False),
        ),
        Problem(
            *("mnist", "MNIST, 6,000 digits of 14 × 14 pixels, CNN", small_cnn, 15),
            *((256, 512, 1024), (0.2, 0.6, 2.0), (60.0, 120.0, 240.0, 480.0, 960.0), True),
        ),
        Problem(
            *("digits", "digits of 8 × 8 pixels, CNN", digits_cnn, 20),
            *((64, 128, 256), (0.3, 1.0, 3.0), (60.0, 120.0, 240.0, 480.0, 960.0), True),
        ),
    )
}


@dataclass(frozen=True)
class Data:
    """Records to train on, to choose by, and to report on."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor, held_out: int) -> Data:
        """The last training records, in an order that never changes, are for validation."""
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(y)))
        train, validation = order[:-held_out], order[-held_out:]
        return cls((x[train], y[train]), (x[validation], y[validation]), (x_test, y_test))


@lru_cache(maxsize=2)
def data_of(name: str, folder: str) -> Data:
    """The data of a problem; SystemExit or ImportError says why they are not to be had."""
    if name == "digits":
        from sklearn.datasets import load_digits

        x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
        x, y = x.float().reshape(-1, 1, 8, 8) / 16, y.long()
        order = torch.from_numpy(np.random.default_rng(1).permutation(len(y)))
        train, test = order[:1437], order[1437:]
        return Data.of(x[train], y[train], x[test], y[test], 240)
    sys.path.append(str(Path(__file__).resolve().parents[1] / "federated"))
    from problems import PROBLEMS as SOURCES
    from problems import arrays

    x, y, x_test, y_test = arrays(SOURCES[name], folder)
    arrays.cache_clear()
    if name == "a9a":
        return Data.of(x, y, x_test, y_test, len(y) // 10)
    x, y = x[:10_000], y[:10_000]
    x, x_test = ((nn.functional.avg_pool2d(part, 2) - 0.13) / 0.31 for part in (x, x_test))
    return Data.of(x, y, x_test, y_test, 4_000)


# -- methods ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The training of one run, without its data and noise.

    Args:
        estimator, schedule, postprocessing: of the package.
        learning_rate: η, the mean over the run.
        decays: η falls in a straight line to 0 from twice its mean.
        optimizer: of torch.
        average: what is evaluated is a moving average of the parameters over this share of the run.
    """

    estimator: AbstractEstimator
    learning_rate: float
    decays: bool
    schedule: AbstractSchedule = field(default_factory=Constant)
    postprocessing: tuple[AbstractPostProcessor, ...] = ()
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    average: float = 0.0


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Args:
        extras: what is tuned besides path, clip norm, batch size and decay of the learning rate.
        plan: from a setting, the number of steps and that of parameters; None is asynchronous.
    """

    title: str
    extras: Mapping[str, Sequence[Any]]
    plan: Callable[[Setting, int, int], Plan] | None


def sgd(setting: Setting, steps: int, size: int, **changes: Any) -> Plan:
    """DP-SGD, or what is one change away from it."""
    clip = setting["clip"]
    rate = setting["path"] / (steps * clip)
    return replace(Plan(MeanGradient(clip), rate, setting["decays"]), **changes)


def decaying_noise(setting: Setting, steps: int, size: int) -> Plan:
    rate = -math.log(setting["last"]) / max(1, steps - 1)
    return sgd(setting, steps, size, schedule=Exponential(rate))


def smoothing(setting: Setting, steps: int, size: int) -> Plan:
    smooth = LaplacianSmoothing(setting["sigma"], per_parameter=True)
    return sgd(setting, steps, size, postprocessing=(smooth,))


def momentum(setting: Setting, steps: int, size: int) -> Plan:
    return sgd(setting, steps, size, postprocessing=(Momentum(setting["beta"]),))


def averaging(setting: Setting, steps: int, size: int) -> Plan:
    return sgd(setting, steps, size, average=setting["share"])


def adamw(setting: Setting, steps: int, size: int) -> Plan:
    plan = sgd(setting, steps, size)
    optimizer = partial(torch.optim.AdamW, betas=(setting["beta1"], 0.999), weight_decay=0.0)
    rate = setting["path"] / (3 * steps * math.sqrt(size))
    return replace(plan, learning_rate=rate, optimizer=optimizer)


def diff2(setting: Setting, steps: int, size: int) -> Plan:
    """C2 = radius / η: a difference is clipped to ``radius`` times the length of the estimate."""
    plan, clip = sgd(setting, steps, size), setting["clip"]
    bound = setting["radius"] / plan.learning_rate
    return replace(plan, estimator=Diff2(setting["every"], clip, bound, setting["split"]))


def storm(setting: Setting, steps: int, size: int) -> Plan:
    plan, clip = sgd(setting, steps, size), setting["clip"]
    return replace(
        plan, estimator=Storm(setting["a"], clip, setting["radius"] / plan.learning_rate)
    )


def newton(setting: Setting, steps: int, size: int) -> Plan:
    """Inner steps such that a round goes about as far as a step of DP-SGD on this path."""
    clip, inner = setting["clip"], setting["inner"]
    estimator = CubicNewton(
        strong_convexity=1e-6,  # so that all inner steps are max_step_size long
        hessian_lipschitz=setting["cubic"],
        inner_steps=inner,
        max_grad_norm=clip,
        max_hessian_norm=clip * setting["curvature"],
        max_step_size=1.5 * setting["path"] / (steps * clip * inner),
    )
    return Plan(estimator, 1.0, setting["decays"])


RADII = (0.05, 0.2, 0.8)
METHODS = {
    "sgd": Method("DP-SGD", {}, sgd),
    "noise": Method("noise that decays", {"last": (0.25, 0.5, 0.75)}, decaying_noise),
    "momentum": Method("`Momentum`", {"beta": (0.5, 0.8, 0.9)}, momentum),
    "average": Method("average of the weights", {"share": (0.05, 0.15, 0.4)}, averaging),
    "adamw": Method("DP-AdamW", {"beta1": (0.0, 0.9)}, adamw),
    "smoothing": Method("`LaplacianSmoothing`", {"sigma": (0.3, 1.0, 3.0)}, smoothing),
    "diff2": Method("`Diff2`", {"every": (3, 10), "radius": RADII, "split": (1.25, 2.5)}, diff2),
    "storm": Method("`Storm`", {"a": (0.1, 0.3, 0.6), "radius": RADII}, storm),
    "newton": Method(
        "`CubicNewton`", {"inner": (2, 3), "curvature": (0.1, 0.5), "cubic": (0.0, 1.0)}, newton
    ),
    "async": Method("`AsyncServer`, noise of each client", {"growth": (0.0, 2.0, 8.0)}, None),
}


def settings_of(problem: Problem, method: Method) -> tuple[Setting, ...]:
    """Equally many for every method; path, clip norm, batch size and decay are the same ones."""
    common = {"path": problem.paths, "clip": problem.clips, "batch": problem.batches}
    return design({**common, "decays": (False, True), **method.extras})


# -- one run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """The records of one client: every fifth."""

    trainee: Trainee
    client: int
    unit = "record"

    @property
    def num_records(self) -> int:
        return len(range(self.client, self.trainee.num_records, CLIENTS))

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        return self.trainee.bounded_sum(query, self.client + CLIENTS * np.array(records, dtype=int))


@lru_cache(maxsize=256)
def spent(history: tuple[Any, ...]) -> float:
    """ε of what ran, by the accountant."""
    return epsilon(list(history), DELTA)


@lru_cache(maxsize=256)
def noise_plan(
    schedule: AbstractSchedule, estimator: AbstractEstimator, rate: float, steps: int, target: float
) -> NoisePlan:
    """The least noise of this shape that keeps to the budget."""
    plan = NoisePlan(1.0, schedule, Poisson(), rate, estimator)
    return replace(plan, scale=calibrate(plan.relative_noise, rate, steps, target, DELTA))


def train(trainee: Trainee, plan: Plan, batch: int, epochs: int, target: float, seed: int) -> float:
    """A bare loop around the package's mechanism, with the random numbers of a Trainer's run; ε."""
    count, net = trainee.num_records, trainee.net
    each = math.ceil(count / batch)
    steps, rate = epochs * each, min(1.0, batch / count)
    noise = noise_plan(plan.schedule, plan.estimator, rate, steps, target)
    mechanism = mechanism_of(noise, steps, count, seed, plan.postprocessing)
    optimizer = plan.optimizer(trainee.params, lr=plan.learning_rate)
    falls = (lambda step: 2 * (1 - step / steps)) if plan.decays else (lambda step: 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, falls)
    average = flatten(trainee.params)
    for step in range(steps):
        if step % each == 0:
            rng = random_generator(seed, 1, 0, step // each)
        drawn = Poisson().draw(count, rate, rng)
        query = mechanism.ask(trainee.params)
        if query is not None:
            mechanism.answer(trainee.bounded_sum(query, drawn))

        def again(records: np.ndarray = drawn) -> None:
            assert mechanism.query is not None
            mechanism.answer(trainee.bounded_sum(mechanism.query, records))

        estimate = unflatten(mechanism.tell(trainee.params, again), trainee.params)
        for param, gradient in zip(trainee.params, estimate, strict=True):
            param.grad = gradient
        optimizer.step()
        scheduler.step()
        if plan.average:  # of what there is, at first
            weight = max(1 / (step + 1), 1 / max(1.0, plan.average * steps))
            average = torch.lerp(average, flatten(trainee.params), weight)
    if plan.average:
        nn.utils.vector_to_parameters(average, net.parameters())
    mechanism.end()
    return spent(tuple(mechanism.ledger.history()))


@lru_cache(maxsize=256)
def scale_of(rates: tuple[float, ...], target: float) -> float:
    """z of all rounds with these sampling rates."""
    return calibrate(lambda i: 1.0, rates.__getitem__, len(rates), target, DELTA)


def federate(
    trainee: Trainee, setting: Setting, epochs: int, target: float, seed: int
) -> tuple[float, Tensor]:
    """The largest ε of a client, and the model: the records dealt out to clients with own noise."""
    shards = [Shard(trainee, client) for client in range(CLIENTS)]
    own = min(shard.num_records for shard in shards)
    mean, growth = min(setting["batch"] / CLIENTS, own / 2), setting["growth"]
    rounds = max(1, round(epochs * own / mean))
    first = 2 * mean / (2 + growth)
    sizes = PolynomialSizes(growth * first / max(1, rounds - 1), first)
    rate = setting["path"] / (rounds * setting["clip"] * mean * CLIENTS)
    plan = AsyncPlan(rounds, sizes, InverseSteps(rate), lag=LAG)
    rates = tuple(sizes(i) / own for i in range(rounds))
    scale = scale_of(rates, target)
    ledgers = [ScratchLedger() for _ in shards]
    server = AsyncServer("comparison", plan, flatten(trainee.params), CLIENTS)
    clients = [
        AsyncClient(
            shard,
            plan,
            ClientPrivacy(setting["clip"], scale, math.inf, DELTA, seed=seed * CLIENTS + number),
            ledger,
            run="comparison",
        )
        for number, (shard, ledger) in enumerate(zip(shards, ledgers, strict=True))
    ]
    order = random_generator(seed, 3)
    while not server.is_done:
        number = int(order.integers(CLIENTS))
        if (request := server.request(number)) is not None:
            server.receive(number, clients[number].answer(request))
    return max(spent(tuple(ledger.history())) for ledger in ledgers), server.point


def execute(run: Run, folder: str = "") -> Outcome:
    """One training and what came of it; a diverged one has an infinite loss."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PrivacyWarning)  # of feedback: the design seeks its border
    begin = time.process_time()
    problem, method = PROBLEMS[run.problem], METHODS[run.method]
    data = data_of(run.problem, folder)
    setting = settings_of(problem, method)[run.setting]
    torch.manual_seed(run.seed)
    trainee = Trainee(problem.make(), *data.train)
    batch, size = setting["batch"], sum(param.numel() for param in trainee.params)
    steps = problem.epochs * math.ceil(trainee.num_records / batch)
    total, diverged = math.nan, False
    try:
        if method.plan is None:
            total, point = federate(trainee, setting, problem.epochs, run.epsilon, run.seed)
            nn.utils.vector_to_parameters(point, trainee.params)
        else:
            plan = method.plan(setting, steps, size)
            total = train(trainee, plan, batch, problem.epochs, run.epsilon, run.seed)
    except RuntimeError as error:  # of estimators whose parameters are no longer finite
        if getattr(error, "topic", "") != "diverged":
            raise
        diverged = True
    trainee.passes.detach()
    found = [(math.inf, 0.0)] * 2
    if not diverged:
        found = [trainee.measure(records) for records in (data.validation, data.test)]
    passes = trainee.evaluations / trainee.num_records
    return Outcome(*found, total, passes, time.process_time() - begin)


# -- which runs ------------------------------------------------------------------------------------


def groups_of(problem: str, epsilon: float) -> list[Group]:
    return [
        Group(problem, name, epsilon, settings_of(PROBLEMS[problem], method))
        for name, method in METHODS.items()
    ]


def work(
    problems: Sequence[str], epsilons: Sequence[float], noises: int
) -> list[tuple[Group, int]]:
    """Groups in the order of their worth, with the noises that they are to have by then."""
    order = []
    for problem in problems:
        for count in (noises,) if problem == "a9a" else (min(FIRST_NOISES, noises), noises):
            order += [(group, count) for e in epsilons for group in groups_of(problem, e)]
    return sorted(order, key=lambda each: lateness(each[0]))


def lateness(group: Group) -> int:
    """Return the rank of a group in the agenda: Newton on networks and federations take longest."""
    if METHODS[group.method].plan is None:
        return 2
    return int(group.method == "newton" and group.problem != "a9a")


def score(problem: str, outcome: Outcome) -> float:
    return PROBLEMS[problem].score(outcome)


def available(problems: Sequence[str], folder: str) -> list[str]:
    """Those whose data are there; says which are not."""
    found = []
    for name in problems:
        try:
            data_of(name, folder)
            found.append(name)
        except (SystemExit, ImportError) as reason:
            print(f"{name} is left out: {reason}", file=sys.stderr)
    return found


# -- the page --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The runs of the table of one group, and how they compare with those of DP-SGD."""

    group: Group
    winner: int | None
    outcomes: list[Outcome]
    values: list[float]
    gains: list[float]
    p: float = 1.0

    @property
    def verdict(self) -> int:
        """1 or -1 where the difference is beyond chance (adjusted p below 0.05), else 0."""
        return int(np.sign(np.mean(self.gains))) if self.gains and self.p < 0.05 else 0

    def value(self) -> str:
        """Mean ± standard deviation, and the interval of the mean."""
        if not self.values:
            return "–"
        failed = sum(not math.isfinite(outcome.test[0]) for outcome in self.outcomes)
        count = "" if len(self.values) >= NOISES else f", n = {len(self.values)}"
        if failed:
            return f"{failed} of {len(self.values)} diverged"
        if PROBLEMS[self.group.problem].by_accuracy:
            return Summary.of(self.values).text(2, note=count)
        accuracy = 100 * float(np.mean([outcome.test[1] for outcome in self.outcomes]))
        return Summary.of(np.negative(self.values)).text(4, f", {accuracy:.2f} %", count)

    def gain(self) -> str:
        """The mean of the paired differences, its interval, and p."""
        if len(self.gains) < 2 or not np.isfinite(self.gains).all():
            return "–"
        scale, digits = (1, 2) if PROBLEMS[self.group.problem].by_accuracy else (1000, 1)
        return Summary.of(np.multiply(scale, self.gains)).gain(digits, self.p)


def cells_of(problem: str, target: float, results: Results) -> dict[str, Cell]:
    """All methods on one problem at one ε; p by Wilcoxon's test, adjusted over the methods by Holm."""
    cells: dict[str, Cell] = {}
    base: dict[int, float] = {}
    for group in groups_of(problem, target):
        _, winner = tuning(group, results, PROBLEMS[problem].score)
        runs = [] if winner is None else final(group, winner, NOISES)
        found = {run.seed: results[run] for run in runs if run in results}
        values = {seed: PROBLEMS[problem].criterion(each) for seed, each in found.items()}
        if group.method == "sgd":  # which comes first
            base = values
        gains = [values[seed] - base[seed] for seed in values if seed in base]
        cells[group.method] = Cell(
            group, winner, list(found.values()), list(values.values()), gains
        )
    others = [name for name in cells if name != "sgd" and cells[name].gains]
    pairs = [np.array(cells[name].gains) for name in others]
    adjusted = holm([paired_p(each, np.zeros_like(each)) for each in pairs])
    for name, p in zip(others, adjusted, strict=True):
        cells[name] = replace(cells[name], p=p)
    return cells


def verdicts(all_cells: Sequence[Cell], wanted: int) -> str:
    """The cells that differ from DP-SGD in one direction, by method."""
    lines = []
    for name, method in METHODS.items():
        found: dict[str, list[str]] = {}
        for cell in all_cells:
            is_judged = len(cell.gains) >= FEWEST_PAIRS and name != "sgd"
            if cell.group.method == name and is_judged and cell.verdict == wanted:
                found.setdefault(cell.group.problem, []).append(f"{cell.group.epsilon:g}")
        if found:
            where = "; ".join(f"{problem} at ε = {', '.join(e)}" for problem, e in found.items())
            lines.append(f"- {method.title}: {where}")
    return "\n".join(lines) or "- nothing"


def setting_text(cell: Cell) -> str:
    if cell.winner is None:
        return "–"
    setting = cell.group.settings[cell.winner]
    names = {"decays": "decays" if setting["decays"] else "constant"}
    return ", ".join(names.get(key, f"{key} {value:g}") for key, value in setting.items())


def page(results: Results, command: str, picture: str) -> str:
    """The results in Markdown."""
    every = [
        (problem, target, cells_of(problem, target, results))
        for problem in PROBLEMS
        for target in sorted(EPSILONS)
        if any(run.problem == problem and run.epsilon == target for run in results)
    ]
    flat = [cell for _, _, cells in every for cell in cells.values()]
    seconds = sum(outcome.seconds for outcome in results.values())
    largest = max(
        (outcome.spent / run.epsilon for run, outcome in results.items() if outcome.spent > 0),
        default=math.nan,
    )
    rounds = ", then ".join(
        f"{count} settings with {noises} new noise{'s' * (noises > 1)}" for count, noises in RUNGS
    )
    parts = [
        f"# What gains what\n\n![gain over DP-SGD]({picture})",
        "**Claim, of each method's paper:** it gains over DP-SGD at equal ε. **Here** all are tuned "
        "with equal effort, draw equally many records, and are compared in pairs of runs with the same "
        "seed.",
        f"`{command}`",
        f"{len(results):,} runs, {seconds / 60:.0f} CPU minutes, one thread each. No run spent more than "
        f"{largest:.4f} of its ε (δ = {DELTA:g}, add/remove, Poisson batches), by the accountant from "
        "its ledger.",
        f"## What held\n\nBetter than DP-SGD (adjusted p < 0.05):\n\n{verdicts(flat, 1)}",
        f"## What did not\n\nWorse than DP-SGD (adjusted p < 0.05):\n\n{verdicts(flat, -1)}\n\n"
        f"No difference beyond chance:\n\n{verdicts(flat, 0)}\n\n"
        f"What is in no list has fewer than {FEWEST_PAIRS} pairs of runs, or none.",
        "## How\n\n"
        f"- Tuning: {rounds}; survivors by the mean on validation records (cross-entropy on a9a, "
        f"accuracy elsewhere) over all noises so far: {TUNING_RUNS} runs for every method, problem and "
        "ε. The settings were fixed before, every value of every column equally often; path, clip norm, "
        "batch size and decay of the learning rate are the same columns for all methods, and what a "
        "method has besides is tuned within the same number. The choice itself is not in ε.\n"
        f"- The table: test records, noises 0 to {NOISES - 1}, with which nothing was tuned. Mean ± "
        "standard deviation over runs, in brackets half the 95 % interval of the mean (Student).\n"
        "- The gain: paired differences by seed (first weights and noise), mean ± half its 95 % "
        "interval; p by Wilcoxon's signed-rank test, two-sided, adjusted over the methods of a column "
        "by Holm. Bold where p < 0.05. It holds for these settings: another tuning may find others.\n"
        "- A path is the number of steps times the length of the longest one (of AdamW three times its "
        "learning rate times √d); a radius is the bound of a difference over the length of the "
        "estimate.\n"
        "- An average of the weights, momentum, smoothing and AdamW work on what was released; their ε "
        "is that of DP-SGD. DP-AdamW is `torch.optim.AdamW`, not the package's `DPAdamW`. `AsyncServer` "
        f"is another trust model: {CLIENTS} clients that trust no server add noise each, so theirs is "
        "√5 times as large in the sum.",
    ]
    for problem in dict.fromkeys(name for name, _, _ in every):
        parts += section(PROBLEMS[problem], [row[1:] for row in every if row[0] == problem])
    return "\n\n".join(parts) + "\n"


TUNING_RUNS = sum(count * noises for count, noises in RUNGS)


def section(problem: Problem, columns: Sequence[tuple[float, dict[str, Cell]]]) -> list[str]:
    """Values, gains, costs and settings of one problem."""
    header = ["method", *(f"ε = {target:g}" for target, _ in columns)]

    def rows(text: Callable[[Cell], str], names: Sequence[str]) -> list[list[str]]:
        return [
            [METHODS[name].title, *(text(cells[name]) for _, cells in columns)] for name in names
        ]

    names = list(METHODS)
    what = "Test accuracy in %" if problem.by_accuracy else "Test cross-entropy, and accuracy"
    unit = "in points of accuracy" if problem.by_accuracy else "in cross-entropy, times 1000"
    return [
        f"## {problem.title}",
        what,
        table(header, rows(Cell.value, names)),
        f"Gain over DP-SGD {unit} (positive is better)",
        table(header, rows(Cell.gain, names[1:])),
        "Passes over the data, and seconds, of one run",
        table(header, rows(cost, names)),
        "Chosen settings",
        table(header, rows(setting_text, names)),
    ]


def cost(cell: Cell) -> str:
    if not cell.outcomes:
        return "–"
    passes, seconds = (
        float(np.mean([getattr(outcome, name) for outcome in cell.outcomes]))
        for name in ("passes", "seconds")
    )
    return f"{passes:.0f}, {seconds:.1f} s"


def draw(results: Results, path: Path) -> None:
    """The gains with their intervals; nothing without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("matplotlib is missing: no picture.", file=sys.stderr)
        return
    names = [name for name in PROBLEMS if any(run.problem == name for run in results)]
    figure, axes = plt.subplots(1, max(1, len(names)), figsize=(6 * len(names), 5), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for place, (key, method) in enumerate(list(METHODS.items())[1:]):
            points = []
            for column, target in enumerate(sorted(EPSILONS)):
                gains = cells_of(name, target, results)[key].gains
                if len(gains) > 1 and np.isfinite(gains).all():
                    found = Summary.of(gains)
                    points.append((column + (place - 4) / 14, found.mean, found.margin))
            if points:
                axis.errorbar(*zip(*points, strict=True), fmt="o", ms=4, label=method.title)
        axis.axhline(0, color="black", lw=0.8)
        axis.set_yscale("symlog", linthresh=1.0 if PROBLEMS[name].by_accuracy else 0.003)
        axis.set_xticks(range(len(EPSILONS)), [f"ε = {target:g}" for target in sorted(EPSILONS)])
        axis.set_title(PROBLEMS[name].title)
    axes[0][0].set_ylabel("gain over DP-SGD (points, or cross-entropy)")
    if axes[0][-1].get_legend_handles_labels()[0]:
        axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default=os.environ.get(DATA_VARIABLE, ""))
    parser.add_argument("--out", type=Path, default=Path("outputs/all_methods.jsonl"))
    parser.add_argument("--report", type=Path, help="a folder: write the page there, run nothing")
    parser.add_argument("--problems", default="a9a,mnist,digits", help="in the order of the work")
    parser.add_argument("--epsilons", default=",".join(f"{e:g}" for e in EPSILONS))
    parser.add_argument("--noises", type=int, default=NOISES, help="of the table")
    parser.add_argument("--stage", choices=("tune", "final", "all"), default="all")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after that")
    options = parser.parse_args()
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        results = load(options.out)
        draw(results, options.report / "all_methods.png")
        command = "python examples/papers/all_methods.py --data DIR --problems a9a,mnist --jobs 16"
        text = page(results, command, "all_methods.png")
        (options.report / "all_methods.md").write_text(text, encoding="utf-8")
        return
    problems = available(options.problems.split(","), options.data)
    noises = 0 if options.stage == "tune" else options.noises
    order = work(problems, [float(e) for e in options.epsilons.split(",")], noises)
    agenda, before = Agenda(order, score), len(load(options.out))

    def following(results: Results) -> Iterator[Run]:
        runs = agenda.following(results)
        is_table = options.stage == "final"
        return (run for run in runs if not is_table or run.seed < TUNING_SEED)

    results = run_all(
        following,
        partial(execute, folder=options.data),
        options.out,
        jobs=options.jobs,
        minutes=options.minutes,
    )
    left = next(following(results), None)
    print(f"{len(results) - before} runs now, {len(results)} in {options.out}; next: {left}")


if __name__ == "__main__":
    main()
