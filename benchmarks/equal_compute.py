"""Gains of samplings, remembered noise and averaged weights at equal ε and equal compute, tuned alike.

    python benchmarks/equal_compute.py --data DIR [--epsilon 3] [--noises 20] [--workers 1] [--quick]
    python benchmarks/equal_compute.py --data DIR --ways averaged    # and the first

A linear layer on MNIST's scattering features, averaged over cells of 2 x 2: 5 epochs of 512 records, SGD
with momentum 0.9, δ = 1e-5. Each way has four learning rates, tried with one noise; the best one then
runs with others, the same for all ways, and is compared pair by pair with Poisson batches and
independent noise. The noise is calibrated by ``suggest_batches``; the ε printed is the largest of the
ledgers. Rates are chosen by the test records on which accuracy is reported, for all ways alike. A p above
0.05 / 7 is no difference.

For fixed order "add_remove" has no bound: its ε is that of "zero_out".
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "recipes"))
from data import mnist
from scattering import scattering

from lightning_dp import Checks, suggest_batches
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.noise_plan import BatchChoice

EPOCHS, BATCH, DELTA, CLIP_NORM, MOMENTUM = 5, 512, 1e-5, 0.1, 0.9
GROUPS, CELL = 27, 2  # of features that are normalised together; averaged places
RATES = (2.0, 4.0, 8.0, 16.0)
TUNED = 100  # a seed


@dataclass(frozen=True)
class Way:
    """Batches and noise, and whether released weights are averaged."""

    choice: BatchChoice
    is_averaged: bool = False

    @property
    def name(self) -> str:
        sampling, noise = type(self.choice.sampling).__name__, type(self.choice.noise).__name__
        remembered = getattr(self.choice.noise, "lam", None) or self.choice.noise.bands
        noise = "" if noise == "IndependentNoise" else f", {noise}({remembered:g})"
        return f"{sampling}{noise}{', averaged' if self.is_averaged else ''}"


class Digits(L.LightningModule):
    def __init__(self, size: int, rate: float) -> None:
        super().__init__()
        self.net, self.rate = nn.Linear(size, 10), rate
        nn.init.zeros_(self.net.weight)
        nn.init.zeros_(self.net.bias)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.rate, momentum=MOMENTUM)


def features(images: Tensor) -> Tensor:
    """Scattering features, averaged over cells, each group of each image with mean 0 and variance 1."""
    with torch.no_grad():
        parts = (
            F.group_norm(F.avg_pool2d(scattering(part), CELL, ceil_mode=True), GROUPS).flatten(1)
            for part in images.split(500)
        )
        return torch.cat(list(parts))


def ways(records: int, epsilon: float) -> list[Way]:
    """One of each sampling: with the noise that is best there, and without."""
    found = suggest_batches(
        records, BATCH, EPOCHS, target_epsilon=epsilon, target_delta=DELTA, momentum=MOMENTUM
    )
    least: dict[tuple[str, bool], BatchChoice] = {}
    for each in found.table:
        key = type(each.sampling).__name__, each.noise.bands > 1
        if key not in least or each.error < least[key].error:
            least[key] = each
    least.pop(("TruncatedPoisson", False), None)  # Poisson batches, nearly always
    chosen = [Way(each) for each in least.values()]
    averaged = (("Poisson", False), ("CyclicPoisson", True), ("FixedOrder", True))
    return [*chosen, *(Way(least[key], is_averaged=True) for key in averaged if key in least)]


def accuracy(
    way: Way, rate: float, seed: int, epochs: int, data: Sequence[np.ndarray[Any, Any]]
) -> tuple[float, float]:
    """Return the test accuracy in %, and ε of the ledger."""
    quiet()
    x, y, x_test, y_test = map(torch.from_numpy, data)
    model = Digits(x.shape[1], rate)
    # A seed makes noise and batches repeatable, and the run worth nothing but for comparisons.
    private = DifferentialPrivacy(
        target_delta=DELTA, noise_multiplier=way.choice.noise_multiplier, max_grad_norm=CLIP_NORM,
        sampling=way.choice.sampling, noise=way.choice.noise, relation=way.choice.relation,
        checks=Checks(dry_run=False, loss_graph=False, comparisons=False), seed=seed, advice=False,
    )  # fmt: skip
    average = [EMAWeightAveraging(decay=0.98)] if way.is_averaged else []
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=epochs, callbacks=[*average, private], logger=False, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=BATCH))
    with torch.no_grad():
        right = (model.net(x_test).argmax(1) == y_test).double().mean()
    return 100 * float(right), private.epsilon


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with mnist.npz")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument(
        "--noises", type=int, default=20, help="runs that are reported, of each way"
    )
    parser.add_argument("--ways", default="", help="a part of the names of those beside the first")
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--quick", action="store_true", help="few records, one epoch, two noises")
    options = parser.parse_args()
    quiet()
    x, y, x_test, y_test = mnist(options.data, 1200 if options.quick else None)
    data = [each.numpy() for each in (features(x), y, features(x_test), y_test)]
    epochs, rates, reported = EPOCHS, RATES, range(options.noises)
    if options.quick:
        epochs, rates, reported = 1, RATES[1:2], range(2)
    first: list[float] = []
    print("| way | relation | z | predicted error | rate | ε | accuracy | against the first | p |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with joblib.Parallel(options.workers) as several:  # which map the features, not copy them
        for way in ways(len(x), options.epsilon):
            if first and options.ways not in way.name:
                continue
            run = joblib.delayed(partial(accuracy, way, epochs=epochs, data=data))
            tried = several(run(rate, TUNED) for rate in rates)
            best = rates[max(range(len(rates)), key=tried.__getitem__)]
            runs = several(run(best, seed) for seed in reported)
            found, spent = [each for each, _ in runs], max(each for _, each in runs)
            first = first or found
            gained = [a - b for a, b in zip(found, first, strict=True)]
            against = f"{statistics.mean(gained):+.2f} ± {statistics.stdev(gained):.2f}"
            p = "" if found is first else f"{stats.ttest_rel(found, first).pvalue:.1g}"
            cells = [
                way.name, way.choice.relation, f"{way.choice.noise_multiplier:.3f}",
                f"{way.choice.error:.2f}", f"{best:g}", f"{spent:.3f}",
                f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f} %",
                "" if found is first else against, p,
            ]  # fmt: skip
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
