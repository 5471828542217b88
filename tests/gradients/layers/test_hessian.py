"""Hessian-vector products of the book-keeping engine against two backward passes a record."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import UncoveredParameterError, UnsupportedModelError
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.opacus_hooks import OpacusHooks

RECORDS = 5


def params_of(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def products_one_by_one(module: nn.Module, batch: Tensor, direction: Tensor) -> Tensor:
    """(n, d): H_i u by two plain backward passes in float64, one record at a time."""
    module = copy.deepcopy(module).double()
    batch = batch.double() if batch.is_floating_point() else batch
    rows = []
    for i in range(len(batch)):
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            output = module(batch[i : i + 1])
            targets = torch.linspace(-1, 1, output.numel() * len(batch), dtype=torch.float64)
            target = targets.view(len(batch), *output.shape[1:])[i]
            loss = (torch.tanh(output[0]) - target).square().sum()
            parts = torch.autograd.grad(loss, params_of(module), create_graph=True)
            slope = torch.cat([part.reshape(-1) for part in parts]) @ direction.double()
            again = torch.autograd.grad(slope, params_of(module), materialize_grads=True)
        rows.append(torch.cat([part.reshape(-1) for part in again]))
    return torch.stack(rows)


@pytest.fixture
def along(oracle: Any) -> Callable[..., Any]:
    """An layer_engine's answer for w g_i + w' H_i u."""

    def answer(
        engine: LayerCalls, module: nn.Module, batch: Tensor, u: Tensor, *weights: float
    ) -> Any:
        return engine.along(lambda: oracle.mean_loss(module(batch)), u, weights)

    return answer


def direction_for(module: nn.Module) -> Tensor:
    """Random; without a part for padding, which has no gradient and still moves the output."""
    generator = torch.Generator().manual_seed(5)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for param in other.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
        for part in other.modules():
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                part.weight[part.padding_idx] = 0
    return torch.cat([param.detach().reshape(-1) for param in params_of(other)])


def products_along_a_direction(module: nn.Module, batch: Tensor) -> Tensor:
    return products_one_by_one(module, batch, direction_for(module))


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("weights", [(-0.5, 2.0), pytest.param((0.0, 1.0), marks=pytest.mark.slow)])
def test_hessian_vector_products_equal_the_loop(
    layer_engine, layer_case, model_and_batch, weights, along, oracle, slow
):
    module, batch = model_and_batch
    u = direction_for(module)
    products = slow(products_along_a_direction, layer_case)
    expected = weights[0] * slow(oracle.one_by_one, layer_case) + weights[1] * products
    layer_engine.attach(module, params_of(module))

    gradients = along(layer_engine, module, batch, u, *weights)

    assert gradients.count == RECORDS
    norms = expected.norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=2e-5, atol=1e-9)
    clip_norm = float(norms.median())
    total = bounded_sum(gradients, clip_norm).value.double()
    wanted = oracle.clipped(expected, clip_norm)
    assert (total - wanted).norm() <= 2e-5 * wanted.norm()


@pytest.mark.parametrize("keep", [1, 7])
def test_restricted_gradients_and_products_are_columns_of_the_loop(
    layer_engine, layer_case, model_and_batch, keep, along, oracle, slow
):
    module, batch = model_and_batch
    u = direction_for(module)
    gradients_here = slow(oracle.one_by_one, layer_case)
    expected = gradients_here + slow(products_along_a_direction, layer_case)
    places = torch.arange(expected.shape[1])
    places = places[-keep:] if keep == 1 else places[3::keep][:-1]
    layer_engine.attach(module, params_of(module))

    gradients = along(layer_engine, module, batch, u, 1.0, 1.0).restrict(places)

    size = float(expected.norm(dim=1).max())
    norms = expected[:, places].norm(dim=1)
    torch.testing.assert_close(gradients.norms(), norms, rtol=0, atol=2e-5 * size)
    total = gradients.weighted_sum(torch.ones(RECORDS)).double()
    assert (total - expected[:, places].sum(0)).norm() <= 2e-5 * size
    only = (
        oracle.run(layer_engine, module, batch).restrict(places).weighted_sum(torch.ones(RECORDS))
    )
    wanted = gradients_here[:, places].sum(0)
    assert (only.double() - wanted).norm() <= 2e-5 * size


def test_a_pass_along_a_direction_leaves_the_model_and_the_next_batch_as_they_were(
    layer_engine, model_and_batch, along, oracle
):
    module, batch = model_and_batch
    before = dict(module.named_parameters())
    layer_engine.attach(module, params_of(module))
    first = oracle.run(layer_engine, module, batch).weighted_sum(torch.ones(RECORDS))

    along(layer_engine, module, batch, direction_for(module), 1.0, 1.0)

    after = dict(module.named_parameters())
    assert all(after[name] is param and param.grad is None for name, param in before.items())
    again = oracle.run(layer_engine, module, batch).weighted_sum(torch.ones(RECORDS))
    assert torch.equal(first, again)


@pytest.mark.parametrize("poison", ["nan", "inf"])
def test_a_record_whose_product_is_not_finite_contributes_nothing(
    layer_engine, poison, along, oracle, layer_models
):
    torch.manual_seed(0)
    module, batch = layer_models["linear"][0](), torch.randn(RECORDS, 6)
    batch[2] = float(poison)
    u = direction_for(module)
    layer_engine.attach(module, params_of(module))
    total = bounded_sum(along(layer_engine, module, batch, u, 1.0, 1.0), 0.1).value.double()
    expected = oracle.one_by_one(module, batch) + products_one_by_one(module, batch, u)
    wanted = oracle.clipped(expected[torch.arange(RECORDS) != 2], 0.1)
    assert (total - wanted).norm() <= 2e-5 * wanted.norm()


class Tied(nn.Module):
    """One table at both ends, and a layer under checkpoint() between."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 6)
        self.middle = nn.Linear(6, 6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda t: torch.tanh(self.middle(t)), self.tokens(x), use_reentrant=False)
        return self.out(y).flatten(1)


def checkpoints_know_duals() -> bool:
    """Checkpoints of torch 2.6 do not; those of 2.13 do."""
    one = torch.ones(1, requires_grad=True)
    try:
        torch.func.jvp(lambda x: checkpoint(torch.sin, x, use_reentrant=False), (one,), (one,))
    except NotImplementedError:
        return False
    return True


def test_products_of_shared_and_recomputed_layers_equal_the_loop(layer_engine, along):
    torch.manual_seed(0)
    module, batch = Tied(), torch.randint(9, (RECORDS, 4))
    u = direction_for(module)
    expected = products_one_by_one(module, batch, u)
    layer_engine.attach(module, params_of(module))
    if not checkpoints_know_duals():
        with pytest.raises(UnsupportedModelError, match="one has none"):
            along(layer_engine, module, batch, u, 0.0, 1.0)
        return
    total = along(layer_engine, module, batch, u, 0.0, 1.0).weighted_sum(torch.ones(RECORDS))
    assert (total.double() - expected.sum(0)).norm() <= 2e-5 * expected.sum(0).norm()


class Heads(nn.Module):
    """Attention as it is usually called, for which a fused kernel is taken where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, 3, 2, 3).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).flatten(1)


def test_products_of_fused_attention_equal_the_loop(layer_engine, along):
    torch.manual_seed(0)
    module, batch = Heads(), torch.randn(RECORDS, 8, 6)
    u = direction_for(module)
    expected = products_one_by_one(module, batch, u).sum(0)
    layer_engine.attach(module, params_of(module))
    total = along(layer_engine, module, batch, u, 0.0, 1.0).weighted_sum(torch.ones(RECORDS))
    assert (total.double() - expected).norm() <= 2e-5 * expected.norm()


def test_products_of_frozen_parts_are_those_of_the_trained_ones(layer_engine, along, layer_models):
    torch.manual_seed(0)
    module, batch = layer_models["linear"][0](), torch.randn(RECORDS, 6)
    module[0].requires_grad_(False)
    u = direction_for(module)
    expected = products_one_by_one(module, batch, u)
    layer_engine.attach(module, params_of(module))
    total = along(layer_engine, module, batch, u, 0.0, 1.0).weighted_sum(torch.ones(RECORDS))
    torch.testing.assert_close(total.double(), expected.sum(0), rtol=2e-5, atol=1e-6)


class Unrecorded(nn.Module):
    """Uses a weight outside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.layer.weight


def test_uses_outside_a_layer_are_found_along_a_direction_too(layer_engine, along):
    module, batch = Unrecorded(), torch.randn(RECORDS, 6)
    layer_engine.attach(module, params_of(module))
    with pytest.raises(UncoveredParameterError, match=r"layer\.weight"):
        along(layer_engine, module, batch, direction_for(module), 1.0, 1.0)


def test_engines_without_products_say_so(along):
    module, engine = nn.Linear(6, 3), OpacusHooks()
    engine.attach(module, params_of(module))
    assert not engine.has_products
    with pytest.raises(UnsupportedModelError, match="no Hessian-vector products"):
        engine.along(lambda: torch.zeros(()), torch.zeros(21), (1.0, 1.0))
    engine.detach()


class NoForwardMode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return NoForwardMode.apply(self.layer(x))


def test_an_operation_without_a_second_derivative_is_named_as_the_cause(
    layer_engine, along, oracle
):
    module = OwnFunction()
    layer_engine.attach(module, params_of(module))
    with pytest.raises(UnsupportedModelError, match="second derivative"):
        along(layer_engine, module, torch.randn(RECORDS, 6), direction_for(module), 1.0, 1.0)
    oracle.run(layer_engine, module, torch.randn(RECORDS, 6))  # and it still works
