"""Do differences of gradients beat gradients at equal privacy?

    python examples/papers/diff2.py --data DIR [--quick] [--all] [--epsilon 5] [--output DIR]

Reproduces the experiments of "DIFF2: Differential Private Optimization via Gradient Differences
for Nonconvex Distributed Learning" (Murata and Suzuki, 2023, section 6): full batches, R = 2000
rounds, one hidden layer of 10 softplus units, δ = 1e-5, replace-one, for

- GD without privacy, DP-GD and DIFF2-GD with the noise of Proposition 4.1 (u = 1.25),
- the same two with the least noise that (ε, δ) allows, and DIFF2-GD with the best split of it,
- Diff2.recommend() without any tuning.

The paper has 10 workers of equal size and a trusted server. The mean of their clipped means is the
clipped sum over all records over n, so one process computes it.

DIR holds california_housing.npz and gas_turbine.npz (arrays X, y) and, for --all, blogfeedback.npz,
covertype_subset.npz and kddcup99_10pct.npz; LIGHTNING_DP_DATA does the same. Without a folder,
scikit-learn fetches those that it knows. The pictures go to ./outputs/diff2. A script that was stopped
goes on where it was: finished runs lie in ./outputs/finished_runs (LIGHTNING_DP_RUNS).

As in the paper, settings are tuned for each seed (of the split and the first parameters), η down
from 1; unlike there, on other noise than what is reported, and equally many for each method. Tuning
and standardising look at the data and are not paid for by ε, in the paper nor here. Seeds are fixed
so that the tables can be made again, which no private run may do.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from archives import DATA_VARIABLE, folder_of
from common import finished, print_heading, table
from diff2_data import SETS, raw, split
from diff2_halving import FULL, HALVING, Rung, Tuned, diff2_grid, dp_gd_grid, winners
from diff2_model import HIDDEN
from diff2_report import CRITERIA, describe, draw, print_noise, print_results, write_tried
from diff2_run import DELTA, Noise, Run, Setting, Trace, execute, walk

from lightning_dp.estimators import Diff2

OUTPUT = Path("outputs/diff2")
TUNING, REPORTED = (1, 2), 0  # seeds of the noise


@dataclass(frozen=True)
class Size:
    """Amount of computation.

    Args:
        points: how many settings of a method are tried (that do not diverge).
        finalists: how many by each criterion are tried again on other noise.
        is_settled, is_halved: one setting for all seeds: as on California, or by successive halving.
        is_confirmed: the winners of halving are compared with those of the full grid.
    """

    rounds: int = 2000
    seeds: int = 5
    points: int = 12
    finalists: int = 2
    is_thin: bool = False
    is_settled: bool = False
    is_halved: bool = False
    is_confirmed: bool = False


@dataclass
class Method:
    """One row of the tables; lists are by criterion (train loss, its gradient), then by seed.

    Args:
        noise: which noise.
        settings: what is tried: settings whose rate is searched for, or for each seed a list.
        tried: of each seed, everything that was tried.
        chosen: the best settings.
        tuned: the runs they were chosen for (what the paper reports).
        traces: these settings on other noise (what we report).
    """

    title: str
    noise: Noise
    settings: Sequence[Setting] | Sequence[Sequence[Setting]]
    tried: list[dict[Setting, Trace]] = field(default_factory=list)
    chosen: list[list[Setting]] = field(default_factory=list)
    tuned: list[list[Trace]] = field(default_factory=list)
    traces: list[list[Trace]] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """A data set, and what all runs on it have in common."""

    pool: ProcessPoolExecutor
    name: str
    folder: str
    epsilon: float
    size: Size

    @property
    def seeds(self) -> range:
        return range(self.size.seeds)

    def run(self, noise: Noise, setting: Setting, seed: int, noise_seed: int) -> Run:
        size, is_tuning = self.size, noise_seed in TUNING
        return Run(
            *(self.name, self.folder, seed, self.epsilon, size.rounds),
            *(noise, setting, noise_seed, is_tuning),
        )

    def runs(
        self, noise: Noise, settings: Sequence[Sequence[Setting]], noise_seed: int
    ) -> list[dict[Setting, Trace]]:
        """For each seed the traces of its settings."""
        todo = [(seed, one) for seed in self.seeds for one in dict.fromkeys(settings[seed])]
        runs = [self.run(noise, one, seed, noise_seed) for seed, one in todo]
        found: list[dict[Setting, Trace]] = [{} for _ in self.seeds]
        for (seed, one), trace in zip(
            todo, self.pool.map(partial(finished, execute), runs), strict=True
        ):
            found[seed][one] = trace
        return found

    def try_out(self, method: Method) -> None:
        """All settings of a method, for each seed."""
        if not isinstance(method.settings[0], Setting):
            method.tried = self.runs(method.noise, method.settings, TUNING[0])
            return
        runs = [
            self.run(method.noise, setting, seed, TUNING[0])
            for seed in self.seeds
            for setting in method.settings
        ]
        survivors = [min(4, math.ceil(self.size.points / len(method.settings)))] * len(runs)
        found = list(self.pool.map(walk, runs, survivors))
        for seed in self.seeds:
            of_seed = found[seed * len(method.settings) :][: len(method.settings)]
            method.tried.append({s: trace for walked in of_seed for s, trace in walked.items()})

    def tune(self, method: Method) -> None:
        """The best settings for each seed: some on one noise, the best few of them on another."""
        self.try_out(method)
        finalists = [
            [
                setting
                for criterion in (0, 1)
                for setting in best_of(tried, criterion)[: self.size.finalists]
            ]
            for tried in method.tried
        ]
        again = self.runs(method.noise, finalists, TUNING[1]) if self.size.finalists > 1 else None
        for criterion in (0, 1):
            chosen, tuned = [], []
            for seed, tried in enumerate(method.tried):
                first = best_of(tried, criterion)
                tuned.append(tried[first[0]])
                if again is not None:
                    other = again[seed]
                    first = sorted(
                        other,
                        key=lambda s: other[s].level(criterion) + tried[s].level(criterion),
                    )
                chosen.append(first[0])
            method.chosen.append(chosen)
            method.tuned.append(tuned)

    def winners(self, tuned: Tuned, rungs: Sequence[Rung]) -> dict[tuple[str, int], Setting]:
        """One setting for all seeds, of each method by each criterion."""

        def run_of(noise: Noise, setting: Setting, seed: int, part: int) -> Run:
            where = self.name, self.folder, seed, self.epsilon, self.size.rounds
            return Run(*where, noise, setting, TUNING[0], is_tuning=True, part=part)

        def execute_all(runs: Sequence[Run]) -> list[Trace]:
            return list(self.pool.map(partial(finished, execute), runs))

        return winners(tuned, rungs, run_of, execute_all)

    def report(self, method: Method) -> None:
        """The chosen settings on the reported noise."""
        both = [[of_seed[seed] for of_seed in method.chosen] for seed in self.seeds]
        found = self.runs(method.noise, both, REPORTED)
        method.traces = [
            [found[seed][chosen[seed]] for seed in self.seeds] for chosen in method.chosen
        ]


def best_of(tried: dict[Setting, Trace], criterion: int) -> list[Setting]:
    """Best first."""
    return sorted(tried, key=lambda setting: tried[setting].level(criterion))


# -- the grids -----------------------------------------------------------------------------------


def dp_gd_settings(size: Size) -> list[Setting]:
    """C1; the paper's larger ones are never among the best (a wider search is in the results)."""
    return [Setting(1.0, clip) for clip in ((1.0, 3.0) if size.is_thin else (1.0, 3.0, 10.0))]


def diff2_settings(size: Size) -> list[Setting]:
    """(T, C1, C2) of the paper's 100: those that were best in a wider search on another seed."""
    thin = ((6, 3.0, 3.0), (20, 1.0, 10.0))
    rest = ((6, 3.0, 1.0), (6, 3.0, 10.0), (60, 1.0, 10.0), (60, 3.0, 10.0))
    return [
        Setting(1.0, clip, interval, diff)
        for interval, clip, diff in (thin if size.is_thin else thin + rest)
    ]


def best_split_settings(tried: dict[Setting, Trace]) -> list[Setting]:
    """Those that did not diverge, with the split that suits the length of their steps."""
    found = []
    for setting, trace in tried.items():
        if trace.is_finished:
            length = trace.step_length
            estimator = Diff2(
                setting.interval, setting.clip, setting.diff, "optimal", step_length=length
            )
            found.append(replace(setting, u=estimator.u))
    return found


def recommended(bench: Bench) -> Setting:
    """Diff2.recommend(), its smoothness guessed before data is seen.

    It is that of the output layer's loss where all hidden units are at softplus(0) = log 2:
    2 (1 + 10 log² 2) = 11.6 for the squared loss, a quarter of it for cross-entropy.
    """
    data = split(bench.name, bench.folder, 0)
    advice = Diff2.recommend(
        bench.epsilon,
        DELTA,
        steps=bench.size.rounds,
        num_records=data.train.count,
        size=HIDDEN * data.train.x.shape[0] + data.outputs * (HIDDEN + 1),
        smoothness=(2.0 if data.is_regression else 0.5) * (1 + HIDDEN * math.log(2) ** 2),
        relation="replace_one",
    )
    of = advice.estimator
    return Setting(advice.learning_rate, of.max_grad_norm, of.restart_every, of.diff_norm)


# What was chosen most often on California at ε = 3 (results/diff2.md): for the loss, for the gradient.
SETTLED: dict[str, tuple[Noise, Setting, Setting]] = {
    "GD, no privacy": ("none", Setting(0.25), Setting(0.25)),
    "DP-GD, paper's noise (a)": ("paper", Setting(0.125, 3.0), Setting(2.0**-6, 3.0)),
    "DIFF2-GD, paper's noise (a)": (
        *("paper", Setting(0.125, 3.0, 6, 10.0)),
        Setting(2.0**-5, 3.0, 60, 10.0),
    ),
    "DP-GD, exact noise (b)": ("exact", Setting(0.125, 3.0), Setting(2.0**-5, 3.0)),
    "DIFF2-GD, exact noise (b)": (
        *("exact", Setting(0.125, 3.0, 6, 10.0)),
        Setting(2.0**-5, 3.0, 60, 10.0),
    ),
}


# -- one data set --------------------------------------------------------------------------------


def halved(bench: Bench) -> dict[str, tuple[Noise, Setting, Setting]]:
    """Return what successive halving chooses, in the form of ``SETTLED``."""
    grids = {"GD": [Setting(0.5**i) for i in range(10)], "DP-GD": dp_gd_grid()}
    grids["DIFF2-GD"] = diff2_grid()
    tuned = {title: (noise, grids[title.split(",")[0]]) for title, (noise, *_) in SETTLED.items()}
    found = bench.winners(tuned, HALVING)
    if bench.size.is_confirmed:
        full = bench.winners(tuned, FULL)
        rows = [
            [title, CRITERIA[criterion], describe(setting), describe(full[title, criterion])]
            for (title, criterion), setting in found.items()
        ]
        same = sum(full[key] == setting for key, setting in found.items())
        print(f"\n### The same winner by halving and by the full grid in {same} of {len(rows)}\n")
        print(table(["method", "by", "halving", "full grid"], rows), flush=True)
    return {title: (tuned[title][0], found[title, 0], found[title, 1]) for title in tuned}


def compare(bench: Bench) -> list[Method]:
    """All methods, tuned and run."""
    size = bench.size
    if size.is_settled or size.is_halved:
        methods = [
            Method(title, noise, [], chosen=[[loss] * size.seeds, [gradient] * size.seeds])
            for title, (noise, loss, gradient) in (
                SETTLED if size.is_settled else halved(bench)
            ).items()
        ]
        for method in methods:
            bench.report(method)
        return methods
    methods = [
        Method("GD, no privacy", "none", [Setting(1.0)]),
        Method("DP-GD, paper's noise (a)", "paper", dp_gd_settings(size)),
        Method("DIFF2-GD, paper's noise (a)", "paper", diff2_settings(size)),
        Method("DP-GD, exact noise (b)", "exact", dp_gd_settings(size)),
        Method("DIFF2-GD, exact noise (b)", "exact", diff2_settings(size)),
    ]
    for method in methods:
        bench.tune(method)
    dp_gd, diff2 = methods[3:5]
    splits = [best_split_settings(tried) for tried in diff2.tried]
    best = Method("DIFF2-GD, best split (c)", "exact", splits)
    bench.tune(best)
    advice = [[recommended(bench)] * size.seeds] * 2
    of_advice = Method("Diff2.recommend(), not tuned (d)", "exact", [], chosen=advice)
    methods[5:5] = [best, of_advice]
    if not size.is_thin:
        for base in (dp_gd, best):
            title = f"{base.title.split(',')[0]}, add/remove (f)"
            methods.append(Method(title, "add/remove", [], chosen=base.chosen))
    for method in methods:
        bench.report(method)
    return methods


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help=f"folder of the data sets (or set {DATA_VARIABLE})")
    parser.add_argument("--quick", action="store_true", help="California only, few settings: 2 min")
    parser.add_argument("--all", action="store_true", help="all five data sets: 10 hours or more")
    parser.add_argument("--sets", nargs="+", choices=SETS, help="these data sets")
    parser.add_argument("--epsilon", type=float, default=3.0, help="the paper has 3 and 5")
    parser.add_argument("--points", type=int, default=12, help="settings tried for each method")
    parser.add_argument("--seeds", type=int, default=5, help="of splits, parameters and noises")
    parser.add_argument("--settled", action="store_true", help="California, not tuned again")
    parser.add_argument("--halving", action="store_true", help="one setting, by successive halving")
    parser.add_argument("--confirm", action="store_true", help="halving, and the full grid")
    parser.add_argument("--rounds", type=int, default=2000, help="R")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the pictures")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    folder = folder_of(options.data)
    default = ["california"] if options.quick or options.settled else ["california", "gas"]
    names = options.sets or (list(SETS) if options.all else default)
    names = [name for name in names if raw(name, folder) is not None]
    if not names:
        raise SystemExit(2)
    size = Size(options.rounds, options.seeds, options.points, is_settled=options.settled)
    is_halved = options.halving or options.confirm
    size = replace(size, is_halved=is_halved, is_confirmed=options.confirm)
    if options.quick:
        size = Size(options.rounds, options.seeds, points=2, finalists=1, is_thin=True)
    options.output.mkdir(parents=True, exist_ok=True)
    print_heading("DIFF2", given, options.data)
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for name in names:
            bench = Bench(pool, name, folder, options.epsilon, size)
            data = split(name, folder, 0)
            methods = compare(bench)
            print_noise(SETS[name].title, data, options.epsilon, options.rounds)
            print_results(methods)
            path = options.output / f"{name}.png"
            draw(SETS[name].title, methods, options.epsilon, path)
            if not (size.is_settled or size.is_halved):
                write_tried(methods, options.output / f"{name}_tuning.csv")
            print(f"\n({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"\nPictures in {options.output}")


if __name__ == "__main__":
    main()
