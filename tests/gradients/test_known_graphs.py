"""Graphs that are made alike: what is remembered of one holds for the next, and nothing else does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.gradients.known_graphs import Graph, KnownGraphs
from lightning_dp.gradients.loss_graph import CoupledLossError, check_graph

Loss = Callable[[Tensor], Tensor]


class _Model:
    """Two layers, of which graphs are made again and again."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.graphs = KnownGraphs()

    def graph(self, n: int, of: Loss) -> Graph:
        hidden = self.first(torch.rand(n, 3))
        output = self.second(hidden.relu())
        return self.graphs.graph(of(output).grad_fn, {hidden.grad_fn, output.grad_fn})

    def check(self, n: int, of: Loss) -> None:
        check_graph(self.graph(n, of), n)


def test_a_graph_made_alike_is_known_and_another_one_is_not() -> None:
    model = _Model()
    first, second = (model.graph(n, lambda y: y.pow(2).mean()) for n in (4, 7))
    third = model.graph(4, lambda y: y.exp().mean())
    assert first.known is second.known
    assert first.known is not third.known


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (lambda y: y.sum(1).clamp(max=1.0).mean(), lambda y: y.sum(0).clamp(max=1.0).mean()),
        (lambda y: y.softmax(1).pow(2).mean(), lambda y: y.softmax(0).pow(2).mean()),
        (lambda y: y.T.sum(0).log().sum(), lambda y: y.T.sum(1).log().sum()),
        (
            lambda y: (y.view(-1, 1, 3) * y.view(-1, 1, 3)).sum(),
            lambda y: (y.view(-1, 1, 3) * y.view(1, -1, 3)).sum(),
        ),
        (
            lambda y: y.split(2, 1)[0].exp().sum(1).log().sum(),
            lambda y: y.split(4, 0)[0].exp().sum(0).log().sum(),
        ),
    ],
)
def test_attributes_are_looked_at_again_in_a_known_graph(good: Loss, bad: Loss) -> None:
    model = _Model()
    for n in (5, 8, 5):
        model.check(n, good)
    known = model.graph(5, good).known
    assert known is model.graph(5, bad).known  # so that only the second look can tell them apart
    with pytest.raises(CoupledLossError):
        model.check(5, bad)
    model.check(5, good)


def test_rows_that_were_none_in_a_batch_of_another_size_are_found() -> None:
    model = _Model()
    model.check(2, lambda y: y.reshape(-1)[:3].sum(0, keepdim=True).log().sum())
    with pytest.raises(CoupledLossError):
        model.check(4, lambda y: y.reshape(-1)[:4].sum(0, keepdim=True).log().sum())


def test_other_variables_in_the_same_places_are_another_graph() -> None:
    model = _Model()
    before = model.graph(4, lambda y: y.pow(2).mean())
    model.second = nn.Linear(3, 3)
    after = model.graph(4, lambda y: y.pow(2).mean())
    assert after.known is not before.known


def test_nothing_of_a_graph_is_kept() -> None:
    model = _Model()

    def check() -> weakref.ref[Tensor]:
        data = torch.rand(4, 3, requires_grad=True)
        model.check(4, lambda y: (y * data).exp().mean(0).sum())
        return weakref.ref(data)

    seen = check()
    gc.collect()
    assert seen() is None
