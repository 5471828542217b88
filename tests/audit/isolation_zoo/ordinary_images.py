"""Modules for images that keep records apart: all of them train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isolation_zoo.cases import Small, ordinary
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
