"""The data of dynamic_noise.py: MNIST from disk, and the paper's preprocessing of it."""

from __future__ import annotations

import gzip
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import make_blobs
from torch import Tensor

DATA_VARIABLE = "LIGHTNING_DP_DATA"
IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
RECORDS, COMPONENTS = 1000, 60


def has_mnist(folder: str) -> bool:
    """Whether MNIST is there; says what is missing if not."""
    if folder and (Path(folder, "mnist.npz").is_file() or all(map(idx_path(folder), IDX_FILES))):
        return True
    print(
        f"MNIST is missing: {f'not found in {folder}' if folder else 'no folder was given'}.\n"
        f"Give its folder with --data DIR or in the environment variable {DATA_VARIABLE}.\n"
        "DIR must hold either\n"
        "  mnist.npz with the arrays X_train, y_train, X_test, y_test, or\n"
        "  MNIST/raw/ with the files (plain or .gz)\n    " + "\n    ".join(IDX_FILES),
        file=sys.stderr,
    )
    return False


def idx_path(folder: str):
    """A function from the name of an IDX file to its path, None where there is none."""

    def find(name: str) -> Path | None:
        places = (Path(folder), Path(folder, "raw"), Path(folder, "MNIST", "raw"))
        paths = [place / f"{name}{end}" for place in places for end in ("", ".gz")]
        return next((path for path in paths if path.is_file()), None)

    return find


@lru_cache(maxsize=1)
def mnist(folder: str) -> tuple[np.ndarray, ...]:
    """Training images and labels, test images and labels, as unsigned bytes."""
    archive = Path(folder, "mnist.npz")
    if archive.is_file():
        with np.load(archive, allow_pickle=False) as arrays:
            lower = {name.lower(): name for name in arrays.files}
            names = ("x_train", "y_train", "x_test", "y_test")
            return tuple(arrays[lower[name]] for name in names)
    found = []
    for path in map(idx_path(folder), IDX_FILES):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        shape = np.frombuffer(content, ">i4", count=content[3], offset=4)
        found.append(np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape))
    return tuple(found)


@dataclass(frozen=True)
class Records:
    """N records: features (N, d) and labels -1 or 1."""

    x: Tensor
    y: Tensor


def mnist35(folder: str, data_scale: float, *, each_feature: bool) -> Records:
    """1000 images of 3 and 5 on 60 principal components, with ‖x‖ at most ``data_scale``.

    "The samples are normalised so that Σ x = 0 and the standard deviation is 1": ``each_feature``
    divides each component by its own standard deviation (the Hessian of the squared loss is then a
    multiple of the identity), otherwise all are divided by one number, and its spectrum stays.
    """
    images, labels, *_ = mnist(folder)
    chosen = np.flatnonzero((labels == 3) | (labels == 5))
    chosen = np.random.default_rng(0).permutation(chosen)[:RECORDS]
    x = images[chosen].reshape(len(chosen), -1) / 255.0
    x = x - x.mean(0)
    left, singular, _ = np.linalg.svd(x, full_matrices=False)
    x = left[:, :COMPONENTS] * singular[:COMPONENTS]
    x = x / (x.std(0) if each_feature else x.std())
    return _records(x, np.where(labels[chosen] == 3, -1.0, 1.0), data_scale)


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
