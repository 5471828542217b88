"""The cost of the callback in a step besides the gradients: sampling, ledger, noise, hooks.

    python benchmarks/overhead.py [--processor]

A chain of tiny linear layers, so that gradients cost nothing: the Trainer with the callback minus
the Trainer alone, with the journal in memory; and one durable write to the disk of this folder. The
goal is at most 250 µs a step and 50 µs a layer, without the disk. --processor takes the time of the
processor, for a machine with other work on it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
from models import Model
from step import by_processor, measure, ours, quiet, without_privacy
from torch import nn

ROUNDS, STEPS = 7, 60


def chain(layers: int) -> Model:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(10, 10) for _ in range(layers)))

    return Model(make, 8, lambda n: torch.rand(n, 10))


def durable_write() -> float:
    """Seconds for appending a line to a file and having it on the disk."""
    times = []
    with tempfile.NamedTemporaryFile("w", dir=".") as file:
        for _ in range(50):
            start = time.perf_counter()
            file.write("x" * 80 + "\n")
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processor", action="store_true", help="the processor's time")
    quiet()
    if parser.parse_args().processor:
        by_processor()
    cost = {}
    for layers in (1, 21):
        runs = {"without privacy": without_privacy, "ours": ours}
        times = measure(runs, chain(layers), STEPS, ROUNDS)
        difference = [b - a for a, b in zip(times["without privacy"], times["ours"], strict=True)]
        cost[layers] = 1e6 * statistics.median(difference)
        print(f"{layers} layers: {cost[layers]:.0f} µs a step more than the Trainer alone")
    per_layer = (cost[21] - cost[1]) / 20
    print(f"{cost[1] - per_layer:.0f} µs a step and {per_layer:.0f} µs a layer; goal 250 and 50")
    print(f"one durable write: {1e6 * durable_write():.0f} µs")


if __name__ == "__main__":
    main()
