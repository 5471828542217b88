"""Models that train under spot checks, which must let them pass."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

N, WIDTH, CLASSES = 240, 6, 3


class Base(L.LightningModule):
    """A classifier; what a case changes is `loss`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def training_step(self, batch, batch_idx):
        return self.loss(*batch)

    def loss(self, x, y):
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data():
    generator = torch.Generator().manual_seed(0)
    x = 40 * torch.rand(N, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(CLASSES, (N,), generator=generator))


class ByHand(Base):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(x, y)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Vae(Base):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def loss(self, x, y):
        mean, log_variance = self.encode(x / 40).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean**2 + log_variance.exp() - log_variance - 1).sum(1) / 2
        return (F.mse_loss(self.decode(z), x / 40, reduction="none").sum(1) + divergence).mean()


class Diffusion(Base):
    def __init__(self):
        super().__init__()
        self.denoise = nn.Linear(WIDTH + 1, WIDTH)

    def loss(self, x, y):
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        noisy = (1 - t) * x / 40 + t * noise
        return F.mse_loss(self.denoise(torch.cat([noisy, t], 1)), noise)


class Dropout(Base):
    def loss(self, x, y):
        return super().loss(F.dropout(x / 40, 0.3), y)


class Augments(Base):
    """In place, with random numbers of three libraries."""

    def loss(self, x, y):
        x += random.random() + np.random.rand()
        x *= 1 + 0.1 * torch.rand(len(x), 1)
        return super().loss(x / 40, y)


class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def loss(self, x, y):
        return super().loss(x / 40 + torch.randn(x.shape, generator=self.generator), y)


class Unseeded(Base):
    """No state can be put back: nothing can be said."""

    def loss(self, x, y):
        noise = np.random.default_rng().normal(size=x.shape)
        return super().loss(x / 40 + torch.tensor(noise, dtype=x.dtype), y)


class DrawsByRecord(Base):
    """How many random numbers are drawn depends on records; who draws what does not."""

    def loss(self, x, y):
        rows = [row + random.random() if row[0] > 20 else row for row in x / 1]
        return super().loss(torch.stack(rows) / 40, y)


class Clock(Base):
    def loss(self, x, y):
        self.began = time.perf_counter()
        return super().loss(x / 40, y)


class KeepsLosses(Base):
    """Ordinary notes that no gradient depends on."""

    def __init__(self):
        super().__init__()
        self.losses, self.outputs, self.counts = [], deque(maxlen=3), {}

    def loss(self, x, y):
        loss = super().loss(x / 40, y)
        self.losses.append(loss.item())
        self.outputs.append(loss.detach())
        self.last = self.net(x / 40).detach()
        return loss


class Metrics(Base):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(CLASSES)

    def loss(self, x, y):
        logits = self.net(x / 40)
        self.log("accuracy", self.accuracy(logits, y), on_step=True, on_epoch=True)
        self.log_dict({"mean": x.mean()}, prog_bar=True)
        return F.cross_entropy(logits, y)


class Teacher(Base):
    """A teacher that follows the student, between steps."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def loss(self, x, y):
        with torch.no_grad():
            soft = self.teacher(x / 40).softmax(1)
        return F.cross_entropy(self.net(x / 40), soft) + super().loss(x / 40, y)

    def on_train_batch_end(self, *unused):
        with torch.no_grad():
            self.teacher.weight.mul_(0.99)


class Experts(Base):
    """Routes with index_select: the groups of an expert have other sizes in other batches."""

    def __init__(self):
        super().__init__()
        self.route = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def loss(self, x, y):
        gates = self.route(x / 40).softmax(1)
        outputs = torch.stack([expert(x / 40) for expert in self.experts], 1)
        chosen = gates.argmax(1)
        rows = torch.arange(len(x))
        return F.cross_entropy(outputs[rows, chosen] * gates[rows, chosen, None], y)


class TinyGradients(Base):
    def loss(self, x, y):
        return super().loss(x / 40, y) * 1e-9


class WideRange(Base):
    """Records whose gradients differ by many orders of magnitude."""

    def loss(self, x, y):
        return super().loss(x / 40 * 10.0 ** (y[:, None] * 4 - 6).float(), y)


class Counts(Base):
    """A public schedule."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def loss(self, x, y):
        self.calls += 1
        return super().loss(x / 40, y) * (1 + 1 / self.calls)


class PublicBuffer(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def loss(self, x, y):
        self.steps += 1
        return super().loss(x / 40, y) / self.steps


class Dictionary(Base):
    def training_step(self, batch):
        x, y = batch
        return {"loss": self.loss(x / 40, y), "x": x}


class RaisesOnOthers(Base):
    """Synthetic or repeated records may not be legal."""

    def loss(self, x, y):
        if len({tuple(row.tolist()) for row in x}) < len(x):
            raise ValueError("repeated")
        return super().loss(x / 40, y)


class ReadsTrainer(Base):
    def loss(self, x, y):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        assert self.optimizers() is not None
        return super().loss(x / 40, y) * (1 + rate + self.global_step / 100)


class OrdinaryByHand(ByHand):
    def loss(self, x, y):
        return super().loss(x / 40, y)


class Multi(Base):
    def loss(self, x, y):
        z = self.net(x / 40)
        return F.cross_entropy(z, y) + 0.1 * z.square().mean() + 0.01 * z.abs().sum(1).mean()


class Half(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.to(torch.bfloat16)

    def loss(self, x, y):
        return F.cross_entropy(self.net(x.bfloat16() / 40), y)


class NanRecords(Base):
    def loss(self, x, y):
        return super().loss(torch.where(x[:, :1] > 30, torch.nan, x / 40), y)


class DrawsOfItsOwn(Base):
    """How many numbers its own generator draws depends on records."""

    def __init__(self):
        super().__init__()
        self.generator = random.Random(3)

    def loss(self, x, y):
        rows = [row + self.generator.random() if row[0] > 20 else row for row in x / 1]
        return super().loss(torch.stack(rows) / 40, y)


class Shuffles(Base):
    def loss(self, x, y):
        order = torch.randperm(len(x))
        return super().loss(x[order] / 40, y[order])


class SortsByLength(Base):
    """As packed sequences are."""

    def loss(self, x, y):
        order = x.norm(dim=1).argsort(descending=True)
        return super().loss(x[order] / 40, y[order])


class TableOfTheLength(Base):
    """Positions, made anew when another length comes; never saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", None, persistent=False)

    def loss(self, x, y):
        length = int(x[:, 0].max())
        if self.table is None or len(self.table) != length:
            self.table = torch.linspace(0, 1, length)
        return super().loss(x / 40, y)


class NoSchedule(Base):
    """An iterator, which cannot be put back; also in a buffer."""

    def __init__(self):
        super().__init__()
        self.count = itertools.count(1)
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, x, y):
        self.seen.fill_(next(self.count))
        return super().loss(x / 40, y) / self.seen


class CoarseClock(Base):
    def loss(self, x, y):
        return super().loss(x / 40, y) * (1 + int(time.time() * 30) % 3)


ORDINARY = [
    Vae,
    Diffusion,
    Dropout,
    Augments,
    OwnGenerator,
    Unseeded,
    DrawsByRecord,
    Clock,
    KeepsLosses,
    Metrics,
    Teacher,
    Experts,
    TinyGradients,
    WideRange,
    Counts,
    PublicBuffer,
    Dictionary,
    RaisesOnOthers,
    ReadsTrainer,
    OrdinaryByHand,
    Multi,
    Half,
    NanRecords,
    DrawsOfItsOwn,
    Shuffles,
    SortsByLength,
    TableOfTheLength,
    NoSchedule,
    CoarseClock,
]


PROBED = (Vae, Experts, Metrics, Teacher)  # then the kinds of records are those it found
QUICK = [Diffusion, Augments, Unseeded, DrawsByRecord, Experts, Half, NanRecords, WideRange]
