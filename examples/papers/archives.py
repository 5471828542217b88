"""The data sets of these scripts: .npz archives in a folder, and MNIST also as torchvision leaves it."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from mnist_cnn import DATA_VARIABLE, IDX_FILES, read_arrays

Arrays = tuple[np.ndarray, np.ndarray]


def folder_of(given: str | None) -> str:
    """The folder from the command line, or from the environment."""
    return given or os.environ.get(DATA_VARIABLE, "")


def find(title: str, folder: str, *names: str) -> Path | None:
    """The first of these archives that is there; says so if none is."""
    paths = [Path(folder, f"{name}.npz") for name in names if folder]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        where = f"no {names[0]}.npz in {folder}" if folder else "no folder was given"
        print(f"{title} is left out: {where} (--data DIR or {DATA_VARIABLE}).", file=sys.stderr)
    return found


def read(path: Path) -> list[Arrays]:
    """Features and targets as they are: of training records, and of test records if there are any."""
    with np.load(path, allow_pickle=False) as arrays:
        if "X_num" in arrays.files:  # Covertype with the positions of its one-hot bits
            one_hot = [np.eye(n)[arrays[bit]] for bit, n in (("wilderness", 4), ("soil", 40))]
            return [(np.concatenate([arrays["X_num"], *one_hot], axis=1), arrays["y"])]
        ends = ("",) if "X" in arrays.files else ("_train", "_test")
        return [(arrays[f"X{end}"], arrays[f"y{end}"]) for end in ends if f"X{end}" in arrays.files]


def read_whole(path: Path) -> Arrays:
    """All records of an archive."""
    x, y = zip(*read(path), strict=True)
    return np.concatenate(x), np.concatenate(y)


@lru_cache(maxsize=1)
def mnist(folder: str) -> tuple[np.ndarray, ...]:
    """Training images and labels, test images and labels, as unsigned bytes."""
    found = read_arrays(Path(folder)) if folder else None
    if found is None:
        raise SystemExit(
            f"MNIST is missing in {folder!r}. Give its folder with --data DIR or in the environment "
            f"variable {DATA_VARIABLE}: with mnist.npz (arrays X_train, y_train, X_test, y_test), or "
            f"with {', '.join(IDX_FILES)} (plain or .gz, also in MNIST/raw)."
        )
    return tuple(found)
