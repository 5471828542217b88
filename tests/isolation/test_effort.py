"""Models of which one pass takes long are probed in fewer passes, and the same is found."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F

from lightning_dp.isolation import effort
from lightning_dp.isolation.passes import Passes
from lightning_dp.isolation.probe import probe_isolation


class Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.layer(x), y)


class ByTheFirst(Plain):
    """Record 0 moves the others."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.layer(x + x[:1]), y)


class ByTheLast(Plain):
    """The last record moves the others."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.layer(x + x[-1:]), y)


class ByTheLastStep(Plain):
    """The records of the step before move those of this one."""

    last = None

    def training_step(self, batch, batch_idx):
        x, y = batch
        shift = 0.0 if self.last is None else self.last
        self.last = x.mean(0)
        return F.cross_entropy(self.layer(x + shift), y)


LIKE = torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64)


@pytest.fixture
def passes_are_long(monkeypatch):
    monkeypatch.setattr(effort, "_LONG", 0.0)


@pytest.fixture
def number_of_passes(monkeypatch):
    run, runs = Passes.run, []

    def counted(self, *args, **kwargs):
        runs.append(None)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(Passes, "run", counted)
    return lambda: len(runs)


def test_fewer_passes_are_made_and_it_is_said(number_of_passes, monkeypatch):
    whole = probe_isolation(Plain(), LIKE)
    of_whole = number_of_passes()
    monkeypatch.setattr(effort, "_LONG", 0.0)

    short = probe_isolation(Plain(), LIKE)

    assert whole.outcome == short.outcome == "isolated"
    assert number_of_passes() - of_whole <= of_whole / 2
    assert "most other values" in str(short)
    assert "most other values" not in str(whole)


@pytest.mark.usefixtures("passes_are_long")
@pytest.mark.parametrize("kind", [ByTheFirst, ByTheLast, ByTheLastStep])
def test_coupled_records_are_found_in_fewer_passes(kind):
    found = probe_isolation(kind(), LIKE, loss_graph_check=False)

    assert found.outcome == "coupled"


def test_the_work_of_a_pass_is_that_of_its_shapes():
    model = Plain()
    passes = Passes(model, "auto", ["layer.weight"], None)

    with passes.quietly():
        found = effort.Effort.of(passes, LIKE, 4)

    assert found == effort.Effort(operations=2 * 6 * 4, weights=28, trained=24)
    assert not found.is_long(4)
