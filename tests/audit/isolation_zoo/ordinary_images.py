"""Modules for images that keep records apart: all of them train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Small, ordinary, points
from isolation_zoo.records import images


class Residual(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n, n, 3, padding=1),
            nn.GroupNorm(2, n),
            nn.ReLU(),
            nn.Conv2d(n, n, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


@ordinary(records=images)
class SmallResNet(Small):
    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        )


@ordinary(records=images)
class AugmentedImages(SmallResNet):
    """Flips, crops and noise in the step, a draw for each record; values between 0 and 255."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        flip = torch.rand(len(x)) < 0.5
        x = torch.where(flip[:, None, None, None], x.flip(3), x)
        x = (x - torch.tensor([0.5, 0.4, 0.3])[:, None, None]) / 0.25
        return F.cross_entropy(self(x + 0.1 * torch.randn_like(x)), y)


@ordinary(records=images)
class VisionTransformer(Small):
    """Patches, a class token by padding, blocks of torch's encoder."""

    def make(self) -> nn.Module:
        return nn.ModuleDict({
            "patch": nn.Conv2d(3, 8, 4, 4),
            "blocks": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
            "head": nn.Linear(8, 3),
        })  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        h = self.net["patch"](x).flatten(2).transpose(1, 2)
        return self.net["head"](self.net["blocks"](h).mean(1))


@ordinary(records=lambda n: [(x, (x.mean(0) > 0.5).long()) for x, _ in images(n)])
class Segmentation(Small):
    """A loss for each pixel, all images of one size."""

    def make(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


@ordinary(records=lambda n: [(x, (x.mean(0) > 0.5).float()) for x, _ in images(n)])
class DicePerRecord(Small):
    def make(self) -> nn.Module:
        return nn.Conv2d(3, 1, 3, padding=1)

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        p = out[:, 0].sigmoid()
        dice = 2 * (p * y).sum((1, 2)) / (p.sum((1, 2)) + y.sum((1, 2)) + 1)
        return F.binary_cross_entropy_with_logits(out[:, 0], y) + (1 - dice).mean()


@ordinary(records=lambda n: [(x, (x.mean(0) > 0.5).long() - 1) for x, _ in images(n)])
class IgnoredPixelsPerRecord(Segmentation):
    """Pixels of -1 are unknown; each image divides by its own number."""

    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        known = (y >= 0).float()
        losses = F.cross_entropy(out, y.clamp(min=0), reduction="none") * known
        return (losses.sum((1, 2)) / known.sum((1, 2)).clamp(min=1)).mean()


@ordinary(records=images)
class UNet(Small):
    def make(self) -> nn.Module:
        return nn.ModuleDict({
            "down": nn.Conv2d(3, 4, 3, 2, 1), "deep": nn.Conv2d(4, 4, 3, padding=1),
            "up": nn.ConvTranspose2d(4, 4, 2, 2), "out": nn.Conv2d(7, 3, 1),
        })  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        h = F.relu(self.net["down"](x + 0.1 * torch.randn_like(x)))
        h = F.relu(self.net["up"](F.relu(self.net["deep"](h))))
        return F.l1_loss(self.net["out"](torch.cat([h, x], 1)), x)


@ordinary(
    records=lambda n: [(x, torch.stack([y == 0, y > 0, y > 1]).float()) for x, y in points(n)]
)
class MultiLabel(Small):
    def loss(self, out: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, y)
