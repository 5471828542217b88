"""Parts 2 to 4 of laplacian_smoothing.py: convolutional networks.

A bare loop around the package's sampling, clipping, noise and smoothing: it releases what the callback
in a Trainer would.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from archives import mnist
from laplacian_smoothing_data import cifar10
from mnist_cnn import MnistCNN
from torch import Tensor, nn
from trainee import Trainee

from lightning_dp._noise import NoiseSource, random_generator
from lightning_dp._world import World
from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.boundary import Query, Term, add_noise
from lightning_dp.functional import laplacian_smoothing, unflatten
from lightning_dp.sampling import Poisson

TARGET_DELTA, BATCH_SIZE = 1e-5, 256
DECAY_AT, DECAY = 10_000, 0.1  # steps; the paper's, and more than these runs make


def mnist_network() -> nn.Module:
    """The CNN of TensorFlow Privacy's MNIST tutorial (26,010 parameters)."""
    return MnistCNN().net


def cifar_network() -> nn.Module:
    """The CNN of TensorFlow's CIFAR-10 tutorial (1,068,298 parameters), for 24 x 24 pixels."""

    def normalise() -> nn.Module:
        return nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)

    def halve() -> nn.Module:
        return nn.MaxPool2d(3, stride=2, padding=1)

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), halve(), normalise()),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.ReLU(), normalise(), halve()),
        *(nn.Flatten(), nn.Linear(64 * 6 * 6, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU()),
        nn.Linear(192, 10),
    )


@dataclass(frozen=True)
class Run:
    """One private fit."""

    data: str
    records: int
    test_records: int
    epochs: int
    noise_multiplier: float
    optimizer: str
    learning_rate: float
    sigma: float
    clip_norm: float
    seed: int

    @property
    def sample_rate(self) -> float:
        return BATCH_SIZE / self.records

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.records // BATCH_SIZE)

    def spent(self, epochs: int) -> float:
        """ε after so many epochs."""
        return _spent(self.noise_multiplier, self.sample_rate, epochs * self.steps_per_epoch)

    def affordable(self, budget: float) -> int:
        """The largest number of epochs that does not spend more."""
        return bisect_right(range(1, self.epochs + 1), budget, key=self.spent)

    @property
    def method(self) -> str:
        """The paper's name, one of SGD, LSSGD, Adam and LSAdam."""
        return ("LS" if self.sigma else "") + self.optimizer


@lru_cache(maxsize=4096)
def _spent(noise_multiplier: float, sample_rate: float, steps: int) -> float:
    return epsilon([(PoissonGaussian(noise_multiplier, sample_rate), steps)], TARGET_DELTA)


@dataclass(frozen=True)
class Outcome:
    """Validation accuracy in percent after each epoch, and the time of the run.

    ``average`` is the accuracy of the mean of the epoch's iterates.
    """

    last: list[float]
    average: list[float]
    seconds: float


@lru_cache(maxsize=2)
def mnist_tensors(folder: str, records: int, test_records: int) -> tuple[Tensor, ...]:
    """Pixels in [0, 1] with a channel, and labels; the validation part is of the test set."""
    x, y, x_test, y_test = mnist(folder)
    found: list[Tensor] = []
    for images, labels, count in ((x, y, records), (x_test, y_test, test_records)):
        found.append(torch.tensor(images[:count]).unsqueeze(1).float() / 255)
        found.append(torch.tensor(labels[:count].astype(np.int64)))
    return tuple(found)


# -- training --------------------------------------------------------------------------------------


def fit(run: Run, folder: str, device: str) -> Outcome:
    """Train once; runs that differ in method only share their batches and their noise."""
    load = mnist_tensors if run.data == "mnist" else cifar10
    found = load(folder, run.records, run.test_records)
    x, y, x_test, y_test = (tensor.to(device) for tensor in found)
    torch.manual_seed(run.seed)
    net = (mnist_network() if run.data == "mnist" else cifar_network()).to(device)
    trainee, query = Trainee(net, x, y), Query((Term(),), run.clip_norm, run.noise_multiplier)
    params = trainee.params
    kind = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}[run.optimizer]
    optimizer = kind(params, lr=run.learning_rate)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [DECAY_AT], DECAY)
    rng, noise = random_generator(run.seed, 1), NoiseSource(run.seed)
    outcome, start = Outcome([], [], 0.0), time.perf_counter()
    for _ in range(run.epochs):
        total: Tensor | float = 0.0
        for _ in range(run.steps_per_epoch):
            chosen = Poisson().draw(run.records, run.sample_rate, rng)
            bounded = trainee.bounded_sum(query, chosen)
            release = add_noise(bounded, run.noise_multiplier, noise, World())
            estimate = laplacian_smoothing(release.mean(BATCH_SIZE).value, run.sigma)
            for param, grad in zip(params, unflatten(estimate, params), strict=True):
                param.grad = grad
            optimizer.step()
            scheduler.step()
            total = total + nn.utils.parameters_to_vector(params).detach()
        here = nn.utils.parameters_to_vector(params).detach().clone()
        outcome.last.append(accuracy(net, x_test, y_test))
        nn.utils.vector_to_parameters(total / run.steps_per_epoch, params)
        outcome.average.append(accuracy(net, x_test, y_test))
        nn.utils.vector_to_parameters(here, params)
    return replace(outcome, seconds=time.perf_counter() - start)


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Percent that is classified correctly."""
    parts = zip(x.split(500), y.split(500), strict=True)
    return 100 * sum(float((net(a).argmax(1) == b).sum()) for a, b in parts) / len(y)


# -- what is run -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Records and epochs of the three experiments, and noises of each run."""

    mnist: tuple[int, int]
    long: tuple[int, int]
    cifar: tuple[int, int]
    test_records: int
    seeds: int = 1


FULL = Size(mnist=(10_240, 15), long=(7_680, 60), cifar=(5_120, 8), test_records=2_000)
QUICK = Size(mnist=(2_560, 3), long=(2_560, 4), cifar=(512, 1), test_records=500)
# The paper's 60 epochs of MNIST; half of CIFAR-10, whose epochs it does not state.
PAPER = Size((60_000, 60), (60_000, 60), (25_000, 20), test_records=10_000, seeds=3)
TINY = Size((512, 2), (512, 2), (256, 1), test_records=100, seeds=2)  # --quick of that

SIGMA_OF_NOISE = {2.0: 0.2, 5.0: 1.0, 8.0: 1.0, 10.0: 1.0}  # the paper's
RATES = {"SGD": 0.15, "Adam": 0.001}
METHODS = ("SGD", "LSSGD", "Adam", "LSAdam")
LONG_SIGMAS, LONG_RATES = (0.0, 0.5, 1.0, 3.0), (0.05, 0.15, 0.5)


def methods(base: Run, sigma: float) -> list[Run]:
    """SGD, LSSGD, Adam, LSAdam."""
    return [
        replace(base, optimizer=kind, learning_rate=rate, sigma=s)
        for kind, rate in RATES.items()
        for s in (0.0, sigma)
    ]


def mnist_runs(size: Size) -> list[Run]:
    """The paper's figure 5: four methods at four noise multipliers."""
    base = Run("mnist", size.mnist[0], size.test_records, size.mnist[1], 0, "", 0, 0, 1.0, 0)
    return [
        run
        for noise, sigma in SIGMA_OF_NOISE.items()
        for run in methods(replace(base, noise_multiplier=noise), sigma)
    ]


def long_runs(size: Size) -> list[Run]:
    """The paper's figure 7: noise multiplier 10, over σ at the paper's rate, and over rates."""
    base = Run("mnist", size.long[0], size.test_records, size.long[1], 10.0, "SGD", 0, 0, 1.0, 0)
    chosen = [(sigma, RATES["SGD"]) for sigma in LONG_SIGMAS]
    chosen += [(s, rate) for rate in LONG_RATES if rate != RATES["SGD"] for s in (0.0, 1.0)]
    return [replace(base, sigma=sigma, learning_rate=rate) for sigma, rate in chosen]


def cifar_runs(size: Size) -> list[Run]:
    """The paper's figure 6: clip norm 3, noise multiplier 2."""
    base = Run("cifar", size.cifar[0], size.test_records, size.cifar[1], 2.0, "", 0, 0, 3.0, 0)
    return methods(base, SIGMA_OF_NOISE[2.0])
