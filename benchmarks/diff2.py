"""The cost of a step of gradient differences: two points instead of one, through the Trainer.

    python benchmarks/diff2.py [--quick] [--models MLP CNN ...] [--processor]

A step of DIFF2 (every timed one is a difference) beside a step of DP-SGD with the same engine, and
beside two passes without privacy. Runs alternate. The goal is at most 1.25 times two passes for dense
models, 1.4 for the others. --processor takes the time of the processor, for a machine with other work.
"""

from __future__ import annotations

import argparse
import statistics

from models import SMALL, Model
from step import CLIP_NORM, by_processor, measure, ours, quiet, ratios, without_privacy

from lightning_dp import Diff2

GOALS = {"logistic regression": 1.25, "MLP": 1.25}
CONVOLUTIONS = 1.4  # and sequences
DIFFERENCES = Diff2(restart_every=10**6, max_grad_norm=CLIP_NORM, split=1e6)


def differences(model: Model, steps: int) -> float:
    """The Trainer with DIFF2."""
    return ours(model, steps, estimator=DIFFERENCES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--models", nargs="+", choices=list(SMALL), default=list(SMALL))
    parser.add_argument("--processor", action="store_true", help="take the processor's time")
    arguments = parser.parse_args()
    if arguments.processor:
        by_processor()
    quiet()
    runs = {"without privacy": without_privacy, "DP-SGD": ours, "DIFF2": differences}
    for name in arguments.models:
        steps = 4 if arguments.quick or name in ("transformer", "ResNet") else 15
        times = measure(runs, SMALL[name], steps, 3 if arguments.quick else 5)
        to_sgd = ratios(times, "DP-SGD")["DIFF2"]
        to_plain = [ratio / 2 for ratio in ratios(times, "without privacy")["DIFF2"]]
        found, goal = statistics.median(to_plain), GOALS.get(name, CONVOLUTIONS)
        print(
            f"{name}: {found:.2f} x two passes without privacy ({to_plain[0]:.2f} to "
            f"{to_plain[-1]:.2f}), goal <= {goal}: {'met' if found <= goal else 'missed'}; "
            f"{statistics.median(to_sgd):.2f} x DP-SGD",
            flush=True,
        )


if __name__ == "__main__":
    main()
