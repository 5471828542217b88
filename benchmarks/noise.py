"""Noise that remembers beside independent noise at equal (ε, δ): the error in the iterates of SGD.

    python benchmarks/noise.py            # some seconds; deterministic
    python benchmarks/noise.py --time     # what a value of independent noise costs, part by part

Root mean square of the noise in all iterates, over that of DP-SGD with Poisson batches at the same
(ε, 1e-5), constant learning rate, no momentum. What independent noise has is the column of 1.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from lightning_dp import (
    BandedNoise,
    IndependentNoise,
    LambdaCGD,
    RandomAllocation,
    suggest_batches,
)
from lightning_dp._noise import CipherStream, fill_normal, random_generator
from lightning_dp.accounting import calibrate
from lightning_dp.accounting.gdp import mu_of_budget
from lightning_dp.noise import AbstractNoise

DELTA = 1e-5
SETTINGS = {
    "MNIST, B = 512, 15 epochs": (60_000, 512, 15),
    "MNIST, B = 2048, 40 epochs": (60_000, 2048, 40),
    "CIFAR, B = 512, 10 epochs": (50_000, 512, 10),
    "CIFAR, B = 8192, 60 epochs": (50_000, 8192, 60),
}
LAMBDAS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)


def square_root(bands: int) -> BandedNoise:
    """The first coefficients of (1 - x)^(-1/2), which are not optimised."""
    c = [1.0]
    for k in range(1, bands):
        c.append(c[-1] * (2 * k - 1) / (2 * k))
    return BandedNoise(bands, coefficients=c)


def cyclic(num_records: int, batch_size: int, epochs: int, epsilon: float) -> dict[str, float]:
    """Errors of what is suggested, by bands, and of the square root's coefficients; and of allocation."""
    found = suggest_batches(
        num_records, batch_size, epochs, target_epsilon=epsilon, target_delta=DELTA
    )
    steps = epochs * math.ceil(num_records / batch_size)
    rows = {"1": 1.0}
    for each in found.table:
        if isinstance(each.sampling, RandomAllocation):
            rows["allocated"] = each.error
        elif isinstance(each.noise, BandedNoise):
            optimised = each.noise.for_steps(steps).error(steps)
            bands = each.sampling.bands
            rows[f"{bands}"] = each.error
            rows[f"{bands}, root"] = each.error * square_root(bands).error(steps) / optimised
    return rows


def fixed(num_records: int, batch_size: int, epochs: int, epsilon: float) -> dict[str, float]:
    """Errors in a fixed order, of several kinds of noise."""
    passes = round(num_records / batch_size)
    steps, mu = passes * epochs, mu_of_budget(epsilon, DELTA)
    z = calibrate(lambda step: 1.0, batch_size / num_records, steps, epsilon, DELTA)
    poisson = z * IndependentNoise().error(steps)

    def error(noise: AbstractNoise) -> float:
        price = math.sqrt(math.fsum(noise.cost(use, passes) for use in range(epochs)))
        return price / mu * noise.error(steps) / poisson

    best = min(LAMBDAS, key=lambda lam: error(LambdaCGD(lam)))
    return {
        "independent": error(IndependentNoise()),
        f"λ-CGD {best:g}": error(LambdaCGD(best)),
        "8 bands": error(BandedNoise(8).for_steps(steps)),
        "a pass": error(BandedNoise(passes).for_steps(steps)),
    }


def cost(size: int = 3 << 13, rounds: int = 200) -> None:
    """Print processor nanoseconds a value, on one thread, of a block as it is drawn."""
    torch.set_num_threads(1)
    generator, cipher = random_generator(None), CipherStream()
    fast = np.random.Generator(np.random.SFC64())
    values, room = torch.empty(size, dtype=torch.float64), torch.empty(size // 2).double()
    half, single = torch.rand(size // 2, dtype=torch.float64), torch.empty(size)
    parts: dict[str, Callable[[], object]] = {
        "64 bits, PCG64DXSM (used)": lambda: generator.random(out=values.numpy()),
        "64 bits, SFC64": lambda: fast.random(out=values.numpy()),
        "64 bits, AES-256 (secure_noise)": lambda: cipher.random(out=values.numpy()),
        "log, float64": lambda: torch.log(half, out=room),
        "sqrt, float64": lambda: torch.sqrt(half, out=room),
        "cos, float64": lambda: torch.cos(half, out=room),
        "sin, float64": lambda: torch.sin(half, out=room),
        "together (used)": lambda: fill_normal(generator, values, room),
        "NumPy's ziggurat, float64": lambda: generator.standard_normal(out=values.numpy()),
        "torch.randn, float64": values.normal_,
        "torch.randn, float32, 24 bits": single.normal_,
    }
    for name, part in parts.items():
        times = []
        for _ in range(rounds):
            begun = time.process_time_ns()
            part()
            times.append(time.process_time_ns() - begun)
        print(f"{name:32} {statistics.median(times) / size:6.2f} ns a value")


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of noise that remembers.")
    parser.add_argument("--quick", action="store_true", help="one setting")
    parser.add_argument("--time", action="store_true", help="the cost of independent noise")
    arguments = parser.parse_args()
    if arguments.time:
        cost()
        return
    settings = list(SETTINGS.items())[: 1 if arguments.quick else None]
    for title, compare in (("parts that take turns", cyclic), ("a fixed order", fixed)):
        print(f"\n{title}: ratio of errors")
        for name, setting in settings:
            for epsilon in (1.0, 3.0, 8.0):
                row = compare(*setting, epsilon)
                cells = "  ".join(f"{kind}: {value:.2f}" for kind, value in row.items())
                print(f"{name}, ε = {epsilon:g}   {cells}", flush=True)


if __name__ == "__main__":
    main()
