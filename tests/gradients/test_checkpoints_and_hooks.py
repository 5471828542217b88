"""Activation checkpoints and the user's own hooks, which run layers in other ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x, use_reentrant=False))


def test_activation_checkpoints(layer_engine, oracle):
    torch.manual_seed(0)
    module, batch = Checkpointed(), torch.randn(oracle.records, 6)
    expected = oracle.one_by_one(module, batch)
    layer_engine.attach(module, oracle.trained(module))
    gradients = oracle.run(layer_engine, module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=2e-6, atol=0)


def test_hooks_that_change_an_output_belong_to_the_model(layer_engine, oracle):
    torch.manual_seed(0)
    module, batch = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), torch.randn(oracle.records, 6)
    module[0].register_forward_hook(lambda m, i, o: 3 * o)
    module[0].register_forward_pre_hook(lambda m, i: (2 * i[0],))
    expected = oracle.one_by_one(module, batch)
    layer_engine.attach(module, oracle.trained(module))
    gradients = oracle.run(layer_engine, module, batch)
    torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=2e-6, atol=0)
