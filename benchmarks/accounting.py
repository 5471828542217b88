"""Our accountants beside dp-accounting's PLD and Opacus' RDP and PRV on the same histories.

    python benchmarks/accounting.py            # minutes
    python benchmarks/accounting.py --quick    # small sizes, a few seconds

For each accountant: epsilon, wall and processor seconds, and the growth of the peak memory. Every
measurement runs in a process of its own with one thread, so that caches and memory are its own;
imports are not timed. Wall seconds depend on what else the machine does: compare processor seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
from opacus_accountants import OpacusPRVAccountant, OpacusRDPAccountant

from lightning_dp.accounting import PLDAccountant, PoissonGaussian, StreamingRDPAccountant
from lightning_dp.accounting.base import AbstractAccountant
from lightning_dp.accounting.events import History
from lightning_dp.accounting.pld import epsilon_curve

DELTA = 1e-5
TIMEOUT = 300  # seconds for one measurement
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

Runner = Callable[[History], float]


def distinct(steps: int, low: float, high: float) -> History:
    """All-distinct (z, q), in no order."""
    rng = np.random.default_rng(steps)
    z, q = rng.uniform(low, high, steps), rng.uniform(0.005, 0.01, steps)
    return [(PoissonGaussian(a, b), 1) for a, b in zip(z.tolist(), q.tolist(), strict=True)]


def decreasing(steps: int) -> History:
    """All-distinct z from 2 to 1, q = 0.01."""
    return [(PoissonGaussian(z, 0.01), 1) for z in np.linspace(2.0, 1.0, steps).tolist()]


def constant(steps: int) -> History:
    return [(PoissonGaussian(2.0, 1e-3), steps)]


HISTORIES: dict[str, Callable[[int], History]] = {
    "constant": constant,
    "distinct z": decreasing,
    "distinct z, q": lambda steps: distinct(steps, 1.0, 4.0),
}


def dp_accounting_pld(history: History) -> float:
    """The pessimistic estimate on a grid of 1e-3."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    total = None
    for event, count in history:
        z, q = event.pair
        part = pld.from_gaussian_mechanism(z, value_discretization_interval=1e-3, sampling_prob=q)
        part = part.self_compose(count)
        total = part if total is None else total.compose(part)
    assert total is not None
    return float(total.get_epsilon_for_delta(DELTA))


def by(accountant: AbstractAccountant) -> Runner:
    return lambda history: accountant.epsilon(history, DELTA)


def ungrouped(history: History) -> float:
    """Nodes so close that every step is nearly one."""
    return PLDAccountant(spacing=0.002).epsilon(history, DELTA)


def curve(history: History) -> float:
    """About 300 lengths of one run at once."""
    events = [event for event, count in history for _ in range(count if len(history) > 1 else 1)]
    steps = history[0][1] if len(history) == 1 else len(events)
    at = np.unique(np.concatenate((np.arange(33), np.geomspace(33, steps, 268).astype(int))))
    plan = events[0] if len(history) == 1 else events.__getitem__
    return float(epsilon_curve(plan, at, DELTA)[-1])


RUNNERS: dict[str, Runner] = {
    "PLD": by(PLDAccountant()),
    "PLD ungrouped": ungrouped,
    "PLD replace-one": lambda history: PLDAccountant().epsilon(history, DELTA, "replace_one"),
    "PLD curve": curve,
    "streaming RDP": by(StreamingRDPAccountant()),
    "dp-accounting PLD": dp_accounting_pld,
    "Opacus RDP": by(OpacusRDPAccountant()),
    "Opacus PRV": by(OpacusPRVAccountant()),
}

OURS = ["PLD", "PLD replace-one", "streaming RDP"]
OTHERS = ["dp-accounting PLD", "Opacus RDP", "Opacus PRV"]
QUICK: list[tuple[str, int, list[str]]] = [
    ("constant", 1000, [*OURS, "PLD curve", *OTHERS]),
    ("distinct z, q", 50, [*OURS, "PLD ungrouped", "PLD curve", *OTHERS]),
]
FULL: list[tuple[str, int, list[str]]] = [
    ("constant", 1000, [*OURS, "PLD curve", *OTHERS]),
    ("constant", 100_000, [*OURS, "PLD curve"]),
    ("constant", 1_000_000, OURS),
    ("distinct z", 500, [*OURS, *OTHERS]),
    ("distinct z", 2000, [*OURS, "PLD ungrouped", "dp-accounting PLD", "Opacus RDP"]),
    ("distinct z, q", 2000, [*OURS, "PLD ungrouped", "dp-accounting PLD", "Opacus RDP"]),
    ("distinct z, q", 10_000, [*OURS, "PLD ungrouped", "PLD curve"]),
    ("distinct z, q", 50_000, OURS),
    ("distinct z", 100_000, ["PLD", "PLD curve"]),
    ("distinct z, q", 100_000, ["PLD", "PLD curve"]),
]


def measure(kind: str, steps: int, runner: str) -> dict[str, float]:
    """One measurement, in this process."""
    warnings.simplefilter("ignore")
    run = RUNNERS[runner]
    run([(PoissonGaussian(1.0, 0.5), 1)])  # imports
    history = HISTORIES[kind](steps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    epsilon = run(history)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"epsilon": epsilon, "wall": wall, "cpu": cpu, "mb": peak / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "STEPS", "RUNNER"), help="one, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        kind, steps, runner = arguments.one
        print(json.dumps(measure(kind, int(steps), runner)))
        return
    print(f"{'history':15s} {'steps':>9s}  {'accountant':18s} {'epsilon':>9s} "
          f"{'wall s':>8s} {'cpu s':>8s} {'MB':>7s}")  # fmt: skip
    for kind, steps, runners in QUICK if arguments.quick else FULL:
        for runner in runners:
            head = f"{kind:15s} {steps:9d}  {runner:18s}"
            command = [sys.executable, __file__, "--one", kind, str(steps), runner]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT,
                    env={**os.environ, **dict.fromkeys(THREADS, "1")},
                )
            except subprocess.TimeoutExpired:
                print(f"{head} more than {TIMEOUT} s", flush=True)
                continue
            if done.returncode:
                print(f"{head} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
                continue
            row = json.loads(done.stdout.splitlines()[-1])
            print(f"{head} {row['epsilon']:9.4f} {row['wall']:8.2f} {row['cpu']:8.2f} "
                  f"{row['mb']:7.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
