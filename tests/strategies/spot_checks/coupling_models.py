"""Models that couple their records where spot checks alone see it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.strategies.spot_checks.ordinary_models import CLASSES, WIDTH, Base, ByHand


class BranchOnRealValues(Base):
    def loss(self, x, y):
        return super().loss(x / x.mean() if x.max() > 1 else x, y)


class Centred(Base):
    def loss(self, x, y):
        logits = self.net(x)
        return F.cross_entropy(logits - logits.mean(0), y)


class SameLabels(Base):
    def loss(self, x, y):
        z = self.net(x / 40)
        same = (y[:, None] == y[None]).float()
        return (torch.cdist(z, z) * same).mean(1).mean()


class WeightedByRarity(Base):
    def loss(self, x, y):
        counts = torch.bincount(y, minlength=CLASSES).clamp(min=1)
        return (F.cross_entropy(self.net(x / 40), y, reduction="none") / counts[y]).mean()


class HardOnes(Base):
    def loss(self, x, y):
        losses = F.cross_entropy(self.net(x / 40), y, reduction="none")
        return (losses * (losses >= losses.median())).mean()


class SkipsLargeBatches(Base):
    def loss(self, x, y):
        loss = super().loss(x / 40, y)
        return loss * (1.0 if x.sum() > 40 * WIDTH * len(x) * 0.4 else 0.1)


class ClosureOfTheStep(Base):
    """Each record's weight depends on records before it, kept in a closure."""

    def __init__(self):
        super().__init__()
        seen = []
        self.note = seen.append
        self.mean = lambda: sum(seen) / len(seen)

    def loss(self, x, y):
        for row in x:
            self.note(float(row.mean()))
        return super().loss(x / self.mean(), y)


class Prefix(Base):
    def loss(self, x, y):
        return super().loss(x.cumsum(0) / 40, y)


class Centre(Base):
    """A buffer that keeps the mean: in every checkpoint."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))

    def loss(self, x, y):
        self.centre.copy_(x.mean())
        return super().loss(x / 40, y)


class MixesByHand(ByHand):
    def loss(self, x, y):
        return super().loss(x / 40 + (x / 40).mean(0), y)


class LaterEpoch(Base):
    def loss(self, x, y):
        x = x / 40
        return super().loss(x + x.mean(0) if self.current_epoch else x, y)


BAD = [
    BranchOnRealValues,
    Centred,
    SameLabels,
    WeightedByRarity,
    HardOnes,
    SkipsLargeBatches,
    ClosureOfTheStep,
    Prefix,
    MixesByHand,
    LaterEpoch,
]


class MixingLayer(nn.Module):
    def forward(self, x):
        return x - x.mean(0)
