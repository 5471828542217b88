"""The slow oracle: one record at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.gradients import AbstractGradientEngine
from tests.gradients.test_contract import clipped, trained

RECORDS = 5
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def features() -> Tensor:
    return torch.randn(RECORDS, 6)


class Oracle:
    """One record at a time by plain autograd in float64; and what is to be compared with it."""

    records = RECORDS
    features, trained, clipped = map(staticmethod, (features, trained, clipped))

    @staticmethod
    def targets(output: Tensor) -> Tensor:
        return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)

    def mean_loss(self, output: Tensor, target: Tensor | None = None) -> Tensor:
        """A mean over records of something smooth that differs between them."""
        target = self.targets(output) if target is None else target
        return (torch.tanh(output) - target).square().flatten(1).sum(1).mean()

    def one_by_one(
        self, module: nn.Module, batch: Tensor, forward: Callable[..., Tensor] = nn.Module.__call__
    ) -> Tensor:
        """(n, d): the gradient of each record's own term of the mean loss."""
        module = copy.deepcopy(module).double()
        batch = batch.double() if batch.is_floating_point() else batch
        rows = []
        for position in range(len(batch)):
            output = forward(module, batch[position : position + 1])
            targets = torch.linspace(-1, 1, output.numel() * len(batch), dtype=torch.float64)
            target = targets.view(len(batch), *output.shape[1:])[position]
            loss = (torch.tanh(output[0]) - target).square().sum()
            parts = torch.autograd.grad(loss, self.trained(module), materialize_grads=True)
            rows.append(torch.cat([part.reshape(-1) for part in parts]))
        return torch.stack(rows)

    def run(self, engine: AbstractGradientEngine, module: nn.Module, batch: Tensor) -> Any:
        """One watched forward and backward pass: the engine's answer."""
        with engine.watching():
            loss = self.mean_loss(module(batch))
        engine.backward(loss)
        return engine.take(1.0)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
def anatomy() -> Callable[[nn.Module], dict[str, Any]]:
    """Everything an engine could leave on a model."""

    def found_on(module: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: (type(part), sorted(vars(part)), [len(getattr(part, kind)) for kind in HOOKS])
            for name, part in module.named_modules()
        }
        for name, param in module.named_parameters():
            hooks = len(param._backward_hooks or {})
            found[f"parameter {name}"] = sorted(vars(param)), hooks, param.requires_grad
        return found

    return found_on
