"""What a model writes into weights and buffers must not come from the records."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.isolation import check_isolation, probe_isolation

BATCH = (torch.randn(8, 8), torch.arange(8) % 3)


class Remembering(nn.Module):
    """A linear layer, and a buffer that is written after it was used."""

    def __init__(self, write) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(8, 3), write
        nn.init.eye_(self.linear.weight)  # so that records have different codes
        nn.init.zeros_(self.linear.bias)
        self.register_buffer("memory", torch.zeros(3))

    def forward(self, x):
        y = self.linear(x) - self.memory
        with torch.no_grad():
            self.write(self, y.detach())
        return y


def running_mean(layer, y):
    layer.memory.mul_(0.9).add_(y.mean(0), alpha=0.1)


def counts_of_codes(layer, y):
    layer.memory += torch.bincount(y.argmax(1), minlength=3)


def another_buffer(layer, y):
    layer.register_buffer("last", y[:1].clone())


def behind_the_version_counter(layer, y):
    layer.memory.data[0] = y[0, 0]


def a_weight(layer, y):
    layer.linear.bias.data += y.mean(0)


def counts_of_steps(layer, y):
    layer.memory += 1


def mean_of_weights(layer, y):
    layer.memory.copy_(layer.linear.weight.mean(1))


def random_numbers(layer, y):
    layer.memory.copy_(torch.rand(3))


def not_a_number(layer, y):
    layer.memory[1] = math.nan


@pytest.fixture
def model(model_class):
    def make(write):
        return model_class(Remembering(write), nn.functional.cross_entropy)

    return make


KEEPS = {
    running_mean: "net.memory",
    counts_of_codes: "net.memory",
    another_buffer: "net.last",
    behind_the_version_counter: "net.memory",
    a_weight: "net.linear.bias",
}


@pytest.mark.parametrize("probe", [probe_isolation, check_isolation])
@pytest.mark.parametrize("write", KEEPS)
def test_a_tensor_that_depends_on_the_records_is_named(write, probe, model):
    found = probe(model(write), BATCH)

    assert found.outcome == "kept"
    assert found.modules == (KEEPS[write],)
    assert found.modules[0] in found.reason and "Leave them fixed" in found.reason


@pytest.mark.parametrize("write", [counts_of_steps, mean_of_weights, random_numbers, not_a_number])
def test_other_buffers_may_be_written(write, model):
    assert probe_isolation(model(write), BATCH).outcome == "isolated"


def test_a_fit_refuses_it_before_anything_is_charged(model, make_trainer):
    loader = DataLoader(TensorDataset(*BATCH), batch_size=4)
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-5)

    with pytest.raises(MisconfigurationException, match=r"writes what it sees .* net\.memory"):
        make_trainer(max_steps=2, callbacks=[privacy]).fit(model(running_mean), loader)

    assert privacy.steps == 0
    assert "FAILED: training_step writes" in privacy.report().isolation


def test_the_model_itself_is_not_touched(model):
    probed = model(running_mean)

    probe_isolation(probed, BATCH)

    assert probed.net.memory.tolist() == [0.0, 0.0, 0.0]
