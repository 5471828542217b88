"""Private training from a configuration file, by LightningCLI; one file for each method beside this one.

    python examples/cli/train.py fit --config examples/cli/dp_sgd.yaml

Options follow the file: ``--trainer.max_epochs 5``. ``fit --help`` lists them, and
``fit --trainer.callbacks.help lightning_dp.callbacks.DifferentialPrivacy`` those of the callback;
so does ``--print_config`` for the whole. The data are scikit-learn's digits; nothing is downloaded.
"""

from __future__ import annotations

import warnings

import lightning as L
import torch
from lightning.pytorch.cli import ArgsType, LightningCLI
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy


class Classifier(L.LightningModule):
    """Logistic regression, or a network with one hidden layer.

    Args:
        hidden: number of hidden units; 0 for logistic regression.
    """

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        if hidden:
            self.net = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 10))
        else:
            self.net = nn.Sequential(nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean())


class Digits(L.LightningDataModule):
    """1,437 training and 360 test images of 8 x 8 pixels.

    Args:
        batch_size: the expected number of records in a batch.
    """

    def __init__(self, batch_size: int = 256) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        data = load_digits()
        parts = train_test_split(
            data.data, data.target, test_size=360, random_state=0, stratify=data.target
        )
        x_train, x_test = (torch.tensor(x / 8 - 1).float() for x in parts[:2])
        y_train, y_test = (torch.tensor(y) for y in parts[2:])
        self.train, self.test = TensorDataset(x_train, y_train), TensorDataset(x_test, y_test)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test, batch_size=len(self.test))


class PrivateCLI(LightningCLI):
    """LightningCLI; after a fit it prints what was spent and the test accuracy."""

    def after_fit(self) -> None:
        for callback in self.trainer.callbacks:
            if isinstance(callback, DifferentialPrivacy):
                print(callback.report())
        (result,) = self.trainer.test(self.model, self.datamodule, verbose=False)
        print(f"test accuracy (360 images): {result['accuracy']:.1%}")


def main(args: ArgsType = None) -> PrivateCLI:
    warnings.filterwarnings("ignore", ".*does not have many workers")
    torch.set_num_threads(1)  # a network this small runs slower on several cores
    return PrivateCLI(
        Classifier,
        Digits,
        args=args,
        seed_everything_default=0,  # weights only: noise and batches never depend on it
        trainer_defaults={
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": "outputs/cli",
            "enable_model_summary": False,
            "enable_checkpointing": False,
        },
    )


if __name__ == "__main__":
    main()
