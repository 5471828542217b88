"""Train a DCGAN on MNIST with differential privacy: only its discriminator sees the images.

    python examples/mnist_gan.py --data DIR [--epsilon 10] [--epochs 8] [--limit 10000]

DIR holds MNIST as for mnist_cnn.py. The discriminator is trained by the private optimizer: each of
its steps is charged. The generator learns from the released discriminator and random numbers alone,
so its steps are free, and images that it draws may be published. Both are told the digit; the
generator's digits are random numbers too. A grid of samples, a column for each digit, goes to
TensorBoard after each epoch:

    tensorboard --logdir outputs/mnist_gan
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from mnist_cnn import DATA_VARIABLE, mnist
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.accounting import epsilon_text
from lightning_dp.callbacks import DifferentialPrivacy

TARGET_EPSILON = 10.0
TARGET_DELTA = 1e-5  # below 1 / 60,000
MAX_GRAD_NORM = 1.0
MAX_EPOCHS = 8
BATCH_SIZE = 128
LEARNING_RATE = 1e-3
STEPS_OF_DISCRIMINATOR = 2  # to one of the generator: noise makes it slow
ROWS_OF_GENERATOR = 128  # a fixed number: that of the records in a batch is private
NOISE, WIDTH = 64, 16
OUTPUT = Path("outputs/mnist_gan")


class Generator(nn.Module):
    """A digit and random numbers to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(NOISE + 10, 2 * WIDTH * 49), nn.Unflatten(1, (2 * WIDTH, 7, 7))),
            *(nn.GroupNorm(8, 2 * WIDTH), nn.ReLU()),
            *(nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1), nn.GroupNorm(8, WIDTH), nn.ReLU()),
            *(nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1), nn.Tanh()),
        )

    def forward(self, digits: Tensor) -> Tensor:
        noise = torch.randn(len(digits), NOISE, device=digits.device)
        return self.net(torch.cat([noise, one_hot(digits, 10)], 1))


class Discriminator(nn.Module):
    """An image and its digit to a number, large if both look real."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(11, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Flatten(), nn.Linear(2 * WIDTH * 49, 1)),
        )

    def forward(self, images: Tensor, digits: Tensor) -> Tensor:
        planes = one_hot(digits, 10)[:, :, None, None].expand(-1, -1, 28, 28)
        return self.net(torch.cat([images, planes], 1))


class GAN(L.LightningModule):
    """Train as without privacy, but let the generator draw a fixed number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(), Discriminator()

    def random_digits(self, count: int) -> Tensor:
        return torch.randint(10, (count,), device=self.device)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, digits = batch
        of_generator, of_discriminator = self.optimizers()

        fake_digits = self.random_digits(len(images))
        fakes = self.generator(fake_digits).detach()
        loss = softplus(-self.discriminator(images, digits)).mean()
        loss = loss + softplus(self.discriminator(fakes, fake_digits)).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()

        if batch_idx % STEPS_OF_DISCRIMINATOR == 0:
            fake_digits = self.random_digits(ROWS_OF_GENERATOR)
            fakes = self.generator(fake_digits)
            loss = softplus(-self.discriminator(fakes, fake_digits)).mean()
            of_generator.zero_grad()
            self.manual_backward(loss)
            of_generator.step()

    def on_train_epoch_end(self) -> None:
        self.logger.experiment.add_image(
            "samples", self.grid(), self.current_epoch, dataformats="HW"
        )

    @torch.no_grad()
    def grid(self, rows: int = 8) -> Tensor:
        """Samples between 0 and 1, a column for each digit."""
        digits = torch.arange(10, device=self.device).repeat(rows)
        images = self.generator(digits).reshape(rows, 10, 28, 28)
        return (images.permute(0, 2, 1, 3).reshape(28 * rows, 280) + 1) / 2

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(p.parameters(), LEARNING_RATE, (0.5, 0.999)) for p in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help=f"folder of MNIST (or set {DATA_VARIABLE})")
    parser.add_argument("--epsilon", type=float, default=TARGET_EPSILON, help="the budget")
    parser.add_argument("--epochs", type=int, default=MAX_EPOCHS)
    parser.add_argument("--limit", type=int, help="use only this many training images")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of logs and journal")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")
    given = options.data or os.environ.get(DATA_VARIABLE)
    train, _ = mnist(None if given is None else Path(given))
    if options.limit is not None:
        train = TensorDataset(*train[: options.limit])

    L.seed_everything(0, verbose=False)  # weights only: noise and batches never depend on it
    privacy = DifferentialPrivacy(
        target_epsilon=options.epsilon,
        target_delta=TARGET_DELTA,
        max_grad_norm=MAX_GRAD_NORM,
        private_optimizer="discriminator",
    )
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accelerator="auto",
        devices=1,
        callbacks=[privacy],
        logger=TensorBoardLogger(options.output, name=None),
        default_root_dir=options.output,
    )
    model = GAN()
    start = time.perf_counter()
    trainer.fit(model, DataLoader(train, batch_size=BATCH_SIZE, shuffle=True))
    seconds = time.perf_counter() - start

    print(f"\n{privacy.report()}")
    print(
        f"\n{privacy.steps} steps of the discriminator at ε = {epsilon_text(privacy.epsilon)}, "
        f"{seconds:.0f} s; samples: tensorboard --logdir {options.output}"
    )


if __name__ == "__main__":
    main()
