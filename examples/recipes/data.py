"""The data of the recipes, read by what other examples read them with."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path += [str(EXAMPLES / "federated"), str(EXAMPLES / "papers"), str(EXAMPLES)]

import laplacian_smoothing_data  # noqa: E402
import problems  # noqa: E402
from diff2_data import raw  # noqa: E402

Split = tuple[Tensor, Tensor, Tensor, Tensor]


def mnist(folder: str, limit: int | None) -> Split:
    """Training images in [0, 1] and digits, test images and digits."""
    return cut(problems.arrays(problems.PROBLEMS["mnist"], folder), limit)


def a9a(folder: str, limit: int | None) -> Split:
    """Training features 0/1 and classes 0/1, test features and classes."""
    return cut(problems.arrays(problems.PROBLEMS["a9a"], folder), limit)


def cifar10(folder: str, limit: int | None) -> Split:
    """Training images in [0, 1] and classes, test images and classes."""
    if not laplacian_smoothing_data.has_cifar10(folder):
        layouts = laplacian_smoothing_data.CIFAR10_LAYOUTS
        raise SystemExit(
            f"CIFAR-10 is missing in {folder!r}: give a folder (--data) with {layouts}."
        )
    x, y, x_test, y_test = laplacian_smoothing_data.arrays(folder)
    images = [torch.tensor(np.moveaxis(part[:limit], 3, 1)) / 255 for part in (x, x_test)]
    classes = [torch.tensor(part[:limit].astype(np.int64)) for part in (y, y_test)]
    return images[0], classes[0], images[1], classes[1]


def california(folder: str) -> tuple[np.ndarray, np.ndarray]:
    """The original columns (20640, 8), and the median house values in dollars."""
    found = raw("california", folder)
    if found is None:
        raise SystemExit(2)
    return found


def cut(parts: Split, limit: int | None) -> Split:
    return parts[0][:limit], parts[1][:limit], parts[2][:limit], parts[3][:limit]


def data_sets(parts: Split) -> tuple[TensorDataset, TensorDataset]:
    x, y, x_test, y_test = parts
    return TensorDataset(x, y), TensorDataset(x_test, y_test)
