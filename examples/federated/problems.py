"""Two ordinary LightningModules and their data, split among clients. Nothing here knows of privacy.

The data come from the folder in the run's configuration ``data``, else from the one in the
environment variable LIGHTNING_DP_DATA, as ``a9a.npz`` or ``mnist.npz`` with the arrays X_train,
y_train, X_test, y_test; else from OpenML, through scikit-learn.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

DATA_VARIABLE = "LIGHTNING_DP_DATA"


class Classifier(L.LightningModule):
    """Cross-entropy on any network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)  # without a Trainer, this leaves no trace
        return loss


def logistic_regression() -> nn.Module:
    """Starts at zero, so all clients and the server begin alike."""
    layer = nn.Linear(123, 2)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
    )


@dataclass(frozen=True)
class Problem:
    """A model and where its data are.

    Args:
        num_clients: how many share the training set.
        openml: name and version of the data set at OpenML.
        train_records: how many of OpenML's rows are for training.
        shape: of one record.
        divisor: of the features.
    """

    name: str
    num_clients: int
    openml: tuple[str, int]
    train_records: int
    shape: tuple[int, ...]
    divisor: float

    def module(self) -> L.LightningModule:
        """The model at its start, the same in every process."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Classifier(logistic_regression() if self.name == "a9a" else lenet())

    def records(self, client: int, num_clients: int, folder: str = "") -> Subset[TensorDataset]:
        """The training records of one client: every ``num_clients``-th of a shuffled set."""
        x, y, _, _ = arrays(self, folder)
        mine = np.random.default_rng(0).permutation(len(y))[client::num_clients]
        return Subset(TensorDataset(x, y), mine.tolist())

    def accuracy(self, module: L.LightningModule, folder: str = "") -> float:
        """On the test set, which is public here."""
        _, _, x, y = arrays(self, folder)
        module.eval()
        with torch.no_grad():
            return float((module(x).argmax(1) == y).float().mean())


PROBLEMS = {
    "a9a": Problem("a9a", 5, ("a9a", 1), 32_561, (123,), 1.0),
    "mnist": Problem("mnist", 4, ("mnist_784", 1), 60_000, (1, 28, 28), 255.0),
}


@lru_cache(maxsize=1)
def arrays(problem: Problem, folder: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training features and labels, test features and labels."""
    found = []
    for x, y in _read(problem, Path(folder or os.environ.get(DATA_VARIABLE, ""))):
        features = torch.tensor(x, dtype=torch.float32).reshape(-1, *problem.shape)
        found += [features / problem.divisor, torch.tensor(y).clamp(min=0).long()]  # -1 is class 0
    return found[0], found[1], found[2], found[3]


def _read(problem: Problem, folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    archive = folder / f"{problem.name}.npz"
    if archive.is_file():
        with np.load(archive, allow_pickle=False) as content:
            return [(content[f"X_{part}"], content[f"y_{part}"]) for part in ("train", "test")]
    from sklearn.datasets import fetch_openml

    name, version = problem.openml
    try:
        x, y = fetch_openml(name, version=version, return_X_y=True, as_frame=False)
    except Exception as error:
        raise SystemExit(
            f"{problem.name} is missing: {archive} does not exist, and OpenML did not give it "
            f"({type(error).__name__}: {error}). Put {problem.name}.npz with the arrays X_train, "
            f"y_train, X_test, y_test into a folder, and give it with --data DIR or in the "
            f"environment variable {DATA_VARIABLE}."
        ) from error
    x = x.toarray() if hasattr(x, "toarray") else x
    y, split = y.astype(float).astype(np.int64), problem.train_records
    return [(x[:split], y[:split]), (x[split:], y[split:])]
