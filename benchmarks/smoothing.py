"""The cost of Laplacian smoothing, next to the draw of the noise and other ways to compute it.

    python benchmarks/smoothing.py [--quick]

One thread, float32, the ways interleaved. "Authors" is the form of the paper's programs, a complex
FFT of the whole vector, here with the spectrum of A_σ computed beforehand, in their favour. "rFFT"
is the same without the redundant half, "convolution" the kernel cut off where float32 no longer
sees it. Goals: at most the time of one draw of the noise of that length, and at least 10 times
faster than the authors' form.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp.functional import laplacian_smoothing

SIZES = (1_000_000, 10_000_000, 27_000_001)  # the last is awkward for an FFT
QUICK_SIZES = (100_003, 1_000_000)
SIGMAS = (1.0, 3.0, 10.0, 30.0)
ROUNDS = {1_000_000: 15, 10_000_000: 7}
FEWEST_ROUNDS = 3
NOISE_GOAL, AUTHORS_GOAL = 1.0, 10.0
ERROR_GOAL = 5e-7

Way = Callable[[Tensor], Tensor]


def spectrum(size: int, sigma: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """1 / (1 + 2σ - 2σ cos(2πk/d))."""
    angles = torch.arange(size, dtype=torch.float64).mul_(2 * math.pi / size)
    return (1 + 2 * sigma * (1 - angles.cos_())).reciprocal_().to(dtype)


def authors(size: int, sigma: float) -> Way:
    """A complex FFT there and back."""
    factors = spectrum(size, sigma)
    return lambda v: torch.fft.ifft(torch.fft.fft(v) * factors).real


def rfft(size: int, sigma: float) -> Way:
    """A real FFT there and back."""
    factors = spectrum(size, sigma)[: size // 2 + 1].clone()
    return lambda v: torch.fft.irfft(torch.fft.rfft(v) * factors, n=size)


def convolution(size: int, sigma: float) -> Way:
    """torch's convolution with the truncated kernel ω^|j| / √(1 + 4σ)."""
    theta = 2 * math.asinh(0.5 / math.sqrt(sigma))
    taps = math.ceil(17.3 / theta)
    offsets = torch.arange(-taps, taps + 1, dtype=torch.float64)
    kernel = torch.exp(-theta * offsets.abs()).div_(math.sqrt(1 + 4 * sigma)).float().view(1, 1, -1)

    def smooth(v: Tensor) -> Tensor:
        padded = torch.cat([v[-taps:], v, v[:taps]])
        return torch.nn.functional.conv1d(padded.view(1, 1, -1), kernel).view(-1)

    return smooth


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def error(size: int, sigma: float, v: Tensor) -> float:
    """‖u - exact‖ / ‖exact‖, exact by a float64 FFT."""
    factors = spectrum(size, sigma, torch.float64)[: size // 2 + 1]
    exact = torch.fft.irfft(torch.fft.rfft(v.double()) * factors, n=size)
    return float((laplacian_smoothing(v, sigma) - exact).norm() / exact.norm())


def compare(size: int, sigma: float, rounds: int) -> bool:
    """Print one row of the table; whether the goals are met."""
    v, source = torch.randn(size), NoiseSource()
    ways: dict[str, Way] = {
        "ours": lambda v: laplacian_smoothing(v, sigma),
        "noise": lambda v: source.add_normal(v, 1e-3),
        "authors": authors(size, sigma),
        "rfft": rfft(size, sigma),
        "convolution": convolution(size, sigma),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            duration = seconds(lambda way=way: way(v))
            if turn:  # the first turn warms up
                taken[name].append(duration)

    def ratios(one: str, other: str) -> tuple[float, float, float]:
        values = sorted(a / b for a, b in zip(taken[one], taken[other], strict=True))
        return statistics.median(values), values[0], values[-1]

    each = [f"{1e9 * statistics.median(times) / size:.2f}" for times in taken.values()]
    of_noise, of_authors = ratios("ours", "noise"), ratios("authors", "ours")
    off = error(size, sigma, v)
    cells = [f"{size:,}", f"{sigma:g}", *each]
    cells += ["{:.2f} ({:.2f} to {:.2f})".format(*of_noise)]
    cells += ["{:.0f} ({:.0f} to {:.0f})".format(*of_authors), f"{off:.1e}"]
    print("| " + " | ".join(cells) + " |", flush=True)
    return of_noise[0] <= NOISE_GOAL and of_authors[0] >= AUTHORS_GOAL and off <= ERROR_GOAL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(
        "nanoseconds for each entry, medians; ratios with the least and the largest of all rounds\n"
    )
    header = "d|σ|ours|noise draw|authors|rFFT|convolution|ours / noise|authors / ours|error"
    print(f"| {header.replace('|', ' | ')} |")
    print("|---" * (header.count("|") + 1) + "|")
    sizes = QUICK_SIZES if quick else SIZES
    met = [
        compare(size, sigma, FEWEST_ROUNDS if quick else ROUNDS.get(size, FEWEST_ROUNDS))
        for size in sizes
        for sigma in (SIGMAS if size < SIZES[-1] else SIGMAS[:1])
    ]
    print(
        f"\ngoals (ours / noise <= {NOISE_GOAL:g}, authors / ours >= {AUTHORS_GOAL:g}, error <= "
        f"{ERROR_GOAL:g}): met in {sum(met)} of {len(met)} rows"
    )


if __name__ == "__main__":
    main()
