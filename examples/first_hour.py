"""The first hour: a model that is refused, then trained badly, then well, by the tool's own words.

    python examples/first_hour.py --data DIR [--seeds 0 1 2] [--output FILE.json]

An unchanged ResNet with BatchNorm, and 22,000 records of MNIST (see ``examples/mnist_cnn.py`` for DIR).

1. The callback is added. The model is refused, and the message names ``fix``: ``fix(model)`` is called.
2. The user's own settings are trained with: batches of 128, Adam with 1e-3, 2 epochs, ε = 3.
3. The line that begins with "try:" in what the tool says is read, and followed word for word: batch size,
   epochs, learning rate. Nothing else changes, and nobody has looked at another run.

Printed are test accuracies, ε of each fit and of both together, minutes of wall time and of CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from mnist_cnn import DATA_VARIABLE, mnist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import DifferentialPrivacy, fix
from lightning_dp.accounting import epsilon, epsilon_text, sweep_history

RECORDS = 22_000
TARGET_EPSILON, TARGET_DELTA = 3.0, 1e-5
PHYSICAL_BATCH = 128  # what the loader hands out; larger batches accumulate


class Block(nn.Module):
    """Two convolutions, and what goes around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inside + self.around(x))


class ResNet(L.LightningModule):
    """A small ResNet as anyone writes it: nothing in it knows about privacy."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


@dataclass(frozen=True)
class Settings:
    """The choices of a user."""

    batch_size: int
    epochs: int
    lr: float


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fit. ``words`` is all that the tool said."""

    settings: Settings
    accuracy: float
    epsilon: float
    minutes: float
    cpu_minutes: float
    words: str


FIRST = Settings(batch_size=128, epochs=2, lr=1e-3)


def fit(
    model: ResNet, settings: Settings, data: tuple[TensorDataset, ...], folder: Path
) -> Outcome:
    """Train and test with the one callback added, and keep what the tool said."""
    train, test = data
    privacy = DifferentialPrivacy(
        target_epsilon=TARGET_EPSILON, target_delta=TARGET_DELTA, ledger_dir=str(folder)
    )
    physical = min(settings.batch_size, PHYSICAL_BATCH)
    trainer = L.Trainer(
        max_epochs=settings.epochs,
        accumulate_grad_batches=settings.batch_size // physical,
        accelerator="cpu",
        callbacks=[privacy],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    started, cpu = time.perf_counter(), cpu_seconds()
    with said() as words:
        trainer.fit(model, DataLoader(train, batch_size=physical, shuffle=True))
    minutes, cpu_minutes = (time.perf_counter() - started) / 60, (cpu_seconds() - cpu) / 60
    accuracy = trainer.test(model, DataLoader(test, batch_size=1000), verbose=False)[0]["accuracy"]
    return Outcome(settings, accuracy, privacy.epsilon, minutes, cpu_minutes, "\n".join(words))


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Collect, and print, what the package says by its logger."""
    words: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    listener, logger = Listener(), logging.getLogger("lightning.pytorch")
    logger.addHandler(listener)
    try:
        yield words
    finally:
        logger.removeHandler(listener)


def advised(words: str) -> Settings:
    """Read the line "try: batch_size=1024 (...), max_epochs=8; lr=0.007 for Adam ..."."""
    found = re.findall(r"try: batch_size=(\d+).*max_epochs=(\d+).*; lr=([\d.e-]+)", words)
    if not found:
        raise SystemExit("The tool gave no advice that could be followed.")
    batch_size, epochs, lr = found[-1]
    return Settings(int(batch_size), int(epochs), float(lr))


def first_hour(data: tuple[TensorDataset, ...], folder: Path) -> tuple[Outcome, Outcome]:
    """Do what a newcomer does, once."""
    try:
        fit(ResNet(FIRST.lr), FIRST, data, folder)
    except MisconfigurationException as refusal:
        print(f"refused: {refusal}\n")
        if "fix(" not in str(refusal):
            raise
    first = fit(fix(ResNet(FIRST.lr)), FIRST, data, folder)
    settings = advised(first.words)
    return first, fit(fix(ResNet(settings.lr)), settings, data, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help=f"folder of MNIST (or set {DATA_VARIABLE})")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="a run for each")
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--output", type=Path, help="a JSON file with all outcomes")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")
    given = options.data or os.environ.get(DATA_VARIABLE)
    train, test = mnist(None if given is None else Path(given))
    data = TensorDataset(*train[: options.records]), test
    torch.set_num_threads(1)

    runs = []
    for seed in options.seeds:
        L.seed_everything(seed, verbose=False)  # weights only: noise and batches never depend on it
        with tempfile.TemporaryDirectory() as folder:
            outcomes = first_hour(data, Path(folder))
            both = epsilon(sweep_history(folder), delta=TARGET_DELTA)
        for outcome in outcomes:
            print(
                f"run {seed}: {outcome.settings}: {outcome.accuracy:.1%} at ε = "
                f"{epsilon_text(outcome.epsilon)}, {outcome.minutes:.1f} min, "
                f"{outcome.cpu_minutes:.1f} CPU min",
                flush=True,
            )
        print(f"run {seed}: both fits together have ε = {epsilon_text(both)}\n", flush=True)
        runs.append({"seed": seed, "both": both, "fits": [asdict(each) for each in outcomes]})
        if options.output is not None:
            options.output.write_text(
                json.dumps(runs, indent=1, ensure_ascii=False) + "\n", "utf-8"
            )


if __name__ == "__main__":
    main()
