"""The engine of single records: its gradients and products against plain autograd, and its edges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_dp.boundary import Query, Term
from lightning_dp.gradients import RecordPasses, Replay, UnsupportedModelError
from lightning_dp.gradients.one_by_one import OneByOne
from lightning_dp.gradients.random_state import RandomState


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x.unsqueeze(1) * torch.linspace(0.5, 1.5, 4).view(1, 4, 1)) * self.scale
        return self.head(F.scaled_dot_product_attention(x, x, x).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
    "attention": Attention,
    "linear": lambda: nn.Linear(6, 3),
}


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean() + module(x)[:, 0].mean()


@pytest.mark.parametrize("name", MODELS)
def test_products_are_the_hessian_times_the_direction(name):
    torch.manual_seed(0)
    module, x = MODELS[name]().double(), torch.randn(1, 6, dtype=torch.float64)
    params = list(module.parameters())
    size = sum(p.numel() for p in params)
    direction = torch.randn(size, dtype=torch.float64)

    def gradient(flat: Tensor) -> Tensor:
        named, start = {}, 0
        for key, param in module.named_parameters():
            named[key] = flat[start : start + param.numel()].view_as(param)
            start += param.numel()
        found = torch.func.functional_call(module, named, (x,))
        return found.square().mean() + found[:, 0].mean()

    here = nn.utils.parameters_to_vector(params).detach()
    with sdpa_kernel(SDPBackend.MATH):
        hessian = torch.autograd.functional.hessian(gradient, here)
    first = torch.autograd.grad(loss_of(module, x), params)
    expected = 0.5 * torch.cat([g.flatten() for g in first]) + 2.0 * hessian @ direction
    with RecordPasses(module, params, "one_by_one") as passes:
        terms = (Term(0.5), Term(2.0, direction=direction))
        query = Query(terms, clip_norm=1e9, noise_multiplier=0.0)
        found = passes.answer(query, Replay(lambda b: loss_of(module, b), x, 1))
    torch.testing.assert_close(found.value, expected)


def test_gradients_of_all_types_and_shapes_are_one_row():
    """Sparse, unused, scalar and half-precision parameters."""
    torch.manual_seed(0)
    sparse, unused = nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2)
    half, scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.tensor(2.0))
    params = [*sparse.parameters(), *unused.parameters(), half, scale]
    engine = OneByOne()
    engine.attach(nn.Module(), params)
    engine.backward((sparse(torch.tensor([[3]])) * half * scale).sum())
    gradients = engine.take(1.0, {})
    row = gradients.weighted_sum(torch.ones(1))
    assert gradients.count == 1 and row.dtype == torch.float32
    dense = torch.zeros(5, 2)
    dense[3] = 2.0
    assert torch.equal(row[:10], dense.flatten()) and not row[10:16].any()
    torch.testing.assert_close(row[18], sparse.weight[3].sum().detach())


def test_raw_gradients_reach_nobody():
    module = MODELS["mlp"]()
    with RecordPasses(module, list(module.parameters()), "one_by_one") as passes:
        passes.run(lambda b: loss_of(module, b), torch.ones(1, 6), 1)
    assert all(param.grad is None for param in module.parameters())


def test_nothing_is_taken_without_a_backward_pass():
    engine = OneByOne()
    engine.attach(nn.Module(), list(nn.Linear(2, 2).parameters()))
    with pytest.raises(UnsupportedModelError, match="no backward pass"):
        engine.take(1.0, {})


def test_a_seed_makes_random_states_and_leaves_those_of_now():
    device = torch.device("cpu")
    before = torch.get_rng_state()
    seeded = [RandomState.seeded(device, 3), RandomState.seeded(device, 3)]
    assert torch.equal(torch.get_rng_state(), before)
    drawn = []
    for state in seeded:
        with state.again():
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), before)
