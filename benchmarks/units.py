"""Gains of augmentations and rows of users on digits, at equal ε and tuned alike.

    python benchmarks/units.py [--noises 20] [--quick]

A network of 64 tanh units on 1,437 of scikit-learn's digits, 60 steps of SGD with momentum 0.9 and clip
norm 1. Each way has three learning rates, tried with one noise; the best one then runs with others and
other first weights, the same for all ways of a table, and is compared pair by pair with the first way.

- Augmentations: each record is shifted by up to a pixel in each direction each time that it is read,
  ε = 3 at δ = 1e-5, 256 records a step. K views of a record are one clipped mean.
- Users: each has five digits, mostly of one class, ε = 8 of a user at δ = 1e-4, 64 of 287 users a step.
  The first way keeps one digit of each user, so that ε of a record is that of a user.

Rates are chosen by the 360 test records on which accuracy is reported, for all ways alike.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning as L
import torch
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_dp import Checks, UserLevel
from lightning_dp.accounting import calibrate
from lightning_dp.callbacks import DifferentialPrivacy

STEPS, ROWS = 60, 5
RATES = (0.1, 0.3, 1.0)
TUNED = 100  # a seed


class Digits(L.LightningModule):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.net, self.rate = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)), rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.rate, momentum=0.9)


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Another view of a digit each time that it is read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.wide = nn.functional.pad(x.view(-1, 8, 8), (1, 1, 1, 1), value=-1.0)
        self.y = y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(3, (2,)).tolist()
        return self.wide[row, down : down + 8, right : right + 8].reshape(64), self.y[row]


@dataclass(frozen=True)
class Way:
    """Data, expected batch and units of a training, and arguments of the callback."""

    dataset: Dataset[Any]
    batch: int
    units: int
    options: dict[str, Any]


@cache
def noise(rate: float, epsilon: float, delta: float) -> float:
    return calibrate(lambda step: 1.0, rate, STEPS, epsilon, delta)


def accuracy(
    way: Way, budget: tuple[float, float], rate: float, seed: int, steps: int, test: tuple[Any, Any]
) -> float:
    epsilon, delta = budget
    torch.manual_seed(seed)
    model = Digits(rate)
    # A seed makes noise and batches repeatable, and the run worth nothing but for comparisons.
    private = DifferentialPrivacy(
        target_delta=delta, seed=seed, advice=False,
        noise_multiplier=noise(way.batch / way.units, epsilon, delta),
        checks=Checks(dry_run=False, loss_graph=False, comparisons=False), **way.options,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_steps=steps, max_epochs=-1, callbacks=[private], logger=False, accelerator="cpu",
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(model, DataLoader(way.dataset, batch_size=way.batch))
    assert steps < STEPS or 0.99 * epsilon < private.epsilon <= epsilon
    with torch.no_grad():
        return 100 * float((model.net(test[0]).argmax(1) == test[1]).double().mean())


def compare(
    title: str,
    ways: dict[str, Way],
    budget: tuple[float, float],
    test: tuple[Any, Any],
    noises: int,
    quick: bool,
) -> None:
    steps, rates, seeds = (3, RATES[:1], range(2)) if quick else (STEPS, RATES, range(noises))
    print(f"\n{title}: ε = {budget[0]:g} at δ = {budget[1]:g}")
    print("| way | rate | accuracy | against the first | p |\n| --- | --- | --- | --- | --- |")
    first: list[float] = []
    for name, way in ways.items():
        best = max(rates, key=lambda rate: accuracy(way, budget, rate, TUNED, steps, test))
        found = [accuracy(way, budget, best, seed, steps, test) for seed in seeds]
        against, p = "", ""
        if first:
            gained = [a - b for a, b in zip(found, first, strict=True)]
            against = f"{statistics.mean(gained):+.1f} ± {statistics.stdev(gained):.1f}"
            p = f"{stats.ttest_rel(found, first).pvalue:.1g}"
        first = first or found
        spread = f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} %"
        print(f"| {name} | {best:g} | {spread} | {against} | {p} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three steps, one rate, two noises")
    parser.add_argument(
        "--noises", type=int, default=20, help="runs that are reported, of each way"
    )
    options = parser.parse_args()
    last = options.noises, options.quick
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    split = train_test_split(x / 8 - 1, y, test_size=360, random_state=0, stratify=y)
    x, x_test, y, y_test = map(torch.tensor, split)
    x, test = x.float(), (x_test.float(), y_test)
    by_class = y.argsort(stable=True)  # users of neighbours have one class, mostly
    users = torch.empty_like(y)
    users[by_class] = torch.arange(len(y)) // ROWS
    owners = users.tolist()
    kept = by_class[torch.arange(0, len(y), ROWS)]

    compare("users", {
        "one row of each user": Way(TensorDataset(x[kept], y[kept]), 64, len(kept), {}),
        **{
            f"at most {k} rows": Way(
                TensorDataset(x, y), 64, len(kept), {"unit": UserLevel(owners, most_rows=k)}
            )
            for k in (1, 2, ROWS)
        },
    }, (8.0, 1e-4), test, *last)  # fmt: skip
    compare("augmentations", {
        "no shifts": Way(TensorDataset(x, y), 256, len(y), {}),
        **{
            f"{k} shifted view{'s' if k > 1 else ''}": Way(
                Shifted(x, y), 256, len(y), {"augmentations": k}
            )
            for k in (1, 4)
        },
    }, (3.0, 1e-5), test, *last)  # fmt: skip


if __name__ == "__main__":
    main()
