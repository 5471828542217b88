"""Does DIFF2 win on the loss in another form than the paper's, at equal privacy and tuning?

    python examples/papers/diff2_variants.py --data DIR [--sets california gas] [--jobs N]

Plain DIFF2-GD with full batches does not (results/diff2.md). Next to it and DP-GD here: both on Poisson
minibatches; restarts on larger batches; restarts that are triggered by what was released; and the paper's
Algorithm 4, DIFF2-BVR-L-SGD, whose ten workers in turn make local steps between two rounds. All at one ε
(add/remove, by the accountant), 38 runs of tuning each (``common.RUNGS``, on the train loss), 20 noises.

A trigger looks at released values only. Full batches are Gaussian mechanisms, and Σ 1/z² of the run is at
most that of its restarts and differences, however they follow each other: their composition is private
whatever the order was chosen by (Smith and Thakurta, "Fully adaptive composition for Gaussian
differential privacy", 2022). Batches that are samples have no such theorem here: they restart by the
calendar.

Finished runs go to --out, a line each; the same command goes on, and then prints the tables. Tuning and
standardising look at the data and are not paid for by ε: these are experiments on public data.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from archives import DATA_VARIABLE, folder_of
from common import (
    NOISES,
    TEST,
    Agenda,
    Group,
    Outcome,
    Results,
    Run,
    Setting,
    Summary,
    design,
    final,
    gains_text,
    print_heading,
    run_all,
    table,
    tuning,
)
from diff2_data import SETS, Split, raw, split
from diff2_model import Answers, Network
from torch import Tensor

from lightning_dp._noise import NoiseSource, random_generator
from lightning_dp._world import World
from lightning_dp.accounting import PoissonGaussian, calibrate, epsilon
from lightning_dp.accounting.events import AbstractEvent, Gaussian
from lightning_dp.boundary import Query, Term, add_noise, bounded_sum
from lightning_dp.functional import flatten, unflatten
from lightning_dp.sampling import Poisson

DELTA, WORKERS = 1e-5, 10
COMMON: dict[str, Sequence[Any]] = {
    "rate": tuple(0.5**i for i in range(1, 7)),
    "clip": (1.0, 3.0),
    "rounds": (500, 2000),
}
DIFFERENCES: dict[str, Sequence[Any]] = {"every": (6, 20, 60), "diff": (3.0, 10.0)}
BATCHES: dict[str, Sequence[Any]] = {"batch": (1024, 4096)}
METHODS: dict[str, dict[str, Sequence[Any]]] = {
    "DP-GD": {},
    "DIFF2-GD": DIFFERENCES,
    "DIFF2-GD, triggered restarts": {**DIFFERENCES, "trigger": (0.3, 1.0, 3.0)},
    "DP-SGD": BATCHES,
    "DIFF2-SGD": {**DIFFERENCES, **BATCHES},
    "DIFF2-SGD, larger batches at restarts": {**DIFFERENCES, **BATCHES, "larger": (2.0, 4.0)},
    "DIFF2-BVR-L-SGD": {
        **DIFFERENCES,
        "rounds": (100, 500),  # it is to save them
        "local": (4, 8),
        "local_batch": (256, 1024),
        "local_noise": (1.0, 3.0, 10.0),
    },
}


@dataclass(frozen=True)
class Plan:
    """One training.

    Args:
        rate: η.
        clip, diff: C1, and C2 = C3.
        every: T; with a trigger R / T restarts are paid for.
        batch: expected; 0 is all records.
        larger: so much larger are the batches of restarts.
        trigger: restart where the noise that differences added has so many times the variance of
            that of the restart; 0 is every T rounds.
        local: K, the steps of a round, of which K - 1 are one worker's, on ``local_batch`` records.
        local_noise: z of those over z of a restart.
    """

    rate: float
    clip: float
    rounds: int
    every: int = 1
    diff: float = 1.0
    batch: int = 0
    larger: float = 1.0
    trigger: float = 0.0
    local: int = 1
    local_batch: int = 1
    local_noise: float = 1.0

    @property
    def restarts(self) -> int:
        return -(-self.rounds // self.every)

    @property
    def ratio(self) -> float:
        """z of a difference over that of a restart, at the paper's split u = 1.25."""
        return math.sqrt((self.every - 1) / 0.25) if self.every > 1 else 1.0

    def kinds(self, count: int) -> list[tuple[float, float, int]]:
        """Relative z, sample rate and number of the queries that one record is in."""
        q = min(1.0, self.batch / count) if self.batch else 1.0
        turns = -(-self.rounds // WORKERS) * (self.local - 1)
        share = min(1.0, self.local_batch * WORKERS / count)
        kinds = [
            (1.0, min(1.0, q * self.larger), self.restarts),
            (self.ratio, q, self.rounds - self.restarts),
            (self.local_noise, share, turns),
        ]
        return [kind for kind in kinds if kind[2]]


@lru_cache(maxsize=256)
def scale_of(plan: Plan, count: int, target: float) -> float:
    """z of restarts: the least that the budget allows; 0 without one."""
    if math.isinf(target):
        return 0.0
    places = [(z, q) for z, q, number in plan.kinds(count) for _ in range(number)]
    z, q = zip(*places, strict=True)
    return calibrate(z, q.__getitem__, len(places), target, DELTA)


@dataclass
class Course:
    """A training on its way: noise, batches, and what was charged.

    Args:
        charged: kinds of queries with their counts; of local steps those of the worker with most.
    """

    data: Split
    plan: Plan
    scale: float
    seed: int

    def __post_init__(self) -> None:
        self.noise, self.rng = NoiseSource(self.seed), random_generator(self.seed, 1)
        self.whole = Answers(Network(self.data))
        self.count = self.data.train.count
        self.charged: dict[tuple[float, float], int] = {}
        self.evaluations = 0

    def release(
        self,
        params: list[Tensor],
        before: list[Tensor] | None,
        bound: float,
        z: float,
        rate: float,
        worker: int | None = None,
    ) -> Tensor:
        """The noised mean gradient, or difference to the gradient before, of a batch."""
        of = self.count if worker is None else -(-self.count // WORKERS)
        answers = self.whole
        if rate < 1 or worker is not None:
            drawn = Poisson().draw(of, rate, self.rng)
            rows = torch.from_numpy(np.asarray(drawn))
            if worker is not None:
                rows = rows * WORKERS + worker
                rows = rows[rows < self.count]
            train = self.data.train.take(rows)
            answers = Answers(Network(replace(self.data, train=train)))
        terms = [Term()] if before is None else [Term(), Term(-1.0, flatten(before))]
        gradients = answers.gradients(Query(tuple(terms), bound, z), params)
        self.evaluations += gradients.count * len(terms)
        if not worker:  # each worker has its own records, and the first one most turns
            self.charged[z, rate] = self.charged.get((z, rate), 0) + 1
        bounded = bounded_sum(gradients, bound)
        return add_noise(bounded, z, self.noise, World()).mean(rate * of).value

    def spent(self) -> float:
        """ε of a record that was in most queries."""
        if not self.scale:
            return math.inf
        events: list[tuple[AbstractEvent, int]] = [
            (Gaussian(z) if rate == 1 else PoissonGaussian(z, rate), number)
            for (z, rate), number in self.charged.items()
        ]
        return epsilon(events, DELTA)


def train(data: Split, plan: Plan, target: float, seed: int) -> tuple[list[Tensor], Course]:
    """The parameters at the end; the same as DIFF2 with full batches if nothing else is asked for."""
    scale = scale_of(plan, data.train.count, target)
    course = Course(data, plan, scale, seed)
    kinds = plan.kinds(data.train.count)
    (_, restart_rate, _), (_, rate, *_) = kinds[0], kinds[min(1, len(kinds) - 1)]
    if plan.every == 1:
        rate = restart_rate
    params = Network(data).start(seed)
    before, estimate = params, torch.zeros(())
    restarts, drift = 0, 0.0
    for done in range(plan.rounds):
        if plan.trigger:
            added = (plan.diff * plan.ratio) ** 2 * drift
            is_due = done == 0 or added > plan.trigger * plan.clip**2
            is_restart = is_due and restarts < plan.restarts
        else:
            is_restart = done % plan.every == 0
        moved = float((flatten(params) - flatten(before)).norm())
        if is_restart:
            estimate = course.release(params, None, plan.clip, scale, restart_rate)
            restarts, drift = restarts + 1, 0.0
        elif moved:
            z, bound = scale * plan.ratio, plan.diff * moved
            estimate = estimate + course.release(params, before, bound, z, rate)
            drift += moved**2
        before = params
        params = step(params, estimate, plan.rate)
        if plan.local > 1:
            params = local_steps(course, params, before, estimate, done % WORKERS)
        if not math.isfinite(float(flatten(params).norm())):
            break
    return params, course


def step(params: list[Tensor], estimate: Tensor, rate: float) -> list[Tensor]:
    parts = unflatten(estimate, params)
    return [p - rate * part for p, part in zip(params, parts, strict=True)]


def local_steps(
    course: Course, params: list[Tensor], before: list[Tensor], estimate: Tensor, worker: int
) -> list[Tensor]:
    """Algorithm 4: K - 1 steps of one worker, each with the difference on another minibatch."""
    plan = course.plan
    rate = min(1.0, plan.local_batch * WORKERS / course.count)
    for _ in range(plan.local - 1):
        moved = float((flatten(params) - flatten(before)).norm())
        if not 0 < moved < math.inf:
            return params
        z = course.scale * plan.local_noise
        estimate = estimate + course.release(params, before, plan.diff * moved, z, rate, worker)
        before, params = params, step(params, estimate, plan.rate)
    return params


# -- runs and tables ---------------------------------------------------------------------------------


def settings_of(method: str) -> tuple[Setting, ...]:
    return design({**COMMON, **METHODS[method]})


def execute(run: Run, folder: str) -> Outcome:
    """One training: train loss and ‖∇f‖², test loss and test error, infinite if it diverged."""
    torch.set_num_threads(1)
    begin = time.process_time()
    data = split(run.problem, folder, run.seed)
    params, course = train(
        data, Plan(**settings_of(run.method)[run.setting]), run.epsilon, run.seed
    )
    network, point = course.whole.network, course.whole.at(flatten(params), params)
    loss = network.loss(point.outputs, data.train)
    square = float((point.gradient_sum() / course.count).square().sum())
    test, wrong = network.on_test(params)
    found = [loss, square, test, 0.0 if math.isnan(wrong) else wrong]
    if not all(map(math.isfinite, found)):
        found = [math.inf] * 4
    seconds = time.process_time() - begin
    passes = course.evaluations / course.count
    return Outcome((found[0], found[1]), (found[2], found[3]), course.spent(), passes, seconds)


def score(problem: str, outcome: Outcome) -> float:
    return -outcome.validation[0]


def print_set(name: str, target: float, results: Results) -> None:
    """The means of each method, and its differences to DP-GD; a method without its runs is missing."""
    data, rows, values = SETS[name], [], {}
    print(f"\n## {data.title}, ε = {target:g}, δ = {DELTA:g}, add/remove\n\n{TEST}\n")
    for method in METHODS:
        group = Group(name, method, target, settings_of(method))
        _, winner = tuning(group, results, partial(score, name))
        runs = [] if winner is None else final(group, winner, NOISES)
        found = [results[run] for run in runs if run in results]
        if winner is None or len(found) < NOISES:
            rows.append([method, f"missing ({len(found)} of {NOISES})", *[""] * 7])
            continue
        columns = np.array([[*each.validation, each.test[0]] for each in found]).T
        values[method] = columns
        cells = [Summary.of(columns[i]).text(digits) for i, digits in enumerate((5, 6, 5))]
        setting = ", ".join(f"{key} {value:g}" for key, value in group.settings[winner].items())
        spent = max(each.spent for each in found)
        passes = f"{np.mean([each.passes for each in found]):.0f}"
        rows.append([method, f"{spent:.4f}", *cells, passes, setting])
    base = values.get("DP-GD")
    others = [method for method in values if method != "DP-GD"]
    if base is not None and others:
        for column, digits in ((0, 5), (1, 6)):
            pairs = [(values[method][column], base[column]) for method in others]
            for method, text in zip(others, gains_text(pairs, digits), strict=True):
                next(row for row in rows if row[0] == method).append(text)
    header = ["", "ε spent", "train loss", "‖∇f‖²", "test loss", "passes over the data", "chosen"]
    header += ["train loss - DP-GD's", "‖∇f‖² - DP-GD's"]
    print(table(header, [[*row, *[""] * (len(header) - len(row))] for row in rows]), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help=f"folder of the data sets (or set {DATA_VARIABLE})")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["california"])
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--noises", type=int, default=NOISES, help="of the table")
    parser.add_argument("--out", type=Path, default=Path("outputs/diff2_variants.jsonl"))
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after that")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    folder = folder_of(options.data)
    names = [name for name in options.sets if raw(name, folder) is not None]
    if not names:
        raise SystemExit(2)
    order = [
        (Group(name, method, options.epsilon, settings_of(method)), options.noises)
        for name in names
        for method in METHODS
    ]
    results = run_all(
        Agenda(order, score).following,
        partial(execute, folder=folder),
        options.out,
        jobs=options.jobs,
        minutes=options.minutes,
    )
    print_heading("DIFF2 in other forms", given, options.data)
    for name in names:
        print_set(name, options.epsilon, results)
    seconds = sum(outcome.seconds for outcome in results.values())
    print(f"\n{len(results)} runs, {seconds / 60:.0f} CPU minutes.")


if __name__ == "__main__":
    main()
