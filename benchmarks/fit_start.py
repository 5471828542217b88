"""Processor seconds until the first step of a long run: its noise, its guard, and the first ε shown.

    python benchmarks/fit_start.py            # 100,000 steps, half a minute
    python benchmarks/fit_start.py --quick    # 2,000 steps
    python benchmarks/fit_start.py --models MLP nn.LSTM ResNet-18 decoder [--rounds 5]

Each run starts in a forked process of its own with one thread; imports are not timed. No model is
made: what is measured depends on the configuration, the sampling rate and the number of steps only.
The columns are those of ``PrivateRun.start``, of the first ε published, and of ε of the whole plan.

With --models it is the start of a fit: processor seconds from ``fit`` to the end of step 1, in
alternating rounds after one that is not counted (imports, kernels), and how often ``training_step``
ran, with its records. Rows: without privacy; all defaults; no dry run; no comparisons either; no check.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_dp import PrivacyConfig
from lightning_dp._world import World
from lightning_dp.accounting import PoissonGaussian
from lightning_dp.accounting.events import History
from lightning_dp.callbacks import PrivacyLogger
from lightning_dp.estimators import CubicNewton, Diff2, Storm
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import BatchPlan
from lightning_dp.schedules import (
    AbstractAdaptiveSchedule,
    Constant,
    Cosine,
    Exponential,
    FromInfluence,
    Polynomial,
)

THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Adaptive(AbstractAdaptiveSchedule):
    """Exponential at run time, as expected."""

    steps: int

    def __call__(self, step: int) -> float:
        return float(0.25 ** (step / self.steps))

    def init(self) -> dict[str, Any]:
        return {}

    def now(self, state: dict[str, Any], step: int) -> float:
        return self(step)

    def observe(self, state: dict[str, Any], released: Tensor) -> dict[str, Any]:
        return state


def exponential(steps: int) -> Exponential:
    return Exponential(math.log(4) / steps)


def influence(steps: int) -> FromInfluence:
    return FromInfluence(tuple(1.0 + (7919 * t % steps) / steps for t in range(steps)))


def diff2(steps: int) -> dict[str, Any]:
    return {
        "noise_schedule": exponential(steps),
        "estimator": Diff2(restart_every=100, restart_rate=2.0),
    }


def earlier(steps: int) -> History:
    """A run of decaying noise, and one of another rate."""
    return [
        *((PoissonGaussian(40.0 * 0.5 ** (t / steps), 0.01), 1) for t in range(steps)),
        (PoissonGaussian(30.0, 0.001), steps),
    ]


Kwargs = dict[str, Any]
ROWS: dict[str, tuple[Callable[[int], Kwargs], float]] = {
    "constant, q=.01": (lambda _: {"noise_schedule": Constant()}, 0.01),
    "constant, q=1e-4": (lambda _: {"noise_schedule": Constant()}, 1e-4),
    "constant, q=1": (lambda _: {"noise_schedule": Constant()}, 1.0),
    "exponential, q=.01": (lambda n: {"noise_schedule": exponential(n)}, 0.01),
    "exponential, q=1e-3": (lambda n: {"noise_schedule": exponential(n)}, 1e-3),
    "exponential, q=1e-4": (lambda n: {"noise_schedule": exponential(n)}, 1e-4),
    "exponential, q=1": (lambda n: {"noise_schedule": exponential(n)}, 1.0),
    "exponential 1000x, q=.01": (
        lambda n: {"noise_schedule": Exponential(math.log(1000) / n)}, 0.01),
    "polynomial, q=.01": (lambda n: {"noise_schedule": Polynomial(n, 0.3, 2.0)}, 0.01),
    "cosine, q=.01": (lambda n: {"noise_schedule": Cosine(n, 0.3)}, 0.01),
    "from influence, q=.01": (lambda n: {"noise_schedule": influence(n)}, 0.01),
    "replace-one, q=.01": (
        lambda n: {"noise_schedule": exponential(n), "relation": "replace_one"}, 0.01),
    "replace-one, q=1e-4": (
        lambda n: {"noise_schedule": exponential(n), "relation": "replace_one"}, 1e-4),
    "replace-one, constant": (lambda n: {"relation": "replace_one"}, 0.01),
    "diff2, q=.01": (diff2, 0.01),
    "storm, q=.01": (
        lambda n: {"noise_schedule": exponential(n), "estimator": Storm(0.1, 1.0, 0.1)}, 0.01),
    "cubic newton, q=.01": (
        lambda n: {"noise_schedule": exponential(n),
                   "estimator": CubicNewton(1.0, 1.0, inner_steps=5)}, 0.01),
    "adaptive, q=.01": (lambda n: {"noise_schedule": Adaptive(n)}, 0.01),
    "adaptive, replace-one": (
        lambda n: {"noise_schedule": Adaptive(n), "relation": "replace_one"}, 0.01),
    "adaptive, q=1": (lambda n: {"noise_schedule": Adaptive(n)}, 1.0),
    "noise given, exponential": (
        lambda n: {"noise_schedule": exponential(n), "target_epsilon": None,
                   "noise_multiplier": 4.0}, 0.01),
    "noise and budget given": (
        lambda n: {"noise_schedule": exponential(n), "noise_multiplier": 8.0}, 0.01),
    "after another run": (lambda n: {"noise_schedule": exponential(n)}, 0.01),
}  # fmt: skip


class _Screen:
    """The parts of a Trainer that the logger asks for, and nothing else."""

    def __init__(self) -> None:
        self.log_every_n_steps = 50
        self.callback_metrics: dict[str, Any] = {}
        self.progress_bar_metrics: dict[str, Any] = {}
        self.loggers: list[Any] = []


def measure(row: str, steps: int) -> dict[str, float]:
    """One start, in this process."""
    warnings.simplefilter("ignore")
    make, rate = ROWS[row]
    kwargs = {"target_epsilon": 3.0, "target_delta": 1e-6, **make(steps)}
    _start(PrivacyConfig(target_delta=1e-5, noise_multiplier=1.0), 0.5, 3, [])  # caches, imports
    before = earlier(steps) if row == "after another run" else []
    config = PrivacyConfig(**kwargs)
    times: list[float] = []
    run = _start(config, rate, steps, before, times)
    of_plan = run.epsilon_of_plan
    times.append(time.thread_time())
    names = ("start", "shown", "plan")
    seconds = dict(zip(names, (b - a for a, b in pairwise(times)), strict=True))
    return {**seconds, "epsilon": of_plan or 0.0, "scale": run.mechanism.plan.scale}


def _start(
    config: PrivacyConfig,
    rate: float,
    steps: int,
    before: History,
    times: list[float] | None = None,
) -> PrivateRun:
    times = [] if times is None else times
    run = PrivateRun(config)
    run.use_batches(BatchPlan(10**6, rate, 1, max(1, round(1 / rate))))
    _charge(run, before)
    times.append(time.thread_time())
    run.start(steps, World(), None)
    times.append(time.thread_time())
    PrivacyLogger().on_privacy_start(_Screen(), run, Path())  # type: ignore[arg-type]
    times.append(time.thread_time())
    return run


def _charge(run: PrivateRun, before: History) -> None:
    """Charges of an earlier run, without a journal."""
    if not before:
        return
    run.ledger.begin("earlier", None)
    for event, count in before:
        for _ in range(count):
            run.ledger.charge(event)
    run.ledger.end()


def starts(names: list[str], rounds: int) -> None:
    """Print the starts of fits; the goal is 1.5 times that without privacy, and 0.3 s."""
    import step  # Lightning, which the rows above do without
    from models import MODELS

    from lightning_dp import Checks

    step.quiet()
    step.by_processor()
    ways: dict[str, Checks | None] = {
        "without privacy": None,
        "ours": Checks(),
        "ours, no dry run": Checks(dry_run=False),
        "ours, no comparisons": Checks(dry_run=False, comparisons=False),
        "ours, no checks": step.OFF,
    }
    ran: list[int] = []
    plain_step = step.Module.training_step

    def counted(module: step.Module, batch: list[Tensor], batch_idx: int) -> Tensor:
        if module.trainer.global_step < 2:
            ran.append(len(batch[0]))
        return plain_step(module, batch, batch_idx)

    step.Module.training_step = counted  # type: ignore[method-assign]
    for name in names:
        model, found = MODELS[name], {way: list[float]() for way in ways}
        sizes: dict[str, list[int]] = {}
        for turn in range(1 + rounds):
            for way, checks in ways.items():
                ran.clear()
                how: dict[str, Any] = {} if checks is None else {"checks": checks}
                fit = step.fit if checks is None else step.private_fit
                start = fit(model, 1, first=1, **how).start
                sizes[way] = list(ran)
                found[way] += [start] if turn else []
        goal = 1.5 * statistics.median(found["without privacy"]) + 0.3
        print(f"{name}: goal {goal:.2f} s")
        for way, seconds in found.items():
            median, each = statistics.median(seconds), " ".join(map(str, sizes[way]))
            spread = f"({min(seconds):.2f} to {max(seconds):.2f})"
            print(f"  {way:21} {median:6.2f} s {spread:18} records: {each}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 steps")
    parser.add_argument("--models", nargs="+", help="starts of fits of models of models.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="RUN")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != "1" for name in THREADS):  # read when numpy is imported
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **THREADS})
    if arguments.models:
        starts(arguments.models, arguments.rounds)
        return
    steps = 2000 if arguments.quick else 100_000
    sizes = [(row, steps) for row in arguments.rows]
    if not arguments.quick:
        sizes += [(row, 10**6) for row in arguments.rows if row.startswith("constant")]
    print(f"{'run':26s} {'steps':>9s} {'scale':>9s} {'epsilon':>8s} {'start s':>8s} {'shown s':>8s} "
          f"{'both s':>8s} {'plan s':>8s}")  # fmt: skip
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for (row, size), found in zip(sizes, pool.imap(_measured, sizes), strict=True):
            print(f"{row:26s} {size:9d} {found['scale']:9.4f} {found['epsilon']:8.4f} "
                  f"{found['start']:8.2f} {found['shown']:8.2f} "
                  f"{found['start'] + found['shown']:8.2f} {found['plan']:8.2f}", flush=True)  # fmt: skip


def _measured(row_and_steps: tuple[str, int]) -> dict[str, float]:
    return measure(*row_and_steps)


if __name__ == "__main__":
    main()
