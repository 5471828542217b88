"""Train a small CNN on MNIST with differential privacy.

    python examples/mnist_cnn.py --data DIR [--epsilon 3] [--epochs 15] [--limit 10000]

DIR (or the environment variable LIGHTNING_DP_DATA) holds MNIST in one of these layouts:

    DIR/mnist.npz                             arrays X_train, y_train, X_test, y_test
                                              (Keras' names x_train, x_test work too)
    DIR/MNIST/raw/train-images-idx3-ubyte     and the three other IDX files, as torchvision
                                              leaves them; also .gz, and directly in DIR

The network is that of DP-LSSGD (Wang et al., arXiv:1906.12056): two convolutions, two
fully connected layers. ReLUs and max pooling as there.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.accounting import epsilon_text
from lightning_dp.callbacks import DifferentialPrivacy

TARGET_EPSILON = 3.0
TARGET_DELTA = 1e-5  # below 1 / 60,000
MAX_GRAD_NORM = 1.0
MAX_EPOCHS = 15
BATCH_SIZE = 256
LEARNING_RATE = 0.5
DATA_VARIABLE = "LIGHTNING_DP_DATA"
OUTPUT = Path("outputs/mnist_cnn")

IDX_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class MnistCNN(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows about privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.ZeroPad2d(3),  # "same" padding: 28 -> 14 with stride 2
            *(nn.Conv2d(1, 16, 8, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
            *(nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1)),
            *(nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean(), prog_bar=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def read_idx(path: Path) -> np.ndarray:
    """An array in the IDX format of unsigned bytes, gzipped or not."""
    open_it = gzip.open if path.suffix == ".gz" else open
    with open_it(path, "rb") as file:
        content = file.read()
    magic, dimensions = content[:3], content[3]
    if magic != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an IDX file of unsigned bytes.")
    shape = np.frombuffer(content, ">i4", count=dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def find_idx(folder: Path, name: str) -> Path | None:
    """The IDX file of that name in one of the places where it usually lies."""
    for place in (folder, folder / "raw", folder / "MNIST" / "raw"):
        for path in (place / name, place / f"{name}.gz"):
            if path.is_file():
                return path
    return None


def read_arrays(folder: Path) -> list[np.ndarray] | None:
    """Training images and labels, test images and labels; None when they are not there."""
    archive = folder / "mnist.npz"
    if archive.is_file():
        with np.load(archive, allow_pickle=False) as arrays:
            lower = {name.lower(): name for name in arrays.files}
            return [arrays[lower[n]] for n in ("x_train", "y_train", "x_test", "y_test")]
    paths = [find_idx(folder, name) for name in IDX_FILES]
    return None if None in paths else [read_idx(path) for path in paths if path is not None]


def mnist(given: Path | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; explains itself and exits with code 2 when they are missing."""
    arrays = None if given is None else read_arrays(given)
    if arrays is None:
        where = "no folder was given" if given is None else f"not found in {given.absolute()}"
        print(
            f"MNIST is missing: {where}.\n"
            f"Give its folder with --data DIR or in the environment variable {DATA_VARIABLE}.\n"
            "DIR must hold either\n"
            "  mnist.npz with the arrays X_train, y_train, X_test, y_test, or\n"
            "  MNIST/raw/ with the files (plain or .gz)\n    " + "\n    ".join(IDX_FILES),
            file=sys.stderr,
        )
        raise SystemExit(2)
    x_train, y_train, x_test, y_test = (torch.tensor(np.ascontiguousarray(a)) for a in arrays)
    train = TensorDataset(scaled(x_train), y_train.long())
    return train, TensorDataset(scaled(x_test), y_test.long())


def scaled(images: Tensor) -> Tensor:
    """Bytes to [-1, 1], with a channel: fixed numbers, nothing computed from private data."""
    return images.unsqueeze(1).float() / 127.5 - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help=f"folder of MNIST (or set {DATA_VARIABLE})")
    parser.add_argument("--epsilon", type=float, default=TARGET_EPSILON, help="the budget")
    parser.add_argument("--epochs", type=int, default=MAX_EPOCHS)
    parser.add_argument("--limit", type=int, help="use only this many training images")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the journal")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")
    given = options.data or os.environ.get(DATA_VARIABLE)
    train, test = mnist(None if given is None else Path(given))
    if options.limit is not None:
        train = TensorDataset(*train[: options.limit])

    L.seed_everything(0, verbose=False)  # weights only: noise and batches never depend on it
    privacy = DifferentialPrivacy(
        target_epsilon=options.epsilon, target_delta=TARGET_DELTA, max_grad_norm=MAX_GRAD_NORM
    )
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accelerator="auto",
        devices=1,
        callbacks=[privacy],
        logger=False,
        enable_checkpointing=False,
        default_root_dir=options.output,
    )
    model = MnistCNN()
    test_loader = DataLoader(test, batch_size=1000)
    start = time.perf_counter()
    trainer.fit(model, DataLoader(train, batch_size=BATCH_SIZE, shuffle=True), test_loader)
    seconds = time.perf_counter() - start
    accuracy = trainer.test(model, test_loader, verbose=False)[0]["accuracy"]

    print(f"\n{privacy.report()}")
    print(f"\ntest accuracy {accuracy:.2%} at ε = {epsilon_text(privacy.epsilon)}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
