"""What a step of gradient differences costs: two points instead of one, through the Trainer.

    python benchmarks/diff2.py [--quick] [--models MLP CNN ...]

A step of DIFF2 (every timed one is a difference) beside a step of DP-SGD with the same engine, and
beside two passes without privacy. Runs alternate. The goal is at most 2.2 times DP-SGD.
"""

from __future__ import annotations

import argparse
import statistics

from models import MODELS, Model
from step import CLIP_NORM, measure, ours, quiet, ratios, without_privacy

from lightning_dp import Diff2

GOAL = 2.2
DIFFERENCES = Diff2(restart_every=10**6, max_grad_norm=CLIP_NORM, split=1e6)


def differences(model: Model, steps: int) -> float:
    """The Trainer with DIFF2."""
    return ours(model, steps, DIFFERENCES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    quiet()
    runs = {"without privacy": without_privacy, "DP-SGD": ours, "DIFF2": differences}
    for name in arguments.models:
        steps = 4 if arguments.quick or name in ("transformer", "ResNet") else 15
        times = measure(runs, MODELS[name], steps, 3 if arguments.quick else 5)
        to_sgd = ratios(times, "DP-SGD")["DIFF2"]
        to_plain = statistics.median(ratios(times, "without privacy")["DIFF2"]) / 2
        ratio = statistics.median(to_sgd)
        print(
            f"{name}: {ratio:.2f} x DP-SGD ({to_sgd[0]:.2f} to {to_sgd[-1]:.2f}), goal <= {GOAL}: "
            f"{'met' if ratio <= GOAL else 'missed'}; {to_plain:.2f} x two passes without privacy"
        )


if __name__ == "__main__":
    main()
