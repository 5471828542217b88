"""Raw gradients are gone after the backward pass, and no optimizer steps with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.gradients import RawGradientGuard


@pytest.fixture
def guarded(mlp) -> tuple[nn.Module, torch.optim.Optimizer, RawGradientGuard]:
    torch.manual_seed(0)
    module = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, optimizer, RawGradientGuard(module.named_parameters(), optimizer)


def test_raw_gradients_are_gone_after_backward(guarded, oracle):
    module, _, guard = guarded

    oracle.mean_loss(module(oracle.features())).backward()

    assert all(param.grad is None for param in module.parameters())
    assert guard.touched() == dict(module.named_parameters())
    assert guard.touched() == {}


def test_an_optimizer_step_that_was_not_allowed_raises_and_one_is_allowed_once(guarded):
    module, optimizer, guard = guarded
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    guard.allow_step()
    optimizer.step()

    with pytest.raises(
        RuntimeError, match=r"optimizer.step\(\) was called with gradients that were not"
    ):
        optimizer.step()


def test_a_removed_guard_leaves_gradients_and_steps_alone(guarded, oracle):
    module, optimizer, guard = guarded
    guard.remove()

    oracle.mean_loss(module(oracle.features())).backward()
    optimizer.step()

    assert all(param.grad is not None for param in module.parameters())


def test_frozen_parameters_are_not_guarded(oracle):
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    module[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(oracle.trained(module), lr=0.1)
    guard = RawGradientGuard(module.named_parameters(), optimizer)

    oracle.mean_loss(module(oracle.features())).backward()

    assert set(guard.touched()) == {"0.weight", "2.weight", "2.bias"}
