"""Branches on numbers and texts that only the user's code names, and behind rare random draws."""

from __future__ import annotations

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_dp.isolation import probe_isolation
from lightning_dp.isolation.own_constants import ComparedWith, compared_in_code

MISSING = -9999.0


class Plain(L.LightningModule):
    """A classifier; ``turns`` tells when the whole batch gets another sign."""

    limit = 4000.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def turns(self, x, y, kind):
        return False

    def training_step(self, batch, batch_idx):
        x, y, kind = batch
        out = self.net(x)
        return F.cross_entropy(-out if self.turns(x, y, kind) else out, y % 3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Marker(Plain):
    def turns(self, x, y, kind):
        return bool((x == -999).any())


class MarkerOfTheFile(Plain):
    def turns(self, x, y, kind):
        return bool(x.eq(MISSING).any())


class Limit(Plain):
    def turns(self, x, y, kind):
        return bool((x > self.limit).any())


class LimitOfANumber(Plain):
    def turns(self, x, y, kind):
        return float(x.max()) > 7500


class Code(Plain):
    def turns(self, x, y, kind):
        return bool((y == 311).any())


class Text(Plain):
    def turns(self, x, y, kind):
        return any(each == "fraud" for each in kind)


class TextAmongOthers(Plain):
    def turns(self, x, y, kind):
        return any(each in ("fraud", "error") for each in kind)


class ShareOfOnes(Plain):
    def turns(self, x, y, kind):
        return bool((x == 1).float().mean() > 0.6)


class RareDraw(Plain):
    """Behind another draw, so that no seed is known to lead there."""

    def training_step(self, batch, batch_idx):
        x, y, kind = batch
        x = x + 0.01 * torch.randn_like(x)
        if torch.rand(()) < 0.08:
            x = x / x.abs().max()
        return super().training_step((x, y, kind), batch_idx)


class RareDrawOfNumPy(Plain):
    def training_step(self, batch, batch_idx):
        x, y, kind = batch
        np.random.randint(0, 30, size=5)
        if np.random.rand() < 0.06:
            x = x / x.abs().max()
        return super().training_step((x, y, kind), batch_idx)


class Apart(Plain):
    """Looks at each record alone, rarely in another way."""

    def training_step(self, batch, batch_idx):
        x, y, kind = batch
        x = torch.where(x == -999, 0.0, x.clamp(max=self.limit))
        weight = torch.tensor([2.0 if each == "fraud" else 1.0 for each in kind])
        if torch.rand(()) < 0.08:
            x = x.flip(1)
        losses = F.cross_entropy(self.net(x), y % 3, reduction="none")
        return (losses * weight * torch.where(y == 311, 0.5, 1.0)).mean()


def probed(kind):
    like = torch.zeros(5, 6), torch.zeros(5, dtype=torch.int64), ["a", "b", "c", "d", "e"]
    return probe_isolation(kind(), like, expected=12)


@pytest.mark.parametrize(
    "kind",
    [
        *(Marker, Limit, Text, RareDraw),
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in (MarkerOfTheFile, LimitOfANumber, Code, TextAmongOthers, ShareOfOnes)
        ),
        pytest.param(RareDrawOfNumPy, marks=pytest.mark.slow),
    ],
)
def test_branches_of_constants_and_of_rare_draws_are_found(kind):
    assert probed(kind).outcome == "coupled"


@pytest.mark.parametrize("kind", [Plain, Apart])
def test_constants_for_single_records_pass(kind):
    found = probed(kind)

    assert found.outcome == "isolated", found


def test_constants_are_those_of_comparisons():
    class Compares(Plain):
        def other(self, x):
            y = x * 17 + 5
            if x == 42 or x in ("a", "b") or x > -2.5:
                y = 23
            return [each for each in y if each != 99]

    numbers, texts = compared_in_code(Compares())

    assert {42, -2.5, 99} <= set(numbers) and not {17, 5, 23} & set(numbers)
    assert texts == ["a", "b"]


def test_comparisons_by_name_are_seen():
    with ComparedWith() as seen:
        torch.eq(input=torch.ones(2), other=7)
        torch.ones(2).lt(other=-3.5)
        torch.ones(2).gt(0)
    assert list(seen.numbers) == [7, -3.5]
