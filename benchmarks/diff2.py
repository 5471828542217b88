"""What a step of gradient differences costs: two points instead of one, through the Trainer.

    python benchmarks/diff2.py [--quick]

DP-SGD and DIFF2 with the same engine, model, batch size and noise; all timed steps of DIFF2 are
differences. Runs of the two alternate. The goal for the ratio is at most 2.2.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import warnings

import torch
from step import CLIP_NORM, NUM_RECORDS, PLAIN, ROUNDS, STEPS, cnn, mlp, through_the_trainer
from torch.utils.data import TensorDataset

from lightning_dp import Diff2

GOAL = 2.2
DIFFERENCES = Diff2(restart_every=10**6, max_grad_norm=CLIP_NORM, split=1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    steps, rounds = (5, 3) if parser.parse_args().quick else (STEPS, ROUNDS)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    data = TensorDataset(torch.rand(NUM_RECORDS, 1, 28, 28), torch.randint(10, (NUM_RECORDS,)))
    for name, make in (("MLP", mlp), ("CNN", cnn)):
        times = []
        for turn in range(rounds):
            order = (PLAIN, DIFFERENCES) if turn % 2 else (DIFFERENCES, PLAIN)
            pair = {e: through_the_trainer(make(), data, steps, e) for e in order}
            times.append((pair[PLAIN], pair[DIFFERENCES]))
        one, two = (1e3 * statistics.median(side) for side in zip(*times, strict=True))
        ratios = sorted(b / a for a, b in times)
        ratio = statistics.median(ratios)
        print(
            f"{name}: DP-SGD {one:.2f} ms, a difference {two:.2f} ms a step (medians of {rounds} "
            f"runs)\n     ratio {ratio:.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}; "
            f"goal <= {GOAL}: {'met' if ratio <= GOAL else 'missed'}"
        )


if __name__ == "__main__":
    main()
