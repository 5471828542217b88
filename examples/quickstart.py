"""Train a small network on scikit-learn's digits, without and with differential privacy.

    python examples/quickstart.py

The only difference between the two fits is one callback. Takes less than a minute on two cores
and downloads nothing. TensorBoard logs, a picture and the privacy report go to
./outputs/quickstart.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.accounting import epsilon_text
from lightning_dp.callbacks import DifferentialPrivacy

TARGET_EPSILON = 3.0
TARGET_DELTA = 1e-5  # 140 times below 1 / N
MAX_GRAD_NORM = 1.0
MAX_EPOCHS = 30  # the noise is calibrated to spend ε in as many
BATCH_SIZE = 256
LEARNING_RATE = 0.01
OUTPUT = Path("outputs/quickstart")


class DigitsCNN(L.LightningModule):
    """An ordinary LightningModule: nothing in it knows about privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(128, 10)),
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
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)


class History(L.Callback):
    """Writes down step and held-out accuracy at every validation, for the picture."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            accuracy = float(trainer.callback_metrics["accuracy"])
            self.rows.append((trainer.global_step, accuracy))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 training and 360 test images of 8 x 8 pixels."""
    data = load_digits()
    parts = train_test_split(
        data.images, data.target, test_size=360, random_state=0, stratify=data.target
    )
    x_train, x_test = (torch.tensor(x / 8 - 1).float().unsqueeze(1) for x in parts[:2])
    y_train, y_test = (torch.tensor(y) for y in parts[2:])
    return TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)


def fit(name: str, output: Path, callbacks: list[L.Callback]) -> tuple[float, History]:
    """Train one model; its test accuracy and what happened on the way."""
    print(f"\n--- {name} ---")
    L.seed_everything(0, verbose=False)  # weights only: noise and batches never depend on it
    train, test = digits()
    history = History()
    trainer = L.Trainer(
        max_epochs=MAX_EPOCHS,
        accelerator="auto",
        devices=1,
        callbacks=[*callbacks, history],
        logger=TensorBoardLogger(output, name=name),
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=output,
    )
    model = DigitsCNN()
    test_loader = DataLoader(test, batch_size=len(test))
    trainer.fit(model, DataLoader(train, batch_size=BATCH_SIZE, shuffle=True), test_loader)
    return trainer.test(model, test_loader, verbose=False)[0]["accuracy"], history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=TARGET_EPSILON, help="the budget")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for logs and picture")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")
    torch.set_num_threads(1)  # a network this small runs slower on several cores

    baseline_accuracy, baseline = fit("baseline", options.output, [])
    privacy = DifferentialPrivacy(
        target_epsilon=options.epsilon,
        target_delta=TARGET_DELTA,
        max_grad_norm=MAX_GRAD_NORM,
    )
    private_accuracy, private = fit("private", options.output, [privacy])

    print(f"\n{privacy.report()}")
    print("\ntest accuracy (360 images)")
    print(f"  without privacy   {baseline_accuracy:.1%}")
    print(f"  private           {private_accuracy:.1%}   at ε = {epsilon_text(privacy.epsilon)}")
    picture = options.output / "quickstart.png"
    accuracy = {"without privacy": baseline.rows, "private": private.rows}
    axes = privacy.report().plot(metrics=accuracy)
    axes.figure.suptitle("Digits: held-out accuracy, and what privacy was spent")
    axes.figure.savefig(picture, dpi=120)
    print(f"\npicture: {picture}\nlogs:    tensorboard --logdir {options.output}")


if __name__ == "__main__":
    main()
