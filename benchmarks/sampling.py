"""The cost of drawing one Poisson batch of 256 from 10 million records, next to Opacus' sampler.

    python benchmarks/sampling.py [--quick]

The goal is less than 100 microseconds for a draw.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler

from lightning_dp._noise import random_generator
from lightning_dp.sampling import Poisson

NUM_RECORDS = 10_000_000
BATCH_SIZE = 256
DRAWS = 2000
OPACUS_DRAWS = 20
GOAL = 100e-6


def seconds(draw: Callable[[], object], times: int) -> list[float]:
    """Return the seconds of each of so many draws, the first few left out."""
    taken = []
    for _ in range(times + 3):
        start = time.perf_counter()
        draw()
        taken.append(time.perf_counter() - start)
    return taken[3:]


def show(name: str, taken: list[float]) -> float:
    """Print median and quartiles in microseconds; the median in seconds."""
    low, median, high = (1e6 * q for q in statistics.quantiles(taken, n=4))
    print(f"{name:<14} {median:10.1f} µs   (quartiles {low:.1f} to {high:.1f})")
    return median * 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer draws")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rate, rng = BATCH_SIZE / NUM_RECORDS, random_generator(None)
    opacus = iter(
        UniformWithReplacementSampler(
            num_samples=NUM_RECORDS, sample_rate=rate, steps=OPACUS_DRAWS + 10
        )
    )

    print(f"one Poisson batch of {BATCH_SIZE} from {NUM_RECORDS:,} records, as a list of indices")
    ours = show(
        "lightning-dp",
        seconds(
            lambda: Poisson().draw(NUM_RECORDS, rate, rng).tolist(), DRAWS // 10 if quick else DRAWS
        ),
    )
    theirs = show("Opacus", seconds(lambda: next(opacus), 5 if quick else OPACUS_DRAWS))
    print(
        f"ratio {theirs / ours:,.0f}; goal < {GOAL * 1e6:.0f} µs: {'met' if ours < GOAL else 'missed'}"
    )


if __name__ == "__main__":
    main()
