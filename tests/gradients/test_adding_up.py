"""Gradients of records that do not add up to the gradient of the loss are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.functional import parts_of
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.adding_up import check_sum, plain_gradients
from lightning_dp.gradients.layer_calls import LayerCalls


@pytest.mark.parametrize("fault", ["none", "missed", "twice", "another's"])
def test_what_was_missed_or_counted_twice_is_refused(fault, oracle):
    torch.manual_seed(0)
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), oracle.features()
    params, engine = oracle.trained(module), LayerCalls()
    names = [name for name, _ in module.named_parameters()]
    engine.attach(module, params)
    loss = oracle.mean_loss(module(batch))
    plain = plain_gradients(loss, params)
    assert plain is not None
    engine.backward(loss)
    weight = parts_of(plain, params)[2].view_as(params[2])
    if fault == "missed":
        weight *= 1.5
    elif fault == "twice":
        weight *= 0.5
    elif fault == "another's":
        weight.copy_(weight.roll(1, 0))
    found = engine.take(1.0)
    engine.detach()
    if fault == "none":
        check_sum(found, plain, params, names)
        return
    with pytest.raises(UnsupportedModelError, match=r"^2\.weight: .*do not add up"):
        check_sum(found, plain, params, names)
