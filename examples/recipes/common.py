"""The frame of every recipe: train with and without privacy, measure, write down one row of the table.

A recipe is a model, its data, and two ways to train it. Private runs are repeated with several seeds (of
weights: noise and batches never depend on them). What a run cost is counted from the start of the script
to the end of the first private fit, so making features is in it.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import lightning as L
import torch
from table import Measured, Row, save, table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_dp import Checks
from lightning_dp.callbacks import DifferentialPrivacy

DATA_VARIABLE = "LIGHTNING_DP_DATA"
TEST_BATCH = 10_000
QUICK = 300  # records

MakeOptimizer = Callable[..., torch.optim.Optimizer]
SGD = partial(torch.optim.SGD, momentum=0.9)


@dataclass(frozen=True)
class Way:
    """A way to train a model; without a clip norm, without privacy."""

    epochs: int
    batch_size: int
    learning_rate: float
    max_grad_norm: float | None = None
    optimizer: MakeOptimizer = SGD


@dataclass(frozen=True)
class Options:
    """The options of every recipe, and when it began."""

    name: str
    usual_epsilon: float
    data: str
    epsilon: float
    seeds: int
    quick: bool
    output: Path
    cpu_begin: float = field(default_factory=time.process_time)
    wall_begin: float = field(default_factory=time.perf_counter)

    @property
    def limit(self) -> int | None:
        """Of records, in a quick run."""
        return QUICK if self.quick else None

    @property
    def command(self) -> str:
        data = " --data DIR" if self.data else ""
        epsilon = "" if self.is_usual else f" --epsilon {self.epsilon:g}"
        return f"python examples/recipes/{self.name}.py{data}{epsilon}"

    @property
    def is_usual(self) -> bool:
        return self.epsilon == self.usual_epsilon

    @property
    def suffix(self) -> str:
        """Of the file of a row at another budget."""
        return "" if self.is_usual else f"_{self.epsilon:g}"


def read_options(file: str, description: str, *, epsilon: float = 3.0) -> Options:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    given = os.environ.get(DATA_VARIABLE, "")
    parser.add_argument(
        "--data", default=given, help=f"folder of the data (or set {DATA_VARIABLE})"
    )
    parser.add_argument("--epsilon", type=float, default=epsilon, help="budget of each run")
    parser.add_argument("--seeds", type=int, default=5, help="how many private runs")
    parser.add_argument("--quick", action="store_true", help="few records, one epoch, no checks")
    parser.add_argument("--output", type=Path, default=Path("outputs/recipes"))
    found = vars(parser.parse_args())
    warnings.filterwarnings("ignore", ".*does not have many workers")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return Options(Path(file).stem, epsilon, **found)


class Learner(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows about privacy."""

    def __init__(self, net: nn.Module, way: Way) -> None:
        super().__init__()
        self.net, self.way = net, way

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return self.way.optimizer(trained, lr=self.way.learning_rate)


class Classifier(Learner):
    """Cross-entropy, and accuracy on test records."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())


class Regressor(Learner):
    """Squared error, and R² over all test records (they come as one batch)."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x).squeeze(1), y)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        error = (self(x).squeeze(1) - y).square().mean()
        self.log("R²", 1 - error / y.var(correction=0))


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts at zero."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def train_and_test(
    model: L.LightningModule,
    data: tuple[Dataset[object], Dataset[object]],
    way: Way,
    privacy: DifferentialPrivacy | None,
) -> tuple[float, float]:
    """The test metric before and after one fit."""
    train, test = data
    with tempfile.TemporaryDirectory() as folder:  # of the journal: to compare, not to publish
        trainer = L.Trainer(
            max_epochs=way.epochs,
            accelerator="auto",
            devices=1,
            callbacks=[] if privacy is None else [privacy],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            default_root_dir=folder,
        )
        held_out = DataLoader(test, batch_size=TEST_BATCH)
        (before,) = trainer.test(model, held_out, verbose=False)[0].values()
        trainer.fit(model, DataLoader(train, batch_size=way.batch_size, shuffle=True))
        (after,) = trainer.test(model, held_out, verbose=False)[0].values()
    return before, after


def measure(
    make: Callable[[Way], L.LightningModule],
    data: tuple[Dataset[object], Dataset[object]],
    way: Way,
    options: Options,
    delta: float,
    seeds: int,
) -> Measured:
    """Several runs of one way; ``options`` say when the first one began."""
    if options.quick:
        size = min(QUICK, len(data[0]))  # type: ignore[arg-type]
        way = Way(1, size // 4, way.learning_rate, way.max_grad_norm, way.optimizer)
        data = Subset(data[0], range(size)), data[1]
    starts, values, epsilon, cost = [], [], 0.0, (0.0, 0.0)
    for seed in range(1 if options.quick else seeds):
        L.seed_everything(seed, verbose=False)
        privacy = None
        if way.max_grad_norm is not None:
            checks = {"checks": Checks(dry_run=False, comparisons=False)} if options.quick else {}
            privacy = DifferentialPrivacy(
                options.epsilon, target_delta=delta, max_grad_norm=way.max_grad_norm, **checks
            )
        before, after = train_and_test(make(way), data, way, privacy)
        starts.append(before)
        values.append(after)
        epsilon = max(epsilon, 0.0 if privacy is None else privacy.epsilon)
        if seed == 0:
            now = time.process_time(), time.perf_counter()
            cost = now[0] - options.cpu_begin, now[1] - options.wall_begin
        print(f"  seed {seed}: {before:.4f} at the start, {after:.4f} at the end", flush=True)
    return Measured(statistics.mean(starts), values, epsilon, *cost)


def compare(
    title: str,
    metric: str,
    make: Callable[[Way], L.LightningModule],
    data: tuple[Dataset[object], Dataset[object]],
    ways: tuple[Way, Way],
    options: Options,
    *,
    delta: float = 1e-5,
    name: str = "",
) -> None:
    """Measure with privacy and without, print the row and save it."""
    print(f"{title}, with privacy", flush=True)
    private = measure(make, data, ways[0], options, delta, options.seeds)
    print(f"{title}, without privacy", flush=True)
    plain = measure(make, data, ways[1], options, delta, seeds=1)
    records = len(data[0])  # type: ignore[arg-type]
    row = Row(title, metric, options.command, records, delta, private, plain)
    path = save(row, options.output / f"{name or options.name}{options.suffix}.json")
    print(f"{table([row])}\nsaved: {path}")
