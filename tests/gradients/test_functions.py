"""The table of functions, by the very arguments of torch: where no rule holds there is none."""

from __future__ import annotations

import torch

from lightning_dp.gradients.rules import FUNCTIONS, linear

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
