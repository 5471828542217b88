"""Noise that remembers beside independent noise at equal (ε, δ): the error in the iterates of SGD.

    python benchmarks/noise.py            # some seconds; deterministic

Root mean square of the noise in all iterates, over that of DP-SGD with Poisson batches at the same
(ε, 1e-5), constant learning rate, no momentum. What independent noise has is the column of 1.
"""

from __future__ import annotations

import argparse
import math

from lightning_dp import (
    BandedNoise,
    IndependentNoise,
    LambdaCGD,
    RandomAllocation,
    suggest_batches,
)
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Errors of noise that remembers.")
    parser.add_argument("--quick", action="store_true", help="one setting")
    settings = list(SETTINGS.items())[: 1 if parser.parse_args().quick else None]
    for title, compare in (("parts that take turns", cyclic), ("a fixed order", fixed)):
        print(f"\n{title}: ratio of errors")
        for name, setting in settings:
            for epsilon in (1.0, 3.0, 8.0):
                row = compare(*setting, epsilon)
                cells = "  ".join(f"{kind}: {value:.2f}" for kind, value in row.items())
                print(f"{name}, ε = {epsilon:g}   {cells}", flush=True)


if __name__ == "__main__":
    main()
