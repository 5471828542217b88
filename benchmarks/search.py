"""ε of a search for hyper-parameters: trials that are all seen, beside the best of a random number.

python benchmarks/search.py
"""

from __future__ import annotations

import argparse
import math

from lightning_dp.accounting import (
    PLDAccountant,
    PoissonGaussian,
    RepeatAndSelect,
    StreamingRDPAccountant,
)
from lightning_dp.accounting.events import History

SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "Poisson": math.inf}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise-multiplier", type=float, default=1.0)
    parser.add_argument("--sample-rate", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--delta", type=float, default=1e-5)
    args = parser.parse_args()

    step = PoissonGaussian(args.noise_multiplier, args.sample_rate)
    run: History = [(step, args.steps)]
    print(f"one run: {PLDAccountant().epsilon(run, args.delta):.2f}")
    print("| trials | all seen | " + " | ".join(SHAPES) + " |")
    for trials in (1, 2, 5, 10, 30, 100):
        costs = [PLDAccountant().epsilon([(step, trials * args.steps)], args.delta)]
        for shape in SHAPES.values():
            search = RepeatAndSelect(run, trials, shape)
            costs.append(StreamingRDPAccountant().epsilon([(search, 1)], args.delta))
        print(f"| {trials} | " + " | ".join(f"{cost:.2f}" for cost in costs) + " |")


if __name__ == "__main__":
    main()
