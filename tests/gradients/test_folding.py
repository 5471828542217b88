"""Rows that are not records: every form, summed over the rows of each record, against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import pytest
import torch
from torch import Tensor

from lightning_dp.gradients.batches import RowOwners
from lightning_dp.gradients.bilinear import (
    AbstractForm,
    Convolution,
    Folding,
    Lookup,
    OuterProduct,
    Rows,
    Scale,
    Use,
)
from lightning_dp.gradients.parameter_sum import ParameterGradients

N = 3
RAGGED = torch.tensor([2, 0, 0, 2, 2, 0, 2])  # the record in the middle has no row
FOLDINGS: list[tuple[Folding, list[int]]] = [
    (lambda x: x.view(N, 1, *x.shape[1:]), [0, 1, 2]),
    (lambda x: x.view(N, 2, *x.shape[1:]), [0, 0, 1, 1, 2, 2]),
    (RowOwners(N, RAGGED), RAGGED.tolist()),
]


def uses_of(form: AbstractForm, v: tuple[int, ...], u: tuple[int, ...], rows: int) -> Use:
    values = torch.randn(rows, *v)
    if isinstance(form, Lookup):
        values = torch.randint(form.rows_of_table, (rows, *v))
    return Use(form, values, torch.randn(rows, *u))


def convolution(
    weight: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...], *, groups: int = 1
) -> Callable[[int], Use]:
    ones = (1,) * len(outputs)
    form = Convolution(weight, ones, (0,) * len(ones), ones, groups)
    return partial(uses_of, form, (weight[1] * groups, *inputs), (weight[0], *outputs))


FORMS: dict[str, tuple[tuple[int, ...], Callable[[int], Use]]] = {
    "rows": ((2, 3), lambda rows: Rows.use(torch.randn(rows, 2, 3))),
    "outer product": ((4, 3), partial(uses_of, OuterProduct(), (1, 3), (1, 4))),
    "outer product, wide": ((40, 30), partial(uses_of, OuterProduct(), (2, 30), (2, 40))),
    "outer product, long": ((4, 3), partial(uses_of, OuterProduct(), (40, 3), (40, 4))),
    "lookup": ((5, 4), partial(uses_of, Lookup(5), (6,), (6, 4))),
    "scale": ((4,), partial(uses_of, Scale(()), (4,), (4,))),
    "scale of positions": ((4,), partial(uses_of, Scale((2, 3)), (4, 2, 3), (4, 2, 3))),
    "conv1d": ((4, 2, 3), convolution((4, 2, 3), (7,), (5,))),
    "conv2d, patches": ((4, 2, 3, 3), convolution((4, 2, 3, 3), (6, 6), (4, 4))),
    "conv2d, groups": ((4, 1, 3, 3), convolution((4, 1, 3, 3), (6, 6), (4, 4), groups=2)),
    "conv2d, large maps": ((2, 9, 5, 5), convolution((2, 9, 5, 5), (20, 20), (16, 16))),
    "conv2d, small maps": ((32, 24, 3, 3), convolution((32, 24, 3, 3), (4, 4), (2, 2))),
    "conv3d": ((4, 2, 1, 2, 2), convolution((4, 2, 1, 2, 2), (2, 3, 3), (2, 2, 2))),
}


def slow(use: Use, owners: list[int], shape: tuple[int, ...]) -> Tensor:
    """Row after row in float64, each added to its owner."""
    total = torch.zeros(N, *shape, dtype=torch.float64)
    v = use.v.double() if use.v.is_floating_point() else use.v
    for row, owner in enumerate(owners):
        part = slice(row, row + 1)
        total[owner] += use.form.rows(v[part], use.u.double()[part])[0]
    return total


def check(gradients: ParameterGradients, expected: Tensor) -> None:
    flat = expected.flatten(1)
    assert {len(use.u) for use in gradients.uses} == {N}
    places = torch.tensor([0, flat.shape[1] - 1, 2])
    found = gradients.entries(places).double()
    torch.testing.assert_close(found, flat[:, places], rtol=1e-4, atol=1e-5)
    norms = flat.norm(dim=1)
    torch.testing.assert_close(gradients.squared_norms().sqrt(), norms, rtol=2e-4, atol=1e-5)
    weights = torch.tensor([0.5, -1.0, 2.0])
    total = torch.ones(flat.shape[1], dtype=torch.float64)
    gradients.add_weighted_sum(weights, total)
    wanted = weights.double() @ flat
    assert (total - 1 - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_record_are_summed_before_the_norm(form):
    """Also where uses with other numbers of rows are one gradient."""
    torch.manual_seed(0)
    shape, make = FORMS[form]
    for pairs in (*([each] for each in FOLDINGS), FOLDINGS):
        uses = [(make(len(owners)), of, owners) for of, owners in pairs]
        parts = [use.form.of_records(use, of) for use, of, _ in uses]
        expected = reduce(torch.add, (slow(use, owners, shape) for use, _, owners in uses))
        check(ParameterGradients(parts, torch.Size(shape)), expected)
        added = ParameterGradients([], torch.Size(shape))
        for part in parts:
            added.add(part, combined=False)
        check(added, expected)


def moved(part: Tensor) -> Tensor:
    """A factor of a point that is 1e-4 away, where squares that are subtracted have lost all digits."""
    return part * (1 + 1e-4 * torch.randn(part.shape)) if part.is_floating_point() else part


def check_difference(here: Use, there: Use, of: Folding, shape: tuple[int, ...]) -> None:
    """Norms and sum of a difference are those of float64 from the same inputs, to its own digits."""

    def found(use: Use) -> ParameterGradients:
        return ParameterGradients([use.form.of_records(use, of)], torch.Size(shape))

    def exact(use: Use) -> Tensor:
        v = use.v.double() if use.v.is_floating_point() else use.v
        wide = use.form.of_records(Use(use.form, v, use.u.double()), of)
        return wide.form.rows(wide.v, wide.u).flatten(1)

    rows = exact(here) - exact(there)
    both = found(here).combine(1.0, [(-1.0, found(there))])
    torch.testing.assert_close(
        both.squared_norms(), rows.norm(dim=1).square(), rtol=2e-4, atol=1e-30
    )
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    both.add_weighted_sum(torch.ones(len(rows), dtype=torch.float64), total)
    assert (total - rows.sum(0)).norm() <= 1e-5 * rows.sum(0).norm()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "rows"])
def test_differences_of_close_points_keep_their_digits(form):
    torch.manual_seed(0)
    shape, make = FORMS[form]
    for of, owners in FOLDINGS:
        use = make(len(owners))
        check_difference(use, Use(use.form, moved(use.v), moved(use.u)), of, shape)


@pytest.mark.parametrize("changed", [0, 2, 12])
def test_differences_of_lookups_hold_whichever_rows_they_look_up(changed):
    """Equal rows must not be subtracted as squares; other rows must not be mixed up."""
    torch.manual_seed(0)
    here = uses_of(Lookup(5), (12,), (12, 3), N)
    v = here.v.clone()
    v[:, :changed] = (v[:, :changed] + 1) % 5
    check_difference(here, Use(here.form, v, moved(here.u)), FOLDINGS[0][0], (5, 3))


def test_no_record_at_all():
    use = Use(OuterProduct(), torch.ones(0, 2, 3), torch.ones(0, 2, 4))
    part = use.form.of_records(use, RowOwners(0, torch.tensor([]).long()))
    assert part.form.rows(part.v, part.u).shape == (0, 4, 3)
