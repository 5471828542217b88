"""Calls of one linear layer for each time step, joined to one call, against records one by one."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import time_steps
from lightning_dp.gradients.bookkeeping import Bookkeeping
from lightning_dp.gradients.matrices import OuterProduct
from lightning_dp.gradients.parameter_sum import BookkeptGradients

N = 5


class Steps(nn.Module):
    """A recurrence of two linear layers, both of which see the same gradient at each step."""

    def __init__(self, steps: int, inputs: int = 3, width: int = 4) -> None:
        super().__init__()
        self.steps, self.ih, self.hh = steps, nn.Linear(inputs, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.hh.in_features)
        for t in range(self.steps):
            state = torch.tanh(self.ih(x[:, t]) + self.hh(state))
        return self.head(state)


def taken(module: nn.Module, engine: Bookkeeping, x: Tensor, combined: bool) -> BookkeptGradients:
    engine.backward(module(x).square().sum(1).mean(), combined=combined)
    return engine.take(1.0, {})


def one_by_one(module: nn.Module, x: Tensor) -> Tensor:
    """Each record's gradient, as a row."""
    rows = []
    for i in range(len(x)):
        loss = module(x[i : i + 1]).square().sum(1).mean()
        found = torch.autograd.grad(loss, list(module.parameters()))
        rows.append(torch.cat([part.flatten() for part in found]))
    return torch.stack(rows)


@pytest.fixture(params=[3, 40], ids=["few steps", "many steps"])
def case(request):
    torch.manual_seed(0)
    module = Steps(request.param)
    engine = Bookkeeping()
    engine.attach(module, tuple(module.parameters()))
    return module, engine, torch.randn(N, request.param, 3)


def test_norms_and_sums_are_those_of_each_record(case):
    module, engine, x = case
    found = taken(module, engine, x, combined=False)
    engine.rest()
    rows = one_by_one(module, x)
    torch.testing.assert_close(found.norms(), rows.norm(dim=1).double(), rtol=1e-5, atol=0)
    clipped = rows * (0.3 / rows.norm(dim=1)).clamp(max=1).unsqueeze(1)
    torch.testing.assert_close(bounded_sum(found, 0.3).value, clipped.sum(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("combined", [False, True])
def test_a_second_pass_leaves_what_the_first_one_holds(case, combined):
    module, engine, x = case
    first = taken(module, engine, x, combined)
    second = taken(module, engine, x.flip(0), combined)
    engine.rest()
    rows = one_by_one(module, x)
    for found, right in ((first, rows), (second, rows.flip(0))):
        torch.testing.assert_close(found.norms(), right.norm(dim=1).double(), rtol=1e-5, atol=0)
        total = found.weighted_sum(torch.ones(N, dtype=torch.float64))
        torch.testing.assert_close(total, right.sum(0), rtol=1e-4, atol=1e-6)


def test_gradients_that_two_layers_are_handed_are_joined_once(case, monkeypatch):
    module, engine, x = case
    joined = []
    stacked = time_steps._stacked
    monkeypatch.setattr(
        time_steps, "_stacked", lambda parts: joined.append(len(parts)) or stacked(parts)
    )
    taken(module, engine, x, combined=False)
    assert joined == [module.steps] * 3  # two inputs, one gradient


@pytest.mark.parametrize("count", [2, 8, 21])
def test_steps_are_stacked_and_let_go(count):
    steps = [torch.randn(3, 5) for _ in range(count)]
    expected, first = torch.stack(steps, dim=1), weakref.ref(steps[0])
    assert torch.equal(time_steps._stacked(steps), expected)
    assert steps == [] and first() is None


@pytest.mark.parametrize(("width", "is_made"), [(30, True), (36, False)])
def test_rows_much_larger_than_what_they_are_made_from_are_not_kept(width, is_made):
    """Of 32 positions, rows of (128, 128) are twice as large as v and u."""
    v = u = torch.zeros(2, 32, 4 * width)
    assert OuterProduct().prefers_rows(v, u) is is_made


def test_a_detached_engine_holds_nothing_of_a_forward_pass():
    layer, engine = nn.Linear(3, 2), Bookkeeping()
    engine.attach(layer, tuple(layer.parameters()))
    layer(torch.ones(4, 3))
    recorder = engine._attached
    assert recorder.outputs()
    engine.detach()
    assert not recorder.outputs()
