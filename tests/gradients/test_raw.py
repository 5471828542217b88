"""Raw gradients are gone after the backward pass."""

from __future__ import annotations

from torch import nn

from lightning_dp.gradients import RawGradientGuard


def test_raw_gradients_of_trained_parameters_are_gone_until_the_guard_is_removed(oracle):
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    module[0].bias.requires_grad_(False)
    guard = RawGradientGuard(module.named_parameters())

    oracle.mean_loss(module(oracle.features())).backward()

    assert all(param.grad is None for param in module.parameters())
    assert set(guard.touched()) == {"0.weight", "2.weight", "2.bias"}
    assert guard.touched() == {}
    guard.remove()
    oracle.mean_loss(module(oracle.features())).backward()
    assert all(param.grad is not None for param in oracle.trained(module))
