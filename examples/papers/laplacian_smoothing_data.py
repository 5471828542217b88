"""CIFAR-10 from disk, for laplacian_smoothing.py."""

from __future__ import annotations

import pickle
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from scipy.fft import idctn
from torch import Tensor

CROP = 24
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
CIFAR10_LAYOUTS = (
    "cifar10.npz with the arrays X_train, y_train, X_test, y_test (images of 32 x 32 x 3 bytes), "
    "cifar-10-batches-py/ as torchvision leaves it, or cifar10_jpeg.npz with the quantised "
    "coefficients of JPEG copies"
)


def has_cifar10(folder: str) -> bool:
    """Return whether CIFAR-10 is there in one of the layouts."""
    archives = ("cifar10.npz", "cifar10_jpeg.npz", "cifar-10-batches-py/test_batch")
    return any(Path(folder, name).is_file() for name in archives)


@lru_cache(maxsize=1)
def cifar10(folder: str, records: int, test_records: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels: the TensorFlow tutorial's input.

    Shuffled; the central 24 x 24 pixels, each image scaled to mean 0 and variance 1 by itself.
    """
    x, y, x_test, y_test = arrays(folder)
    found: list[Tensor] = []
    for images, labels, count in ((x, y, records), (x_test, y_test, test_records)):
        chosen = np.random.default_rng(0).permutation(len(labels))[:count]
        edge = (32 - CROP) // 2
        part = images[chosen][:, edge : edge + CROP, edge : edge + CROP].astype(np.float32)
        part -= part.mean((1, 2, 3), keepdims=True)
        part /= np.maximum(part.std((1, 2, 3), keepdims=True), (3 * CROP**2) ** -0.5)
        found.append(torch.tensor(np.moveaxis(part, 3, 1)).contiguous())
        found.append(torch.tensor(labels[chosen].astype(np.int64)))
    return found[0], found[1], found[2], found[3]


def arrays(folder: str) -> tuple[np.ndarray, ...]:
    """Images (n, 32, 32, 3) as bytes, and labels, of the training and the test set."""
    batches = Path(folder, "cifar-10-batches-py")
    if batches.is_dir():
        parts = [pickle.loads((batches / name).read_bytes(), encoding="bytes") for name in BATCHES]
        images = [part[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) for part in parts]
        labels = [np.array(part[b"labels"]) for part in parts]
        return (
            *(np.concatenate(images[:5]), np.concatenate(labels[:5])),
            *(images[5], labels[5]),
        )
    plain = Path(folder, "cifar10.npz")
    if plain.is_file():
        with np.load(plain, allow_pickle=False) as arrays:
            return tuple(arrays[name] for name in ("X_train", "y_train", "X_test", "y_test"))
    with np.load(Path(folder, "cifar10_jpeg.npz"), allow_pickle=False) as arrays:
        quant = arrays["quant"]
        train, test = (decoded(arrays[f"coef_{name}"], quant) for name in ("train", "test"))
        return train, arrays["y_train"], test, arrays["y_test"]


def decoded(coefficients: np.ndarray, quant: np.ndarray) -> np.ndarray:
    """JPEG coefficients (24 blocks, 64 in zigzag order, n) as pictures (n, 32, 32, 3) of bytes.

    Four units of 16 x 16 pixels, each with four blocks of brightness and one of either colour.
    """

    def place(k: int) -> tuple[int, int]:
        row, column = divmod(k, 8)
        return row + column, row if (row + column) % 2 else column

    zigzag = sorted(range(64), key=place)
    pictures = []
    for start in range(0, coefficients.shape[2], 1000):
        part = np.moveaxis(coefficients[:, :, start : start + 1000], 2, 0).astype(np.float32)
        units = part.reshape(-1, 4, 6, 64) * quant[[0, 0, 0, 0, 1, 1]]
        blocks = np.zeros_like(units)
        blocks[..., zigzag] = units
        pixels = idctn(blocks.reshape(-1, 2, 2, 6, 8, 8), axes=(4, 5), norm="ortho")
        # axes: picture, unit's row and column, block's row and column, pixel's row and column
        grey = pixels[:, :, :, :4].reshape(-1, 2, 2, 2, 2, 8, 8).transpose(0, 1, 3, 5, 2, 4, 6)
        grey = grey.reshape(-1, 32, 32) + 128
        blue, red = (
            pixels[:, :, :, i]
            .transpose(0, 1, 3, 2, 4)
            .reshape(-1, 16, 16)
            .repeat(2, 1)
            .repeat(2, 2)
            for i in (4, 5)
        )
        rgb = [grey + 1.402 * red, grey - 0.344136 * blue - 0.714136 * red, grey + 1.772 * blue]
        pictures.append(np.stack(rgb, axis=-1).round().clip(0, 255).astype(np.uint8))
    return np.concatenate(pictures)
