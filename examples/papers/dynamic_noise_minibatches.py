"""Part 2 of dynamic_noise.py: decreasing noise under Poisson minibatches, through a Trainer."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import lightning as L
import matplotlib.pyplot as plt
import numpy as np
import torch
from archives import mnist
from common import TEST, TUNING_SEED, Summary, finished, finished_all, gains_text, table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.accounting import calibrate
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.plotting import plot_schedule
from lightning_dp.postprocessing import Momentum
from lightning_dp.schedules import AbstractSchedule, Constant, Exponential, FromInfluence

TARGET_DELTA, BATCH_SIZE = 1e-5, 256


def shape(last: float, steps: int) -> AbstractSchedule:
    """Exponential noise whose last step has ``last`` times the first one's."""
    return Constant() if last == 1 else Exponential(rate=-float(np.log(last)) / (steps - 1))


LASTS = {1.0: "constant", 0.5: "to 1/2", 0.25: "to 1/4", 2.0: "to 2 (growing)"}


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def small_cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 6, stride=3), nn.ReLU()),
        *(nn.Conv2d(8, 16, 4, stride=2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 3 * 3, 10)),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "logistic regression": logistic_regression,
    "small CNN": small_cnn,
}


class Classifier(L.LightningModule):
    """An ordinary LightningModule."""

    def __init__(self, net: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.net, self.learning_rate = net, learning_rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


@dataclass(frozen=True)
class Run:
    """One private fit."""

    folder: str
    network: str
    learning_rate: float
    epsilon: float
    last: float
    seed: int
    records: int
    epochs: int
    momentum: float = 0.0
    schedule: AbstractSchedule | None = None  # instead of falling to ``last``

    @property
    def steps(self) -> int:
        return self.epochs * -(-self.records // BATCH_SIZE)


@lru_cache(maxsize=1)
def tensors(folder: str) -> tuple[Tensor, ...]:
    """MNIST in [-1, 1] with a channel, and labels."""
    x, y, x_test, y_test = (torch.tensor(np.ascontiguousarray(a)) for a in mnist(folder))
    scaled = [images.unsqueeze(1).float() / 127.5 - 1 for images in (x, x_test)]
    return scaled[0], y.long(), scaled[1], y_test.long()


def fit(run: Run) -> tuple[float, float, float]:
    """Final training loss, test accuracy in percent, and ε of one private fit."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    x, y, x_test, y_test = tensors(run.folder)
    x, y = x[: run.records], y[: run.records]
    L.seed_everything(run.seed, verbose=False)
    model = Classifier(NETWORKS[run.network](), run.learning_rate)
    privacy = DifferentialPrivacy(
        run.epsilon,
        target_delta=TARGET_DELTA,
        noise_schedule=run.schedule or shape(run.last, run.steps),
        postprocessing=(Momentum(run.momentum),) if run.momentum else (),
        seed=run.seed,  # batches and noise that differ in their scale only; never for real use
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=run.epochs,
            accelerator="cpu",
            callbacks=[privacy],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            log_every_n_steps=run.steps,  # each logged ε costs some milliseconds
            default_root_dir=folder,
        )
        trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True))
    assert privacy.steps == run.steps
    model.eval()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model.net(x), y))
        accuracy = 100 * float((model.net(x_test).argmax(1) == y_test).float().mean())
    return loss, accuracy, privacy.epsilon


def compare(
    pool: ProcessPoolExecutor,
    folder: str,
    output: Path,
    seeds: int,
    epsilons: Sequence[float],
    networks: Sequence[str],
    *,
    quick: bool,
) -> None:
    """Tables and pictures of decreasing against constant noise at equal ε."""
    lasts = (1.0, 0.25) if quick else tuple(LASTS)
    epsilons = (1.0,) if quick else epsilons
    records, epochs = (2000, 3) if quick else (10_000, 4)
    settings = [
        ("logistic regression", 0.1, epochs),
        ("logistic regression", 1.0, epochs),
        ("logistic regression", 4.0, epochs),
        ("logistic regression", 1.0, 3 * epochs),
        ("small CNN", 0.5, epochs),
    ]
    settings = settings[1:5:3] if quick else [each for each in settings if each[0] in networks]
    base = Run(folder, "", 0, 0, 0, 0, records, 0)
    runs = [
        replace(base, network=n, learning_rate=r, epochs=e, epsilon=eps, last=last, seed=seed)
        for n, r, e in settings
        for eps in epsilons
        for last in lasts
        for seed in range(seeds)
    ]
    results = dict(zip(runs, pool.map(partial(finished, fit), runs), strict=True))
    print("\n## 2. Poisson minibatches, PLD calibration, through the Trainer")
    print(
        f"\nMNIST-10, {records} records, expected batch {BATCH_SIZE}, clip 1, "
        f"δ = {TARGET_DELTA:g}, add/remove, {seeds} seeds. Noise falls exponentially from 1 to the "
        f"given part of its first value; differences are to constant noise. {TEST}"
    )
    for net, rate, length in settings:
        here = replace(base, network=net, learning_rate=rate, epochs=length)
        print(f"\n### {net}, learning rate {rate:g}, {here.steps} steps\n")
        cells = {
            (eps, last): np.array(
                [results[replace(here, epsilon=eps, last=last, seed=seed)] for seed in range(seeds)]
            )
            for eps in epsilons
            for last in lasts
        }
        print(_table(cells))
    _draw(records, replace(base, epochs=epochs).steps, output / "schedules.png")


# -- both forms of the influence, with momentum ----------------------------------------------------

MOMENTUM, MOMENTUM_EPSILONS, TUNING_NOISES = 0.9, (0.5, 1.0), 3
MOMENTUM_RATES = {"logistic regression": 1.0, "small CNN": 0.5}
DECAYS = (0.92, 0.94, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995)  # γ of "expinfl"
MOMENTUM_DECAYS = tuple((decay, beta) for decay in (0.94, 0.96, 0.98, 0.99) for beta in (0.9, 0.7))


def influenced(steps: int, decay: float, beta: float | None = None) -> FromInfluence:
    """γ^n n steps before the end ("expinfl"); with momentum (γ^(n+1) - β^(2n+2)) / (γ - β²).

    The second is Σ_t γ^(T-t) β^(2(t-i)), the sum in U_3 of Theorem 4.4: two reverse exponentials.
    """
    left = np.arange(steps - 1, -1, -1.0)
    influence = decay**left
    if beta is not None:
        influence = (decay ** (left + 1) - beta ** (2 * left + 2)) / (decay - beta**2)
    return FromInfluence(tuple((influence / influence.max()).tolist()))


def momentum_part(
    folder: str, seeds: int, networks: Sequence[str], jobs: int, *, quick: bool
) -> None:
    """Constant noise and both forms of the influence, each of these tuned over eight settings."""
    records, epochs = (2000, 3) if quick else (10_000, 4)
    trials, tried = (1, 2) if quick else (TUNING_NOISES, None)
    rows, pairs = [], []
    for network in networks[:1] if quick else networks:
        for epsilon in MOMENTUM_EPSILONS[:1] if quick else MOMENTUM_EPSILONS:
            rate = MOMENTUM_RATES[network]
            base = Run(folder, network, rate, epsilon, 1.0, 0, records, epochs, MOMENTUM)
            decays: dict[str, Sequence[object]] = {
                "expinfl": DECAYS[:tried],
                "momexpinfl": MOMENTUM_DECAYS[:tried],
            }
            forms = {
                "constant": [base],
                "expinfl": [
                    replace(base, schedule=influenced(base.steps, d)) for d in DECAYS[:tried]
                ],
                "momexpinfl": [
                    replace(base, schedule=influenced(base.steps, *both))
                    for both in MOMENTUM_DECAYS[:tried]
                ],
            }
            cells, found = [network, f"{epsilon:g}"], {}
            for form, runs in forms.items():
                best, words = 0, ""
                if len(runs) > 1:
                    tuning = [replace(r, seed=TUNING_SEED + s) for r in runs for s in range(trials)]
                    losses = [done[0] for done in finished_all(fit, [(r,) for r in tuning], jobs)]
                    best = int(np.reshape(losses, (len(runs), trials)).mean(1).argmin())
                    words = f", {decays[form][best]}"
                chosen = [(replace(runs[best], seed=seed),) for seed in range(seeds)]
                found[form] = np.array(finished_all(fit, chosen, jobs))
                for column, digits in ((0, 4), (1, 2)):
                    cells.append(Summary.of(found[form][:, column]).text(digits))
                cells[-2] += words
            rows.append(cells)
            for first, second in (
                ("expinfl", "constant"),
                ("momexpinfl", "constant"),
                ("momexpinfl", "expinfl"),
            ):
                pairs += [(found[first][:, k], found[second][:, k]) for k in (0, 1)]
    print(
        f"\n## 5. Momentum {MOMENTUM} on minibatches\n\n{records} digits, expected batch {BATCH_SIZE}, "
        f"{base.steps} steps, δ = {TARGET_DELTA:g}, {seeds} noises, settings chosen by the training loss "
        f"on {trials} others; learning rates {MOMENTUM_RATES}. {TEST}\n"
    )
    header = ["network", "ε"]
    header += [
        f"{form}: {what}" for form in forms for what in ("training loss", "test accuracy, %")
    ]
    print(table(header, rows))
    gains = []
    for digits, column in ((4, 0), (2, 1)):
        texts = gains_text(pairs[column::2], digits)
        gains.append([texts[3 * i : 3 * i + 3] for i in range(len(rows))])
    print("\nDifferences:\n")
    names = ("expinfl - constant", "momexpinfl - constant", "momexpinfl - expinfl")
    header = ["network", "ε", *(f"loss: {name}" for name in names)]
    header += [f"accuracy: {name}" for name in names]
    lines = [[*row[:2], *gains[0][i], *gains[1][i]] for i, row in enumerate(rows)]
    print(table(header, lines), flush=True)


def _table(cells: Mapping[tuple[float, float], np.ndarray]) -> str:
    """Losses and accuracies by ε and last noise, and their differences to constant noise."""
    judged = [key for key in cells if key[1] != 1]
    rows = {
        (eps, last): [f"{eps:g}", LASTS[last], f"{values[:, 2].max():.4f}"]
        for (eps, last), values in cells.items()
    }
    for column, digits, unit in ((0, 4, ""), (1, 2, " %")):
        pairs = [(cells[key][:, column], cells[key[0], 1.0][:, column]) for key in judged]
        gains = dict(zip(judged, gains_text(pairs, digits), strict=True))
        for key, values in cells.items():
            rows[key] += [
                Summary.of(values[:, column]).text(digits, unit),
                gains.get(key, ""),
            ]
    header = ("ε", "noise", "ε spent", "training loss", "difference", "test accuracy", "difference")
    return table(header, list(rows.values()))


def _draw(records: int, steps: int, path: Path) -> None:
    """σ_t and ε_t of constant and decreasing noise at ε = 1."""
    figure, axes = plt.subplots(1, len(LASTS), figsize=(4.2 * len(LASTS), 3.2))
    rate = BATCH_SIZE / records
    for ax, (last, name) in zip(axes, LASTS.items(), strict=True):
        schedule = shape(last, steps)
        scale = calibrate(schedule, rate, steps, 1.0, TARGET_DELTA)
        plot_schedule(
            schedule, steps, scale=scale, sample_rate=rate, delta=TARGET_DELTA, ax=ax
        ).set_title(name)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
