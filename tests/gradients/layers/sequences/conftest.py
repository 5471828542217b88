"""Layers on sequences against a backward pass for each record, with the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp.gradients.bookkeeping import Bookkeeping

RECORDS, LENGTH, WIDTH = 5, 4, 6

Losses = Callable[[], Tensor]  # of each record, always with the same random numbers


class Loop:
    """The slow oracle in float64, and the engine beside it."""

    @staticmethod
    def trained(module: nn.Module) -> list[nn.Parameter]:
        return [param for param in module.parameters() if param.requires_grad]

    @staticmethod
    def losses_of(module: nn.Module, run: Callable[[nn.Module], Tensor]) -> Losses:
        def losses() -> Tensor:
            torch.manual_seed(3)
            output = torch.tanh(run(module)).flatten(1)
            return (output - torch.linspace(-1, 1, output.shape[1])).square().sum(1)

        return losses

    @staticmethod
    def one_by_one(losses: Losses, params: list[nn.Parameter]) -> Tensor:
        """(n, d): the gradient of each record's loss, by a backward pass of its own."""
        rows = []
        for i in range(len(losses())):
            parts = torch.autograd.grad(losses()[i], params, materialize_grads=True)
            rows.append(torch.cat([part.flatten() for part in parts]))
        return torch.stack(rows)

    @staticmethod
    def products_one_by_one(losses: Losses, params: list[nn.Parameter], u: Tensor) -> Tensor:
        """(n, d): H_i u by two backward passes."""
        rows = []
        for i in range(len(losses())):
            with sdpa_kernel(SDPBackend.MATH):
                parts = torch.autograd.grad(
                    losses()[i], params, create_graph=True, materialize_grads=True
                )
                slope = torch.cat([part.flatten() for part in parts]) @ u
                again = torch.autograd.grad(slope, params, materialize_grads=True)
            rows.append(torch.cat([part.flatten() for part in again]))
        return torch.stack(rows)

    @staticmethod
    def _same(gradients: Any, expected: Tensor, atol: float = 1e-10) -> None:
        assert gradients.count == len(expected)
        torch.testing.assert_close(gradients.norms(), expected.norm(dim=1), rtol=1e-9, atol=1e-12)
        weights = torch.linspace(-1, 2, len(expected), dtype=torch.float64)
        total = gradients.weighted_sum(weights)
        torch.testing.assert_close(total, weights @ expected, rtol=1e-9, atol=atol)

    def equals(self, engine: Bookkeeping, module: nn.Module, losses: Losses) -> None:
        """Gradients, and the state of the random numbers afterwards."""
        expected = self.one_by_one(losses, self.trained(module))
        assert (expected.norm(dim=1) > 1e-3).all()
        losses()
        state = torch.get_rng_state()
        engine.attach(module, self.trained(module))
        engine.backward(losses().mean())
        assert torch.equal(torch.get_rng_state(), state)
        self._same(engine.take(1.0, {}), expected)

    def equals_in_differences(
        self, engine: Bookkeeping, module: nn.Module, losses: Losses, step: float = 1e-4
    ) -> None:
        """The gradient here minus that at a point nearby."""
        here = self.one_by_one(losses, self.trained(module))
        engine.attach(module, self.trained(module))
        engine.backward(losses().mean(), combined=True)
        first = engine.take(1.0, {})
        with torch.no_grad():
            for param in module.parameters():
                param.add_(torch.randn_like(param), alpha=step)
        expected = here - self.one_by_one(losses, self.trained(module))
        engine.backward(losses().mean(), combined=True)
        gradients = first.combine(1.0, [(-1.0, engine.take(1.0, {}))])
        self._same(gradients, expected, atol=1e-12)

    def equals_in_products(self, engine: Bookkeeping, module: nn.Module, losses: Losses) -> None:
        """g - 2 H u for a random u."""
        params = self.trained(module)
        u = torch.randn(sum(param.numel() for param in params), dtype=torch.float64)
        expected = self.one_by_one(losses, params)
        expected = expected - 2 * self.products_one_by_one(losses, params, u)
        engine.attach(module, params)
        self._same(engine.along(lambda: losses().mean(), u, (1.0, -2.0)), expected)


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def engine() -> Iterator[Bookkeeping]:
    engine = Bookkeeping()
    yield engine
    engine.detach()


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(RECORDS, LENGTH, WIDTH, dtype=torch.float64)


@pytest.fixture
def refuses(engine: Bookkeeping, loop: Loop) -> Callable[..., None]:
    """That a run of a model is refused, at the latest by the backward pass."""

    def check(
        module: nn.Module, run: Callable[[nn.Module], Tensor], kind: type, match: str
    ) -> None:
        engine.attach(module, loop.trained(module))
        loss = loop.losses_of(module, run)().mean()
        with pytest.raises(kind, match=match):
            engine.backward(loss)
            engine.take(1.0, {}).norms()

    return check
