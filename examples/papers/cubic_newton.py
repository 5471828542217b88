"""Do second-order steps save rounds, and sparse messages bytes, at equal privacy?

    python examples/papers/cubic_newton.py --data DIR [--quick] [--short] [--sets a9a ...] [--output DIR]

Puts the experiments of "DP-FCRN: sparsified cubic-regularised Newton with differential privacy" to
the test: L2-regularised logistic regression, 40 clients with their own noise, k/d of the update
sent, ε in {0.4, 0.6, 0.8, 1}; here at δ = 1e-5 under add/remove, by the accountant and not by the
paper's Theorem 1, and against Fed-SGD that is tuned as well.

Every client takes part with all its records in every round, and the noise of a run of T rounds is
calibrated for T. So T is a setting like any other, and the methods are compared at each T, with the
best of equally many settings (48), tried on two noises, the best three of them on four more, and the
best one reported on twenty others:

- Fed-SGD: learning rate and clip norm; the protocol with one inner step;
- Newton: inner steps τ, their size, clip norm, and the cubic term M (0 or 0.01);
- local GD: the same with gradients at the moving point instead of Hessian-vector products.

All runs behind the tables of rounds and curves go through the package: messages are bytes, and each
client has its own ledger. Settings are searched for side by side in plain matrices (``sweep``).
Tuning looks at the data and is not covered by ε, in the paper nor here. Seeds are fixed so that the
tables can be made again, which no private run may do.

The paper's set, `epsilon`, is not at hand: --sets synthetic makes one of its shape (400,000 x 2,000),
and needs 16 GB of memory. One process holds it: use --threads instead of --jobs.

DIR holds a9a.npz, w8a.npz, phishing.npz (arrays X, y or X_train, y_train, ...) and mnist.npz;
LIGHTNING_DP_DATA does the same. Pictures go to ./outputs/cubic_newton. A script that was stopped goes on
where it was: finished runs lie in ./outputs/finished_runs (LIGHTNING_DP_RUNS).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from archives import DATA_VARIABLE, folder_of
from common import NOISES, finished_all, print_heading
from cubic_newton_data import SETS, Problem, is_there, problem
from cubic_newton_report import draw, print_set
from cubic_newton_run import Point, Setting, Trace, run, searched

OUTPUT = Path("outputs/cubic_newton")
SEEDS = range(NOISES)  # of the runs through the package
KEPT = (0.08, 0.1, 0.2)
SLACK = 1.05  # "as good as Fed-SGD": at most 5 % above its best


Key = tuple[str, float, float]  # method, k/d, ε
Search = tuple[Key, Sequence[Setting], Sequence[int]]  # with the settings and the numbers of rounds


@dataclass(frozen=True)
class Size:
    """Amount of computation.

    Args:
        first_order, second_order, sparse: the numbers of rounds that are tried.
        main: the ε at which everything is run; at ``epsilons`` the main methods.
    """

    clients: int = 40
    epsilons: tuple[float, ...] = (0.4, 0.6, 0.8, 1.0)
    main: float = 0.8
    kept: tuple[float, ...] = KEPT
    first_order: tuple[int, ...] = (1, 2, 3, 5, 8, 12, 20, 32, 50)
    second_order: tuple[int, ...] = (1, 2, 3, 5, 8, 14)
    sparse: tuple[int, ...] = (24,)
    is_thin: bool = False
    is_short: bool = False
    jobs: int = 1


QUICK = Size(
    epsilons=(0.4, 0.8),
    kept=(0.1,),
    first_order=(2, 5, 12, 30),
    second_order=(2, 4),
    sparse=(12,),
    is_thin=True,
)


@dataclass
class Found:
    """Results on a data set."""

    title: str
    place: tuple[str, str, int]  # name, folder, clients
    problem: Problem
    frontiers: dict[Key, list[Point]] = field(default_factory=dict)
    traces: dict[Key, tuple[Point, list[Trace]]] = field(default_factory=dict)
    seconds: float = 0.0

    def best(self, key: Key) -> Point:
        return min(self.frontiers[key], key=lambda point: point.mean)

    def target(self, epsilon: float, of: str = "Fed-SGD") -> float:
        """Return the loss that is as good as Fed-SGD's at any number of rounds, up to 5 %."""
        return SLACK * self.best((of, 1.0, epsilon)).mean

    def first(self, key: Key, target: float) -> Point | None:
        """The fewest rounds that get there."""
        return next((point for point in self.frontiers[key] if point.mean <= target), None)


# -- the grids: equally many settings for each method ----------------------------------------------


def first_order(size: Size) -> list[Setting]:
    rates = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 32.0, 64.0)
    clips = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
    if size.is_thin:
        rates, clips = (8.0, 32.0), (0.1, 0.3)
    return [Setting(1, rate, clip) for rate, clip in itertools.product(rates, clips)]


def second_order(size: Size) -> list[Setting]:
    if size.is_thin:
        return [Setting(4, rate, clip) for rate in (8.0, 16.0) for clip in (0.3, 0.8)]
    grid = itertools.product((2, 4, 8), (4.0, 8.0, 16.0, 32.0), (0.3, 0.8), (0.0, 0.01))
    return [Setting(tau, rate, clip, cubic=cubic) for tau, rate, clip, cubic in grid]


# -- one data set ----------------------------------------------------------------------------------


def explore(name: str, folder: str, size: Size) -> Found:
    """All methods on one data set."""
    start = time.perf_counter()
    place = name, folder, size.clients
    found = Found(SETS[name].title, place, problem(*place))
    gradients, newton = first_order(size), second_order(size)
    searches: list[Search] = []
    for epsilon in size.epsilons:
        searches += [
            (("Fed-SGD", 1.0, epsilon), gradients, size.first_order),
            (("Newton", 1.0, epsilon), newton, size.second_order),
        ]
        for kept in size.kept if epsilon == size.main else (0.1,):
            searches.append((("Newton", kept, epsilon), newton, size.sparse))
    if not size.is_short:
        searches += further_searches(size, gradients, newton)
    arguments = [
        (place, method, settings, epsilon, rounds, kept)
        for (method, kept, epsilon), settings, tried in searches
        for rounds in tried
    ]
    points = iter(finished_all(searched, arguments, size.jobs))
    for key, _, tried in searches:
        found.frontiers[key] = [next(points) for _ in tried]
    run_them(found, size)
    found.seconds = time.perf_counter() - start
    return found


def further_searches(
    size: Size, gradients: Sequence[Setting], newton: Sequence[Setting]
) -> list[Search]:
    """At the main ε: what takes the place of the Hessian, the cubic term, the trust."""
    local = [replace(setting, is_local=True) for setting in newton]
    cubic = [replace(setting, cubic=0.1) for setting in newton if setting.cubic]
    whole = [replace(setting, whole=True) for setting in newton]
    return [
        ((method, kept, size.main), settings, tried)
        for method, settings, tried, kept in (
            ("local GD", local, size.second_order, 1.0),
            ("Newton, M = 0.1", cubic, size.second_order, 1.0),
            ("Newton, whole steps", whole, size.sparse, 0.1),
            ("DP-GD, central", gradients, size.first_order, 1.0),
            ("Newton, central", newton, size.second_order, 1.0),
        )
    ]


def run_them(found: Found, size: Size) -> None:
    """Make the runs that the tables report, through the package."""
    chosen: dict[Key, Point] = {}
    for epsilon in size.epsilons:
        target = found.target(epsilon)
        for method in ("Fed-SGD", "Newton"):
            key = (method, 1.0, epsilon)
            chosen[key] = found.first(key, target) or found.best(key)
    for key in found.frontiers:
        method, _, epsilon = key
        if epsilon == size.main and "central" in method:
            target = found.target(epsilon, "DP-GD, central")
            chosen[key] = found.first(key, target) or found.best(key)
        elif epsilon == size.main and key not in chosen:
            chosen[key] = found.best(key)
    arguments = [
        (found.place, method, point.setting, epsilon, point.rounds, kept, seed)
        for (method, kept, epsilon), point in chosen.items()
        for seed in SEEDS
    ]
    traces = iter(finished_all(run, arguments, size.jobs))
    for key, point in chosen.items():
        found.traces[key] = (point, [next(traces) for _ in SEEDS])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help=f"folder of the data sets (or set {DATA_VARIABLE})")
    parser.add_argument("--quick", action="store_true", help="phishing only, few settings: seconds")
    parser.add_argument("--sets", nargs="+", choices=SETS, help="these data sets")
    parser.add_argument("--epsilons", nargs="+", type=float, help="with the main one, 0.8")
    parser.add_argument(
        "--short", action="store_true", help="without local steps, the cubic term, central runs"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the pictures")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, default=1, help="of this process")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    folder = folder_of(options.data)
    archived = [name for name, of in SETS.items() if of.make is None]
    names = options.sets or (["phishing"] if options.quick else archived)
    names = [name for name in names if is_there(name, folder)]
    if not names:
        raise SystemExit(2)
    size = QUICK if options.quick else Size()
    size = replace(size, is_short=options.short or options.quick, jobs=options.jobs)
    if options.epsilons:
        size = replace(size, epsilons=tuple(sorted({*options.epsilons, size.main})))
    options.output.mkdir(parents=True, exist_ok=True)
    print_heading("Cubic Newton", given, options.data)
    torch.set_num_threads(options.threads)
    for name in names:
        found = explore(name, folder, size)
        print_set(found, size)
        draw(found, size, options.output / f"{name}.png")
        print(f"\n({found.seconds:.0f} s)", flush=True)
    print(f"\nPictures in {options.output}")


if __name__ == "__main__":
    main()
