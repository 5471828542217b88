"""The data sets of cubic_newton.py: rows of length 1, dealt out to clients, and the optimum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from archives import Arrays, find, read
from sklearn.linear_model import LogisticRegression
from torch import Tensor

TEST_SHARE = 0.2  # where a set has no test part


@dataclass(frozen=True)
class DataSet:
    """One set.

    Args:
        choose: keeps some records and makes the labels -1 and 1.
        make: where it comes from, if not from an archive.
    """

    title: str
    choose: Callable[[np.ndarray, np.ndarray], Arrays] = lambda x, y: (x, y)
    make: Callable[[], list[Arrays]] | None = None


def _three_or_five(x: np.ndarray, y: np.ndarray) -> Arrays:
    kept = (y == 3) | (y == 5)
    return x[kept].reshape(kept.sum(), -1) / 255, np.where(y[kept] == 3, 1, -1)


SYNTHETIC = (400_000, 20_000, 2_000)  # records to train on and to test with, features
LOGIT_STD = 8.0  # so that the labels' own rule is right on 90 %, as models are on the paper's set


def _synthetic() -> list[Arrays]:
    """Records in the shape of the paper's set ``epsilon``, which is not at hand; not its values.

    Feature j is normal with variance 1/j, a record's probability of 1 is a logistic function of it.
    """
    rng = np.random.default_rng(0)
    *counts, features = SYNTHETIC
    scales = np.arange(1, features + 1, dtype=np.float32) ** -0.5
    signs = rng.choice(np.array([-1, 1], np.float32), features)
    slopes = LOGIT_STD / float(np.linalg.norm(scales)) * signs
    found = []
    for count in counts:
        x = rng.standard_normal((count, features), np.float32)
        x *= scales
        right = rng.random(count) < 1 / (1 + np.exp(-(x @ slopes)))
        found.append((x, np.where(right, 1, -1)))
    return found


SETS = {
    "a9a": DataSet("a9a"),
    "w8a": DataSet("w8a"),
    "phishing": DataSet("phishing"),
    "mnist": DataSet("MNIST, 3 or 5", _three_or_five),
    "synthetic": DataSet("synthetic, of the shape of epsilon", make=_synthetic),
}


def is_there(name: str, folder: str) -> bool:
    """Return whether a set can be read; says so if not."""
    return SETS[name].make is not None or find(SETS[name].title, folder, name) is not None


@dataclass(frozen=True)
class Problem:
    """L2-regularised logistic regression, f(w) = Σ_j log(1 + exp(-b_j a_j·w)) / N + λ ‖w‖² / 2.

    Args:
        x: b_j a_j, of length at most 1, by client: (n, m, d).
        test: the same of the test records, (N', d).
        weight_decay: λ = 1/m, as in the paper.
        optimum: the least f.
        best_accuracy: the test accuracy there.
    """

    x: Tensor
    test: Tensor
    weight_decay: float
    optimum: float
    best_accuracy: float

    @property
    def clients(self) -> int:
        return self.x.shape[0]

    @property
    def records(self) -> int:
        """m, of each client."""
        return self.x.shape[1]

    @property
    def size(self) -> int:
        return self.x.shape[2]

    def suboptimality(self, points: Tensor) -> Tensor:
        """f - min f at each column of (d, columns); infinite where f is not finite."""
        margins = torch.tensordot(self.x, points.to(self.x.dtype), dims=1)
        loss = torch.nn.functional.softplus(-margins).double().mean((0, 1))
        loss = loss + self.weight_decay / 2 * points.double().square().sum(0)
        return torch.nan_to_num(loss - self.optimum, nan=float("inf"), posinf=float("inf"))

    def accuracy(self, points: Tensor) -> Tensor:
        """The share of test records on the right side."""
        return (self.test @ points.to(self.test.dtype) > 0).double().mean(0)

    def as_one(self) -> Problem:
        """All records with one trusted holder, who minimises the same f."""
        whole = self.x.reshape(1, -1, self.size)
        return Problem(whole, self.test, self.weight_decay, self.optimum, self.best_accuracy)


@lru_cache(maxsize=2)
def problem(name: str, folder: str, clients: int) -> Problem:
    """Rows and a 1 for the intercept, divided by their length (record by record, so no data leak).

    The records are dealt out at random, equally many to each client; what remains is dropped.
    """
    (x, y), (x_test, y_test) = _parts(name, folder)
    order = np.random.default_rng(0).permutation(len(x))[: len(x) // clients * clients]
    x, y = x[order], y[order]
    signed = torch.from_numpy(x * y[:, None]).reshape(clients, -1, x.shape[1])
    test = torch.from_numpy(x_test * y_test[:, None])
    weight_decay = 1 / signed.shape[1]
    best = _minimum(x, y, weight_decay)[:, None]
    exact = Problem(signed.double(), test.double(), weight_decay, 0.0, 0.0)
    least, accuracy = float(exact.suboptimality(best)[0]), float(exact.accuracy(best)[0])
    return Problem(signed, test, weight_decay, least, accuracy)


def _parts(name: str, folder: str) -> list[Arrays]:
    """The records to train on and to test with; a random fifth where the set has none."""
    of = SETS[name]
    arrays = of.make() if of.make else read(Path(folder, f"{name}.npz"))
    found = [_rows(*of.choose(x, y)) for x, y in arrays]
    if len(found) == 2:
        return found
    ((x, y),) = found
    order = np.random.default_rng(1).permutation(len(x))
    cut = round(TEST_SHARE * len(x))
    return [(x[rows], y[rows]) for rows in (order[cut:], order[:cut])]


def _rows(x: np.ndarray, y: np.ndarray) -> Arrays:
    x = np.concatenate([x.astype(np.float32), np.ones((len(x), 1), np.float32)], axis=1)
    return x / np.linalg.norm(x, axis=1, keepdims=True), y.astype(np.float32)


def _minimum(x: np.ndarray, y: np.ndarray, weight_decay: float) -> Tensor:
    """scikit-learn's."""
    model = LogisticRegression(
        C=1 / (weight_decay * len(x)), fit_intercept=False, tol=1e-9, max_iter=10_000
    )
    return torch.from_numpy(model.fit(x.astype(np.float64), y).coef_[0].copy())
