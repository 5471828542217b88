"""Ordinary code passes the probe: own generators, batches edited in place, half precision, order."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.isolation import probe_isolation


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = self.seen(*batch)
        return F.cross_entropy(self.net(x), y)

    def seen(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y


class EditsInPlace(Base):
    def seen(self, x, y):
        x += np.random.rand()
        x *= 1 + 0.1 * torch.rand(len(x), 1)
        return x, y


class OwnGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def seen(self, x, y):
        return x + torch.randn(x.shape, generator=self.generator), y


class OwnNumpyGenerator(Base):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(3)

    def seen(self, x, y):
        return x + torch.tensor(self.generator.normal(size=x.shape), dtype=x.dtype), y


class HalfPrecision(Base):
    def __init__(self):
        super().__init__()
        self.to(torch.bfloat16)

    def seen(self, x, y):
        return x.bfloat16() + torch.zeros(x.shape, dtype=torch.bfloat16), y


class Sorts(Base):
    def seen(self, x, y):
        order = x.norm(dim=1).argsort()
        return x[order], y[order]


class SortsOnlyLabels(Base):
    def seen(self, x, y):
        return x, y.sort().values


class SharesNoise(Base):
    """Own numbers, and records that meet."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def seen(self, x, y):
        x = x + torch.randn(x.shape, generator=self.generator)
        return x - x.mean(0), y


class HalfOfTheBatch(HalfPrecision):
    def seen(self, x, y):
        x = x.bfloat16()
        return x - x.mean(0), y


def outcome(model: type[Base]) -> str:
    batch = torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64)
    found = probe_isolation(model(), batch)
    assert "steps" not in str(found), found
    return found.outcome


@pytest.mark.parametrize(
    "model", [EditsInPlace, OwnGenerator, OwnNumpyGenerator, HalfPrecision, Sorts]
)
def test_ordinary_code_passes(model):
    assert outcome(model) == "isolated"


@pytest.mark.parametrize("model", [SortsOnlyLabels, SharesNoise, HalfOfTheBatch])
def test_what_mixes_records_does_not(model):
    assert outcome(model) == "coupled"


class ReadsItsRate(Base):
    def training_step(self, batch, batch_idx):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + self.global_step)
        return super().training_step(batch, batch_idx) * (1 + rate)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.25)


def test_the_probe_reads_the_real_rate_and_writes_another(make_trainer):
    module, trainer = ReadsItsRate(), make_trainer(max_epochs=1)
    trainer.strategy.connect(module)
    trainer.strategy.optimizers = [optimizer := module.configure_optimizers()]
    batch = torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64)

    found = probe_isolation(module, batch, trainer=trainer)

    assert found.outcome == "isolated", found
    assert optimizer.param_groups[0]["lr"] == 0.25
