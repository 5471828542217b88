"""Gains of augmentations, rows of users and shares of classes on digits, at equal ε and tuned alike.

    python benchmarks/units.py [--noises 20] [--tables users augmentations classes] [--quick]

A network of 64 tanh units on 1,437 of scikit-learn's digits, 60 steps of SGD with momentum 0.9 and clip
norm 1. Each way has three learning rates, tried with one noise; the best one then runs with others and
other first weights, the same for all ways of a table, and is compared pair by pair with the first way.

- Users: each has five digits, mostly of one class, ε = 8 of a user at δ = 1e-4, 64 of 287 users a step.
  The first way keeps one digit of each user, so that ε of a record is that of a user.
- Augmentations: each record is turned by up to 6 degrees and shifted by up to 0.3 pixels each time that
  it is read, ε = 3 at δ = 1e-5, 256 records a step. K views of a record are one clipped mean.
- Classes: of the odd digits one in five is in the training records, of which a step draws 128, ε = 3 at
  δ = 1e-5; all count alike in the test. The shares of the classes are taken for public. Clip norms are
  tried too: 0.1, 1 and 10, each with rates for gradients of norm 1.

Rates are chosen by the 360 test records on which accuracy is reported, for all ways alike.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias

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
TURN, SHIFT = 0.1, 0.3 / 4  # radians; half widths of an image
RATES = (0.1, 0.3, 1.0)
TUNED = 100  # a seed


class Digits(L.LightningModule):
    def __init__(self, rate: float, weights: Tensor, added: Tensor) -> None:
        super().__init__()
        self.net, self.rate = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)), rate
        self.weights, self.added = weights, added

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        losses = nn.functional.cross_entropy(self.net(x) + self.added, y, reduction="none")
        return (losses * self.weights[y]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.rate, momentum=0.9)


class Moved(Dataset[tuple[Tensor, Tensor]]):
    """Another view of a digit each time that it is read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.images, self.y = x.view(-1, 1, 8, 8) + 1, y  # so that 0 is the ground

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        angle, right, down = (torch.rand(3) * 2 - 1) * torch.tensor([TURN, SHIFT, SHIFT])
        cos, sin = angle.cos(), angle.sin()
        to = torch.stack([cos, -sin, right, sin, cos, down]).view(1, 2, 3)
        grid = nn.functional.affine_grid(to, [1, 1, 8, 8], align_corners=False)
        view = nn.functional.grid_sample(self.images[row : row + 1], grid, align_corners=False)
        return view.reshape(64) - 1, self.y[row]


@dataclass(frozen=True)
class Way:
    """A training and its test.

    Args:
        dataset, batch, units: training data, expected batch, and how many units of privacy there are.
        options: of the callback.
        norms: clip norms that are tried.
        weights: of the loss, by class.
        added, taken: what the scores of the classes have more in training, and less in the test.
    """

    dataset: Dataset[Any]
    batch: int
    units: int
    options: dict[str, Any] = field(default_factory=dict)
    norms: tuple[float, ...] = (1.0,)
    weights: Tensor = field(default_factory=lambda: torch.ones(10))
    added: Tensor = field(default_factory=lambda: torch.zeros(10))
    taken: Tensor = field(default_factory=lambda: torch.zeros(10))


Table: TypeAlias = tuple[dict[str, Way], tuple[float, float]]
"""Its ways, and (ε, δ)."""


@cache
def noise(rate: float, epsilon: float, delta: float) -> float:
    return calibrate(lambda step: 1.0, rate, STEPS, epsilon, delta)


def accuracy(
    way: Way,
    budget: tuple[float, float],
    setting: tuple[float, float],
    seed: int,
    steps: int,
    test: tuple[Any, Any],
) -> float:
    (epsilon, delta), (rate, norm) = budget, setting
    torch.manual_seed(seed)
    model = Digits(rate / norm, way.weights, way.added)
    # A seed makes noise and batches repeatable, and the run worth nothing but for comparisons.
    private = DifferentialPrivacy(
        target_delta=delta, max_grad_norm=norm, seed=seed, advice=False,
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
        found = (model.net(test[0]) - way.taken).argmax(1)
    return 100 * float((found == test[1]).double().mean())


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
    print(
        "| way | rate, norm | accuracy | against the first | p |\n| --- | --- | --- | --- | --- |"
    )
    first: list[float] = []
    for name, way in ways.items():
        settings = [
            (rate, norm) for norm in (way.norms[:1] if quick else way.norms) for rate in rates
        ]
        best = max(settings, key=lambda each: accuracy(way, budget, each, TUNED, steps, test))
        found = [accuracy(way, budget, best, seed, steps, test) for seed in seeds]
        against, p = "", ""
        if first:
            gained = [a - b for a, b in zip(found, first, strict=True)]
            against = f"{statistics.mean(gained):+.1f} ± {statistics.stdev(gained):.1f}"
            p = f"{stats.ttest_rel(found, first).pvalue:.1g}"
        first = first or found
        spread = f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f} %"
        print(f"| {name} | {best[0]:g}, {best[1]:g} | {spread} | {against} | {p} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three steps, one rate, two noises")
    parser.add_argument(
        "--noises", type=int, default=20, help="runs that are reported, of each way"
    )
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    x, y = load_digits(return_X_y=True)
    split = train_test_split(x / 8 - 1, y, test_size=360, random_state=0, stratify=y)
    x, x_test, y, y_test = map(torch.tensor, split)
    for name in options.tables:
        ways, budget = TABLES[name](x.float(), y)
        compare(name, ways, budget, (x_test.float(), y_test), options.noises, options.quick)


def users(x: Tensor, y: Tensor) -> Table:
    by_class = y.argsort(stable=True)  # users of neighbours have one class, mostly
    owners = torch.empty_like(y)
    owners[by_class] = torch.arange(len(y)) // ROWS
    kept = by_class[torch.arange(0, len(y), ROWS)]
    several = {
        f"at most {k} rows": Way(
            TensorDataset(x, y), 64, len(kept), {"unit": UserLevel(owners.tolist(), most_rows=k)}
        )
        for k in (1, 2, ROWS)
    }
    first = {"one row of each user": Way(TensorDataset(x[kept], y[kept]), 64, len(kept))}
    return {**first, **several}, (8.0, 1e-4)


def augmentations(x: Tensor, y: Tensor) -> Table:
    moved = {
        f"{k} moved view{'s' if k > 1 else ''}": Way(Moved(x, y), 256, len(y), {"augmentations": k})
        for k in (1, 4)
    }
    return {"as they are": Way(TensorDataset(x, y), 256, len(y)), **moved}, (3.0, 1e-5)


def classes(x: Tensor, y: Tensor) -> Table:
    place = torch.stack([(y[: i + 1] == y[i]).sum() for i in range(len(y))])  # within its class
    kept = (y % 2 == 0) | (place % 5 == 0)
    x, y = x[kept], y[kept]
    shares = torch.bincount(y) / len(y)
    way = Way(TensorDataset(x, y), 128, len(y), norms=(0.1, 1.0, 10.0))
    weights = 0.1 / shares
    return {
        "as they are": way,
        "loss by 1 / share, clip norm 0.1": replace(way, weights=weights, norms=(0.1,)),
        "loss by 1 / share": replace(way, weights=weights),
        "log share added in training": replace(way, added=shares.log()),
        "log share taken away in the test": replace(way, taken=shares.log()),
    }, (3.0, 1e-5)


TABLES: dict[str, Callable[[Tensor, Tensor], Table]] = {
    "users": users,
    "augmentations": augmentations,
    "classes": classes,
}


if __name__ == "__main__":
    main()
