"""Where functions put the records, in shapes alone and beside sizes that coincide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_dp.gradients.layouts import Layout, layouts_after, reshaped

N = 4
FIRST = Layout(0)

CASES: dict[str, tuple[Callable[..., Tensor], tuple[object, ...], Layout | None]] = {
    "flatten": (torch.flatten, (0, 1), Layout(0, inner=4)),
    "view": (Tensor.view, (4, -1), FIRST),
    "transpose": (torch.transpose, (0, 1), Layout(1)),
    "permute": (torch.permute, ((2, 0, 1),), Layout(1)),
    "repeat": (Tensor.repeat, (2, 1, 1), Layout(0, outer=2)),
    "repeat_interleave": (torch.repeat_interleave, (3, 0), Layout(0, inner=3)),
    "tanh": (torch.tanh, (), FIRST),
    "unsqueeze": (torch.unsqueeze, (0,), Layout(1)),
    "sum over the records": (torch.sum, (0,), None),
    "sum over time": (torch.sum, (1,), FIRST),
    "mean of all": (torch.mean, (), None),
    "one of the records": (torch.select, (0, 1), None),
    "one of the times": (torch.select, (1, 1), FIRST),
}


@pytest.mark.parametrize("name", CASES)
def test_where_the_records_are_afterwards(name):
    """There are as many records as times and as features."""
    function, rest, expected = CASES[name]
    x = torch.randn(N, N, N)
    output = function(x, *rest)
    assert layouts_after(function, (x, *rest), {}, [(x, FIRST)], [output], N) == [expected]


def test_records_that_are_joined_along_their_own_dimension():
    x, y = torch.randn(N, 3), torch.randn(N, 3)
    given = [(x, FIRST), (y, FIRST)]
    joined = layouts_after(torch.cat, ([x, y],), {}, given, [torch.cat([x, y])], N)
    assert joined == [Layout(0, outer=2)]
    beside = layouts_after(torch.cat, ([x, y], 1), {}, given, [torch.cat([x, y], 1)], N)
    assert beside == [FIRST]


@pytest.mark.parametrize(
    ("equation", "expected"),
    [("nij,nkj->ikn", Layout(2)), ("nij,nkj->nik", FIRST), ("nij,nkj->ik", None)],
)
def test_einsum_puts_them_where_its_equation_says(equation, expected):
    x, y = torch.randn(N, N, N), torch.randn(N, N, N)
    output = torch.einsum(equation, x, y)
    args = (equation, x, y)
    given = [(x, FIRST), (y, FIRST)]
    assert layouts_after(torch.einsum, args, {}, given, [output], N) == [expected]


@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("inner", [1, 2, 3])
def test_each_records_entries_come_back_from_a_fold(outer, inner):
    apart = torch.arange(outer * N * inner).view(outer, N, inner)
    folded, layout = apart.flatten(), Layout(0, outer, inner)
    expected = apart.movedim(1, 0).flatten(1)
    assert layout.fits(folded, N) and not layout.fits(folded, N + 1)
    assert torch.equal(layout.records_first(folded, N), expected)
    assert torch.equal(layout.rows_first(folded, N), expected.flatten())


def test_a_reshape_that_mixes_records_has_no_place_for_them():
    assert reshaped(Layout(1), (3, N, 8), (3 * N * 8,), N) == Layout(0, outer=3, inner=8)
    assert reshaped(FIRST, (N, 6), (3, 8), N) is None
