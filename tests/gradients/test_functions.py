"""The table of functions: the uses of each against torch.func, by the very arguments of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from lightning_dp.gradients.bilinear import Uses, uses_of_records
from lightning_dp.gradients.parameter_sum import BookkeptGradients, ParameterGradients
from lightning_dp.gradients.rules import BY_POSITION, FUNCTIONS, linear

N, B = 4, 2

# name: (function of activations x, weight w and bias b, shapes of x without records, of w, of b)
CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda f, x, w, b: f(x, w, b), (B, 3, 5), (4, 5), (4,)),
    "linear by name": (lambda f, x, w, b: f(input=x, bias=b, weight=w), (5,), (4, 5), (4,)),
    "addmm": (lambda f, x, w, b: f(b, x, w), (3, 5), (5, 4), (4,)),
    "mm": (lambda f, x, w, b: f(x, w), (3, 5), (5, 4), (4,)),
    "matmul": (lambda f, x, w, b: f(x, w), (B, 3, 5), (5, 4), (4,)),
    "__matmul__": (lambda f, x, w, b: f(x, w), (5,), (5, 4), (4,)),
    "embedding": (lambda f, x, w, b: f(x, w, padding_idx=-3), (B, 6), (7, 3), (1,)),
    "conv1d": (lambda f, x, w, b: f(x, w, b, 2, padding=1), (B, 4, 9), (6, 2, 3), (6,)),
    "conv2d": (lambda f, x, w, b: f(x, w, b, (1, 2), [1]), (B, 3, 7, 6), (5, 3, 3, 2), (5,)),
    "conv2d same": (
        lambda f, x, w, b: f(x, w, b, padding="same"),
        (B, 3, 6, 6),
        (5, 3, 2, 3),
        (5,),
    ),
    "conv3d": (lambda f, x, w, b: f(x, w, b), (B, 2, 3, 4, 4), (3, 2, 2, 2, 2), (3,)),
    "layer_norm": (lambda f, x, w, b: f(x, (3, 5), w, b), (B, 2, 3, 5), (3, 5), (3, 5)),
    "rms_norm": (lambda f, x, w, b: f(x, [5], weight=w), (B, 3, 5), (5,), (5,)),
    "group_norm": (lambda f, x, w, b: f(x, 2, w, b, 1e-3), (B, 4, 5), (4,), (4,)),
    "instance_norm": (lambda f, x, w, b: f(x, weight=w, bias=b), (B, 4, 5, 3), (4,), (4,)),
}


def function(case: str) -> Callable[..., Tensor]:
    name = case.split()[0]
    found = [getattr(part, name, None) for part in (F, torch, Tensor)]
    return next(each for each in found if each is not None)


def gradients(case: str) -> tuple[list[tuple[Tensor, list[Any]]], dict[int, Tensor]]:
    """The uses of each parameter, and each record's gradient of it by torch.func, in float64."""
    torch.manual_seed(0)
    call, shape, of_weight, of_bias = CASES[case]
    f, name = function(case), case.split()[0]
    w, b = (torch.randn(each, dtype=torch.float64) for each in (of_weight, of_bias))
    x = torch.randn(N, *shape, dtype=torch.float64)
    if name == "embedding":
        x = torch.randint(7, (N, *shape))
    groups = 2 if name == "conv1d" else None
    run = (lambda *a, **k: f(*a, groups=2, **k)) if groups else f
    entry = FUNCTIONS[name]
    use = call((lambda *a, **k: entry(*a, groups=2, **k)) if groups else entry, x[0], w, b)
    assert use is not None and use.input is not None
    out = vmap(lambda one: call(run, one, w, b))(x)
    u = torch.randn_like(out)
    if use.rule in BY_POSITION:
        uses: Uses = use.rule(use.layer, x, u)
    else:
        rows = use.rule(use.layer, x.flatten(0, 1), u.flatten(0, 1))
        uses = uses_of_records(rows, lambda y: y.view(N, B, *y.shape[1:]))

    def product(w: Tensor, b: Tensor, one: Tensor, back: Tensor) -> Tensor:
        return (call(run, one, w, b) * back).sum()

    exact = vmap(grad(product, (0, 1)), (None, None, 0, 0))(w, b, x, u)
    params = {id(part): part for part, _ in uses if part is not None}
    listed = [(p, [each for q, each in uses if q is p]) for p in params.values()]
    return listed, {id(w): exact[0], id(b): exact[1]}


@pytest.mark.parametrize("case", CASES)
def test_the_uses_of_a_function_are_the_gradients_of_torch_func(case):
    """Also those of some records only."""
    listed, exact = gradients(case)
    assert listed
    for param, uses in listed:
        found = reduce(torch.add, (each.form.rows(each.v, each.u) for each in uses))
        torch.testing.assert_close(found.reshape(N, *param.shape), exact[id(param)])
        norms = ParameterGradients(uses, param.shape).squared_norms()
        torch.testing.assert_close(norms, exact[id(param)].flatten(1).square().sum(1))
    parts = [ParameterGradients(uses, param.shape) for param, uses in listed]
    whole, some = BookkeptGradients([p for p, _ in listed], parts, 0.5), torch.tensor([2, 0])
    part, weights = whole.of(some), torch.tensor([0.3, -2.0], dtype=torch.float64)
    assert part.count == 2
    torch.testing.assert_close(part.norms(), whole.norms()[some])
    spread = torch.zeros(N, dtype=torch.float64).index_put((some,), weights)
    torch.testing.assert_close(part.weighted_sum(weights), whole.weighted_sum(spread))


X, W, TABLE = torch.ones(2, 5), torch.ones(4, 5), torch.ones(7, 3)
TOKENS = torch.zeros(2, 3, dtype=torch.long)


def test_where_no_rule_holds_there_is_none():
    for name, args, kwargs in (
        ("linear", (X, W[0]), {}),
        ("linear", (X, W, torch.ones(1)), {}),
        ("linear", (X.to(torch.cfloat), W.to(torch.cfloat)), {}),
        ("addmm", (torch.ones(2, 4), X, W.T), {}),
        ("addmm", (torch.ones(4), X, W.T), {"beta": 2}),
        ("mm", (X, W.T), {"out": torch.empty(2, 4)}),
        ("addmm", (), {"input": torch.ones(4), "mat1": X, "mat2": W.T}),  # other names of torch's
        ("matmul", (X, W[0]), {}),
        ("embedding", (TOKENS, TABLE), {"max_norm": 1.0}),
        ("embedding", (TOKENS, TABLE), {"scale_grad_by_freq": True}),
        ("embedding", (TOKENS, TABLE), {"sparse": True}),
        ("embedding", (TABLE, TOKENS), {}),  # torch.embedding has the table first
        ("layer_norm", (X, (5,)), {}),
        ("rms_norm", (X, (5,)), {}),
        ("group_norm", (X, 1), {}),
        ("instance_norm", (X, torch.ones(5), torch.ones(5), W[0]), {}),
        ("instance_norm", (X, None, None, W[0], None, False), {}),
    ):
        assert FUNCTIONS[name](*args, **kwargs) is None


def test_the_rules_are_those_of_the_layers():
    use = FUNCTIONS["linear"](X, weight=W)
    assert use is not None and use.rule is linear and use.layer.weight is W and use.input is X
