"""The data of dynamic_noise.py: two digits of MNIST with the paper's preprocessing, two clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from archives import mnist
from sklearn.datasets import make_blobs
from torch import Tensor

RECORDS, COMPONENTS = 1000, 60


@dataclass(frozen=True)
class Records:
    """N records: features (N, d) and labels, -1 and 1 or classes."""

    x: Tensor
    y: Tensor


def mnist35(folder: str, data_scale: float, *, each_feature: bool) -> Records:
    """1000 images of 3 and 5 on 60 principal components, with ‖x‖ at most ``data_scale``.

    "The samples are normalised so that Σ x = 0 and the standard deviation is 1": ``each_feature``
    divides each component by its own standard deviation (the Hessian of the squared loss is then a
    multiple of the identity), otherwise all are divided by one number, and its spectrum stays.
    """
    x, labels = _components(folder, (3, 5), each_feature=each_feature)
    return _records(x, np.where(labels == 3, -1.0, 1.0), data_scale)


@lru_cache(maxsize=1)
def ten_digits(folder: str, data_scale: float, records: int) -> Records:
    """So many of all digits, each component divided by its own standard deviation."""
    x, labels = _components(folder, range(10), records, each_feature=True)
    return _records(x, labels.astype(np.int64), data_scale)


def _components(
    folder: str, digits: Sequence[int], records: int = RECORDS, *, each_feature: bool
) -> tuple[np.ndarray, np.ndarray]:
    images, labels, *_ = mnist(folder)
    chosen = np.flatnonzero(np.isin(labels, digits))
    chosen = np.random.default_rng(0).permutation(chosen)[:records]
    x = images[chosen].reshape(len(chosen), -1) / 255.0
    x = x - x.mean(0)
    left, singular, _ = np.linalg.svd(x, full_matrices=False)
    x = left[:, :COMPONENTS] * singular[:COMPONENTS]
    return x / (x.std(0) if each_feature else x.std()), labels[chosen]


def two_clusters(data_scale: float) -> Records:
    """The synthetic set: 1000 records in 100 dimensions, two clusters at distance 10."""
    centres = np.zeros((2, 100))
    centres[1] = 10 / np.sqrt(100)
    x, label = make_blobs(RECORDS, centers=centres, random_state=0)
    x = (x - x.mean(0)) / x.std(0)
    return _records(x, 2.0 * label - 1, data_scale)


def _records(x: np.ndarray, y: np.ndarray, data_scale: float) -> Records:
    x = x * (data_scale / np.linalg.norm(x, axis=1).max())
    return Records(torch.tensor(x), torch.tensor(y))
