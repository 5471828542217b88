"""Models and engines, and the slow oracle: one record at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.gradients import AbstractGradientEngine, UnsupportedModelError
from lightning_dp.gradients.ghost import GhostClipping
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.opacus_hooks import OpacusHooks

RECORDS = 5


def features() -> Tensor:
    return torch.randn(RECORDS, 6)


class _Covered(AbstractGradientEngine):
    """Skips models with layers of which no rule is known: engines below answer there."""

    def __init__(self, module: nn.Module, params: Sequence[nn.Parameter]) -> None:
        try:
            super().__init__(module, params)
        except UnsupportedModelError as error:
            if "no rule is known" not in error.text:
                raise
            pytest.skip("has a layer without a rule")


class OfLayers(_Covered, LayerCalls): ...


class Ghost(_Covered, GhostClipping): ...


ENGINES: dict[str, Callable[..., AbstractGradientEngine]] = {
    "hooks": OpacusHooks,
    "layers": OfLayers,
    "ghost": Ghost,
}


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> Callable[..., AbstractGradientEngine]:
    """Every engine of the whole batch."""
    return ENGINES[request.param]


class Oracle:
    """One record at a time by plain autograd in float64; and what is to be compared with it."""

    records = RECORDS
    features = staticmethod(features)

    @staticmethod
    def trained(module: nn.Module) -> tuple[nn.Parameter, ...]:
        return tuple(param for param in module.parameters() if param.requires_grad)

    @staticmethod
    def mean_loss(output: Tensor) -> Tensor:
        """A mean over records of something smooth that differs between them."""
        target = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
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

    @staticmethod
    def clipped(rows: Tensor, clip_norm: float) -> Tensor:
        """The sum of the rows, each scaled down to that norm."""
        return (rows * (clip_norm / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)

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
        found: dict[str, Any] = {"state_dict": list(module.state_dict())}
        for name, part in module.named_modules():
            found[f"{name}: type"] = type(part)
            found[f"{name}: vars"] = sorted(vars(part))
            for hooks in (
                "_forward_hooks",
                "_forward_pre_hooks",
                "_backward_hooks",
                "_backward_pre_hooks",
            ):
                found[f"{name}: {hooks}"] = len(getattr(part, hooks))
        for name, param in module.named_parameters():
            found[f"{name}: attributes"] = sorted(set(dir(param)) - {"grad"})
            found[f"{name}: hooks"] = len(param._backward_hooks or {})
            found[f"{name}: requires_grad"] = param.requires_grad
        return found

    return found_on
