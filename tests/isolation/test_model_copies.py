"""Copies of a model share one memory for its weights, which are the model's in each new copy."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dp.isolation import model_copies
from lightning_dp.isolation.model_copies import ModelCopies


@pytest.fixture(params=[1 << 16, 10], ids=["small", "large"])
def model(request, monkeypatch):
    monkeypatch.setattr(model_copies, "_LARGE", request.param)
    monkeypatch.setattr(model_copies, "_ENTRIES", 4)
    module = LightningModule()
    module.layer = nn.Linear(7, 5)
    return module


def _write(weight):
    with torch.no_grad():
        weight[2, 3] += 1.0


def _write_uncounted(weight):
    weight.data.mul_(0.5)


def _write_uncounted_row(weight):
    weight.data[0] = 0.0


def _write_not_a_number(weight):
    with torch.no_grad():
        weight[1, 1] = float("nan")


WRITES = [_write, _write_uncounted, _write_uncounted_row, _write_not_a_number]


@pytest.mark.parametrize("write", WRITES)
def test_what_one_copy_writes_is_not_in_the_next(model, write):
    copies, expected = ModelCopies(model), model.layer.weight.detach().clone()
    write(copies.make().layer.weight)

    assert torch.equal(copies.make().layer.weight, expected)
    assert torch.equal(model.layer.weight, expected)


@pytest.mark.parametrize("write", WRITES[:3])
def test_what_the_model_writes_is_in_the_next(model, write):
    copies = ModelCopies(model)
    copies.make()
    write(model.layer.weight)

    assert torch.equal(copies.make().layer.weight, model.layer.weight)


def test_weights_are_copied_once(model, monkeypatch):
    monkeypatch.setattr(model_copies, "_LARGE", 10)
    copies = ModelCopies(model)
    first = copies.make().layer.weight
    address, writes = first.data_ptr(), first._version

    again = copies.make().layer.weight

    assert (again.data_ptr(), again._version) == (address, writes)
