"""The data sets of diff2.py: from an archive on disk or scikit-learn's fetchers, standardised."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from archives import Arrays, find, read_whole
from sklearn import datasets
from torch import Tensor

WORKERS, TRAIN_SHARE = 10, 0.8


@dataclass(frozen=True)
class DataSet:
    """A data set, found and prepared.

    Args:
        archives: names its .npz file may have in the folder given with --data.
        is_regression: the target is divided by its maximum; otherwise it is made a class number.
        numeric: how many of the first columns are standardised (the rest is 0 or 1).
        has_copies: equal records are computed with once, and counted.
        fetch: where else it may come from.
    """

    title: str
    archives: tuple[str, ...]
    is_regression: bool
    numeric: int | None = None
    has_copies: bool = False
    fetch: Callable[[], Arrays] | None = None


def _california() -> Arrays:
    """Not the original columns: scikit-learn's are averages per household."""
    return datasets.fetch_california_housing(return_X_y=True)


def _covertype() -> Arrays:
    """16 % of the set, as in the archive."""
    x, y = datasets.fetch_covtype(return_X_y=True)
    kept = np.random.default_rng(0).permutation(len(y))[: round(0.16 * len(y))]
    return x[kept], y[kept]


def _kddcup99() -> Arrays:
    x, y = datasets.fetch_kddcup99(percent10=True, return_X_y=True)
    columns = [
        np.unique(column, return_inverse=True)[1] if isinstance(column[0], bytes) else column
        for column in x.T
    ]
    return np.stack(columns, axis=1).astype(np.float32), y


SETS = {
    "california": DataSet(
        "California Housing", ("california_housing", "california"), True, fetch=_california
    ),
    "gas": DataSet("Gas Turbine", ("gas_turbine",), True),
    "blog": DataSet("BlogFeedback", ("blogfeedback",), True),
    "covertype": DataSet(
        "Covertype, 16 %", ("covertype_subset", "covertype"), False, numeric=10, fetch=_covertype
    ),
    "kdd": DataSet(
        "KDDCup99, 10 %",
        *(("kddcup99_10pct", "kddcup99"), False),
        has_copies=True,
        fetch=_kddcup99,
    ),
}


@lru_cache(maxsize=2)
def raw(name: str, folder: str) -> Arrays | None:
    """Features (N, d) and targets (N,) as they are; says what is missing and gives None."""
    of = SETS[name]
    if of.fetch is not None and not folder:
        try:
            return of.fetch()
        except Exception as error:  # no network: whatever the fetcher makes of it
            print(f"scikit-learn could not fetch it ({error!r}):", end=" ", file=sys.stderr)
    path = find(of.title, folder, *of.archives)
    return None if path is None else read_whole(path)


@dataclass(frozen=True)
class Records:
    """N records.

    Args:
        x: inputs as columns, with a last row of ones (d + 1, columns).
        y: numbers (1, columns), or class numbers (columns,).
        squares: ‖x_i‖² of each column.
        copies: how many records each column stands for; None is one.
    """

    x: Tensor
    y: Tensor
    squares: Tensor
    copies: Tensor | None = None

    @property
    def columns(self) -> int:
        return self.x.shape[1]

    @property
    def count(self) -> int:
        """N, the number of records."""
        return self.columns if self.copies is None else int(self.copies.double().sum())

    def mean(self, values: Tensor) -> float:
        """Over all records, of a value for each column."""
        if self.copies is None:
            return float(values.mean())
        return float((values.double() * self.copies).sum() / self.count)

    def take(self, columns: Tensor) -> Records:
        """Some columns."""
        copies = None if self.copies is None else self.copies[columns]
        return Records(self.x[:, columns], self.y[..., columns], self.squares[columns], copies)

    def chunks(self, size: int) -> list[Records]:
        """The records in parts of at most ``size`` columns."""
        parts = zip(
            self.x.split(size, dim=1),
            self.y.split(size, dim=-1),
            self.squares.split(size),
            [None] * -(-self.columns // size) if self.copies is None else self.copies.split(size),
            strict=True,
        )
        return [
            Records(x.contiguous(), y.contiguous(), squares, copies)
            for x, y, squares, copies in parts
        ]


@dataclass(frozen=True)
class Split:
    train: Records
    test: Records
    outputs: int
    is_regression: bool

    def chunks(self, size: int) -> list[Split]:
        """Parts of the training records."""
        return [replace(self, train=part) for part in self.train.chunks(size)]


@lru_cache(maxsize=4)
def split(name: str, folder: str, seed: int) -> Split:
    """80 % to train on, of which ten workers get equal parts (what remains is dropped).

    Columns get mean 0 and variance 1 over the training records, targets are divided by their
    maximum over all records.
    """
    of = SETS[name]
    found = raw(name, folder)
    assert found is not None
    x, y = np.asarray(found[0], np.float64), np.asarray(found[1])
    outputs = 1
    if of.is_regression:
        y = y / np.abs(y).max()
    else:
        classes, y = np.unique(y, return_inverse=True)
        outputs = len(classes)
    order = np.random.default_rng([7, seed]).permutation(len(y))
    cut = int(TRAIN_SHARE * len(y))
    train, test = order[: cut - cut % WORKERS], order[cut:]
    columns = slice(0, of.numeric)
    mean, std = x[train, columns].mean(0), x[train, columns].std(0)
    x[:, columns] = (x[:, columns] - mean) / np.where(std > 0, std, 1)
    parts = []
    for rows in (train, test):
        copies = None
        if of.has_copies:
            _, first, counts = np.unique(
                _kinds(name, folder)[rows], return_index=True, return_counts=True
            )
            rows, copies = rows[first], torch.tensor(counts, dtype=torch.float32)
        parts.append(_records(x[rows], y[rows], of.is_regression, copies))
    return Split(*parts, outputs, of.is_regression)


@lru_cache(maxsize=1)
def _kinds(name: str, folder: str) -> np.ndarray:
    """A number for each record, the same for those that are equal."""
    found = raw(name, folder)
    assert found is not None
    both = np.column_stack(
        [np.asarray(found[0], np.float64), np.unique(found[1], return_inverse=True)[1]]
    )
    return np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)


def _records(x: np.ndarray, y: np.ndarray, is_regression: bool, copies: Tensor | None) -> Records:
    inputs = torch.tensor(np.concatenate([x, np.ones((len(x), 1))], axis=1).T.copy())
    inputs = inputs.to(torch.float32)
    target = torch.tensor(y[None], dtype=torch.float32) if is_regression else torch.tensor(y)
    return Records(inputs, target, inputs.square().sum(0), copies)
