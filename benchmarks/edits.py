"""What it costs to compare the gradient that the optimizer uses with what was released.

    python benchmarks/edits.py

Nanoseconds a value for one fingerprint (a step makes two) beside one draw of noise, and milliseconds
a step with the comparison and without it, in turn, on one thread; least and largest ratios beside
the median.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import torch
from models import MODELS, Model
from step import _fit, measure, quiet, ratios

from lightning_dp._fingerprint import fingerprint
from lightning_dp._noise import NoiseSource
from lightning_dp.callbacks import DifferentialPrivacy

ROUNDS, STEPS, VALUES, TURNS = 7, 30, 4_000_000, 9


def processor_seconds(function: Callable[[], object]) -> float:
    """The least of several runs: nothing makes one faster than it is."""
    times = []
    for _ in range(TURNS):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


def private(model: Model, steps: int, *, compares: bool) -> float:
    """Seconds a step of the Trainer with the callback."""
    with tempfile.TemporaryDirectory() as journal:
        privacy = DifferentialPrivacy(
            noise_multiplier=1.0,
            target_delta=1e-6,
            ledger_dir=journal,
            isolation_probe=False,
            spot_checks=False,
            gradient_edits=None if compares else "none",
        )
        return _fit(model, steps, [privacy])


def main() -> None:
    quiet()
    values, source, cpu = torch.randn(VALUES), NoiseSource(), torch.device("cpu")
    for name, function in {
        "fingerprint": partial(fingerprint, [values]),
        "noise": partial(source.normal, VALUES, cpu),
    }.items():
        print(f"{name}: {1e9 * processor_seconds(function) / VALUES:.2f} ns a value")
    one = [torch.randn(1000)]
    print(f"fingerprint of 1000 values: {1e6 * processor_seconds(lambda: fingerprint(one)):.0f} µs")
    for name in ("logistic regression", "MLP"):
        runs = {"off": partial(private, compares=False), "on": partial(private, compares=True)}
        times = measure(runs, MODELS[name], STEPS, ROUNDS)
        off, on = (1e3 * statistics.median(times[each]) for each in ("off", "on"))
        low, *_, high = found = ratios(times, "off")["on"]
        middle = statistics.median(found)
        print(f"{name}: {off:.2f} ms off, {on:.2f} ms on: {middle:.3f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
