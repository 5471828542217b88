"""Part 1 of laplacian_smoothing.py: multiclass logistic regression on MNIST.

The clipped gradients of softmax regression have a closed form, so many cells of a table (budget, σ,
learning rate) train in lock-step: a bare loop around the package's sampling, noise and smoothing.
The cells of a seed share their batches and, scaled to each budget, their noise, so that their
differences are paired.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from archives import mnist
from torch import Tensor

from lightning_dp._noise import NoiseSource, random_generator
from lightning_dp._world import World
from lightning_dp.accounting import PoissonGaussian, calibrate, epsilon
from lightning_dp.boundary import BoundedSum, add_noise
from lightning_dp.functional import clip_factors, laplacian_smoothing
from lightning_dp.sampling import Poisson

PIXELS, CLASSES, DELTA = 784, 10, 1e-5
WEIGHTS = PIXELS * CLASSES
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels, as the authors use them


@dataclass(frozen=True)
class Split:
    """Images as rows of pixels, and labels."""

    x: Tensor
    y: Tensor


@lru_cache(maxsize=2)
def splits(folder: str, divisor: float = 1.0, *, is_mixed: bool = False) -> dict[str, Split]:
    """50,000 records for training, 10,000 for validation (5/6 and 1/6 of what is there), and test.

    Pixels are (p - 0.1307) / divisor, p in [0, 1]; 0.1307 is the usual constant for MNIST. With
    ``is_mixed`` they come in one random order, the same for all images.
    """
    x, y, x_test, y_test = mnist(folder)
    held_out = len(x) // 6
    order = np.random.default_rng(0).permutation(PIXELS) if is_mixed else np.arange(PIXELS)

    def split(images: np.ndarray, labels: np.ndarray) -> Split:
        rows = torch.tensor(images.reshape(len(images), -1)[:, order]).float() / 255
        return Split((rows - MEAN) / divisor, torch.tensor(labels.astype(np.int64)))

    return {
        "training": split(x[:-held_out], y[:-held_out]),
        "validation": split(x[-held_out:], y[-held_out:]),
        "test": split(x_test, y_test),
    }


@dataclass(frozen=True)
class Protocol:
    """Settings that all cells of a table have in common.

    ``rate`` is how the learning rate changes: "1/t", "1/t by epoch" (t as it was when the epoch
    began), "constant" or "linear" (down to 0). ``is_averaged`` puts out the mean of the iterates of
    the second half instead of the last one. With ``clips_mean`` the mean gradient is clipped instead
    of each record's, as in the authors' program: then one record is not bounded.
    """

    records: int
    batch_size: int
    steps: int
    rate: str
    is_averaged: bool = False
    clip_norm: float = 1.0
    weight_decay: float = 1e-4
    clips_mean: bool = False

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.records

    def rate_at(self, step: int) -> float:
        """The factor of the learning rate at step 0, 1, ..."""
        if self.rate.startswith("1/t"):
            epoch = math.ceil(self.records / self.batch_size)
            return 1 / (step + 1 if self.rate == "1/t" else step // epoch * epoch + 1)
        return 1.0 if self.rate == "constant" else 1 - step / self.steps

    def spent(self, noise_multiplier: float) -> float:
        """The ε of this noise."""
        return epsilon([(PoissonGaussian(noise_multiplier, self.sample_rate), self.steps)], DELTA)


@dataclass(frozen=True)
class Cell:
    """One run of a table."""

    epsilon: float
    sigma: float
    noise_multiplier: float
    learning_rate: float = 1.0


@lru_cache(maxsize=256)
def tight_noise(records: int, batch_size: int, steps: int, budget: float) -> float:
    """The noise multiplier that (ε, δ) needs, Poisson batches, add/remove."""
    return calibrate(lambda step: 1.0, batch_size / records, steps, budget, DELTA)


def paper_noise(protocol: Protocol, budget: float) -> float:
    """Theorem 1's noise as a multiple of the bound on the sum: ν b / G at the best μ.

    ν² = 20 T α G² / (μ n² ε), α = log(1/δ) / ((1 - μ) ε) + 1. The theorem's side conditions are not
    checked: no μ meets them here.
    """
    mu = np.linspace(0.001, 0.999, 999)
    alpha = math.log(1 / DELTA) / ((1 - mu) * budget) + 1
    variance = 20 * protocol.steps * alpha / (mu * protocol.records**2 * budget)
    return protocol.batch_size * math.sqrt(variance.min())


class OneDrawForAll(NoiseSource):
    """The same standard normal vector for every cell, until the next step begins."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._drawn: Tensor | None = None

    def next_step(self) -> None:
        self._drawn = None

    def add_normal(self, vector: Tensor, std: float) -> None:
        if self._drawn is None:
            self._drawn = torch.zeros(len(vector), dtype=torch.float64)
            super().add_normal(self._drawn, 1.0)
        torch.add(vector, self._drawn, alpha=std, out=vector)


def clipped_sums(params: Tensor, x: Tensor, y: Tensor, protocol: Protocol) -> Tensor:
    """Σ_i clip(g_i) of each cell. ``params`` is (cells, 7850): the flat weight, then the bias.

    Record i has the gradient δ_i ⊗ (x_i, 1), of norm ‖δ_i‖ √(‖x_i‖² + 1), δ_i = softmax - one-hot.
    """
    cells = len(params)
    delta = scores_of(params, x).softmax(-1)
    delta[torch.arange(len(y)), :, y] -= 1
    lengths = (x.square().sum(1) + 1).sqrt()
    if not protocol.clips_mean:
        norms = delta.norm(dim=-1) * lengths.unsqueeze(1)
        delta.mul_(clip_factors(norms, protocol.clip_norm).unsqueeze(-1))
    of_weight = delta.view(-1, cells * CLASSES).T @ x
    sums = torch.cat([of_weight.view(cells, WEIGHTS), delta.sum(0)], dim=1)
    if protocol.clips_mean:
        norms = sums.norm(dim=1) / protocol.batch_size
        sums *= clip_factors(norms, protocol.clip_norm).unsqueeze(1)
    return sums


def iterates(
    records: Split, protocol: Protocol, cells: Sequence[Cell], seed: int
) -> Iterator[Tensor]:
    """The parameters of every cell after each step, (cells, 7850), in one place."""
    rng, noise = random_generator(seed, 1), OneDrawForAll(seed)
    params = torch.zeros(len(cells), WEIGHTS + CLASSES)
    rates = torch.tensor([cell.learning_rate for cell in cells]).unsqueeze(1)
    for step in range(protocol.steps):
        chosen = torch.from_numpy(Poisson().draw(len(records.y), protocol.sample_rate, rng))
        sums = clipped_sums(params, records.x[chosen], records.y[chosen], protocol)
        noise.next_step()
        estimates = smoothed(private_means(sums, protocol, cells, noise), cells)
        estimates += protocol.weight_decay * params
        params -= rates * protocol.rate_at(step) * estimates
        yield params


def train(records: Split, protocol: Protocol, cells: Sequence[Cell], seed: int) -> Tensor:
    """The parameters of every cell at the end, (cells, 7850)."""
    half, average = protocol.steps // 2, torch.zeros(())
    for step, params in enumerate(iterates(records, protocol, cells, seed)):
        if step >= half:
            average = average + params / (protocol.steps - half)
    return average if protocol.is_averaged else params


def curves(
    folder: str, protocol: Protocol, cells: Sequence[Cell], seed: int, at: Sequence[int]
) -> np.ndarray:
    """Training and validation losses (last) of each cell after some numbers of steps (first)."""
    data, found = splits(folder, DEVIATION), []
    for step, params in enumerate(iterates(data["training"], protocol, cells, seed), start=1):
        if step in at:
            found.append([losses(params, data[part]) for part in ("training", "validation")])
    return np.array(found).transpose(0, 2, 1)


def private_means(
    sums: Tensor, protocol: Protocol, cells: Sequence[Cell], noise: NoiseSource
) -> Tensor:
    """(sum + noise) / B of every cell; with ``clips_mean`` the bound is not one on a record's part."""
    releases = [
        add_noise(BoundedSum(total, protocol.clip_norm), cell.noise_multiplier, noise, World())
        for total, cell in zip(sums, cells, strict=True)
    ]
    return torch.stack([release.mean(protocol.batch_size).value for release in releases])


def smoothed(estimates: Tensor, cells: Sequence[Cell]) -> Tensor:
    """Each cell's estimate, smoothed with its σ."""
    for sigma in {cell.sigma for cell in cells}:
        rows = [i for i, cell in enumerate(cells) if cell.sigma == sigma]
        estimates[rows] = laplacian_smoothing(estimates[rows], sigma)
    return estimates


def right(
    folder: str,
    protocol: Protocol,
    cells: Sequence[Cell],
    seed: int,
    part: str,
    divisor: float,
    is_mixed: bool,
) -> np.ndarray:
    """Percent of a part's records that each cell classifies correctly after training."""
    data = splits(folder, divisor, is_mixed=is_mixed)
    return accuracies(train(data["training"], protocol, cells, seed), data[part])


def accuracies(params: Tensor, records: Split) -> np.ndarray:
    """Percent of the records that each cell classifies correctly."""
    guesses = scores_of(params, records.x).argmax(-1)
    return 100 * (guesses == records.y.unsqueeze(1)).double().mean(0).numpy()


def losses(params: Tensor, records: Split) -> np.ndarray:
    """The mean cross-entropy of each cell."""
    total = torch.zeros(len(params), dtype=torch.float64)
    for x, y in zip(records.x.split(5000), records.y.split(5000), strict=True):
        scores = scores_of(params, x)
        total += scores.logsumexp(-1).double().sum(0)
        total -= scores[torch.arange(len(y)), :, y].double().sum(0)
    return (total / len(records.y)).numpy()


def scores_of(params: Tensor, x: Tensor) -> Tensor:
    """(records, cells, classes)."""
    weight = params[:, :WEIGHTS].reshape(-1, PIXELS)
    return torch.addmm(params[:, WEIGHTS:].reshape(-1), x, weight.T).view(len(x), -1, CLASSES)
