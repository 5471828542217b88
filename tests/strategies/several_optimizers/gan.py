"""A GAN whose discriminator alone sees the records."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

FIXED = 8  # rows of noise for a step of the generator


def is_real(logits: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def is_fake(logits: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


class GAN(L.LightningModule):
    """As Lightning's own example: toggled optimizers, the generator first."""

    order = "gd"
    toggles = True
    every = 1  # batches to a step of the generator

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = dict(zip("gd", self.optimizers(), strict=True))
        losses = {"g": self.generator_loss, "d": self.critic_loss}
        for name in self.order:
            if name == "g" and (batch_idx + 1) % self.every:
                continue
            optimizer = optimizers[name]
            if self.toggles:
                self.toggle_optimizer(optimizer)
            loss = losses[name](batch[0])
            self.go_back_and_step(loss, optimizer)
            self.log(name, loss.detach())
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def go_back_and_step(self, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def generator_loss(self, x: Tensor) -> Tensor:
        return is_real(self.critic(self.generator(torch.randn(FIXED, 4))))

    def critic_loss(self, x: Tensor) -> Tensor:
        fake = self.generator(torch.randn(len(x), 4)).detach()
        return (is_real(self.critic(x)) + is_fake(self.critic(fake))) / 2

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1),
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
        ], []
