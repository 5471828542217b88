"""No optimizer steps with gradients that were not released."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp.strategies.update_guard import StepGuard


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    module = nn.Linear(2, 2)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    return torch.optim.SGD(module.parameters(), lr=0.1)


def test_a_step_that_was_not_allowed_raises_and_one_is_allowed_once(optimizer):
    guard = StepGuard(optimizer)
    guard.allow()
    optimizer.step()

    with pytest.raises(
        RuntimeError, match=r"optimizer.step\(\) was called with gradients that were not"
    ):
        optimizer.step()


def test_a_guard_that_is_off_or_removed_leaves_steps_alone(optimizer):
    guard = StepGuard(optimizer)
    with guard.off():
        optimizer.step()
    guard.remove()
    optimizer.step()
