"""Digits and memory of sums that are never formed record by record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients import parameter_sum
from lightning_dp.gradients.bilinear import (
    Lookup,
    OuterProduct,
    Rows,
    Scale,
    Use,
    squares_of_tied,
)
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.parameter_sum import Allowance, ParameterGradients


def test_norms_of_wide_layers_are_not_too_small():
    """float32 row norms are 4e-4 too small at 10 million entries."""
    v, u = torch.full((2, 1, 3_000_000), 0.1), torch.full((2, 1, 3), 0.1)
    gradients = ParameterGradients([Use(OuterProduct(), v, u)], torch.Size((3, 3_000_000)))
    exact = float(v[0].double().norm() * u[0].double().norm()) ** 2
    assert gradients.squared_norms().tolist() == pytest.approx([exact] * 2, rel=1e-6)


def test_memory_does_not_grow_with_the_sizes_of_batches(oracle):
    """Poisson batches differ in size; what is kept is for the largest one."""
    torch.manual_seed(0)
    module = nn.Linear(16, 16)
    engine = LayerCalls(module, oracle.trained(module))
    for size in [5, 9, 3, 7, 8, 9, 2]:
        gradients = oracle.run(engine, module, torch.randn(size, 40, 16))
        expected = sum(use.form.rows(use.v, use.u).sum(0) for use in gradients._gradients[0].uses)
        gradients.norms()
        total = gradients.weighted_sum(torch.ones(size, dtype=torch.float64))
        torch.testing.assert_close(total[:256].view(16, 16), expected * size)
    kept = [tensor for free in engine._memory._free.values() for tensor in free]
    assert [len(tensor) for tensor in kept] in ([], [10])
    pool = ref(engine._memory)
    del engine, gradients
    assert pool() is None  # at once: no circle waits for the collector


def opposite(x: Tensor) -> Tensor:
    """x and -x up to rounding, as two positions."""
    return torch.stack([x, -x * (1 + 1e-7 * torch.randn(x.shape))])[None]


def cancelling(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer, a batch of one record, and weights of its outputs, whose gradient nearly vanishes."""
    ones = torch.ones(1, 2, 4)
    if kind == "sequence":
        return nn.Linear(6, 4, bias=False), opposite(torch.randn(6)), ones
    if kind == "tokens":
        signs = torch.tensor([1.0, -1.0 - 1e-7]).view(1, 2, 1)
        return nn.Embedding(300, 4), torch.tensor([[1, 1]]), ones * signs
    images = opposite(torch.randn(16)).transpose(1, 2)[..., None]
    return nn.Conv2d(16, 16, 1, bias=False), images, torch.ones(1, 16, 2, 1)


@pytest.mark.parametrize("kind", ["sequence", "tokens", "image"])
def test_a_record_whose_large_terms_cancel_stays_within_its_bound(kind):
    """In float32 the square of a norm that is small against its terms has no correct digit."""
    torch.manual_seed(0)
    for _ in range(50):
        layer, batch, weights = cancelling(kind)
        weights = weights * torch.randn(weights.shape[2:])
        if kind == "image":
            weights = torch.randn(1, 16, 1, 1).expand(1, 16, 2, 1)
        check_bound(layer, lambda: (layer(batch) * weights).sum())  # noqa: B023 (called at once)


def check_bound(layer: nn.Module, loss: Callable[[], Tensor], **how: bool) -> None:
    engine = LayerCalls(layer, list(layer.parameters()))
    with engine.watching():
        scaled = 1e9 * loss()
    engine.backward(scaled, **how)
    assert bounded_sum(engine.take(1.0), 1.0).value.norm() <= 1 + 1e-5


def far_apart(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The same with so many positions that rows are made, for a first record of two."""
    if kind == "sequence":
        batch = torch.cat([opposite(torch.randn(6)).repeat(1, 20, 1), torch.randn(1, 40, 6)])
        return nn.Linear(6, 4, bias=False), batch, torch.randn(1, 1, 4).expand(2, 40, 4)
    images, weights = torch.zeros(2, 2, 12, 12), torch.zeros(2, 4, 10, 10)
    patch, back = torch.randn(2, 3, 3), torch.randn(4)
    for place in (0, 4, 8):
        images[0, :, place : place + 3, place : place + 3] = patch
    weights[0, :, 0, 0], weights[0, :, 4, 4] = back, back
    weights[0, :, 8, 8] = -(2 + 2e-7 * torch.randn(())) * back
    return nn.Conv2d(2, 4, 3, bias=False), images, weights


@pytest.mark.parametrize("kind", ["sequence", "image"])
def test_terms_that_cancel_stay_within_the_bound_where_rows_are_not_kept(kind, monkeypatch):
    monkeypatch.setattr(parameter_sum, "_KEEP_BYTES", 0)
    torch.manual_seed(0)
    for _ in range(50):
        layer, batch, weights = far_apart(kind)
        loss = lambda: (layer(batch) * weights)[:1].sum()  # noqa: B023, E731 (called at once)
        check_bound(layer, loss, combined=True)


def test_a_gradient_and_a_product_that_cancel_stay_within_their_bound():
    """Along -x two linear layers have g + H u = 0 up to rounding."""
    torch.manual_seed(0)
    longest = 0.0
    for _ in range(50):
        net = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False))
        params, x, target = list(net.parameters()), torch.randn(1, 6), torch.randn(4)
        engine, u = (
            LayerCalls(net, params),
            torch.cat([param.detach().flatten() for param in params]),
        )
        with engine.watching():
            gradients = engine.along(
                lambda: 1e9 * (net(x) @ target).mean(),  # noqa: B023 (called at once)
                -(1 + 1e-7) * u,
                (1.0, 1.0),
            )
        longest = max(longest, float(bounded_sum(gradients, 1.0).value.norm()))
    assert longest <= 1 + 1e-5


@pytest.mark.parametrize("records", [0, 4])
@pytest.mark.parametrize("kind", ["one position", "positions", "rows", "lookup", "scale"])
def test_a_sum_that_is_put_into_memory_is_that_which_is_added_to_zeros(kind, records):
    """Whatever stood there counts for nothing, NaN too."""
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.randn(records, 3, size, generator=generator) for size in (6, 5))
    use = {
        "one position": Use(OuterProduct(), v[:, :1], u[:, :1]),
        "positions": Use(OuterProduct(), v, u),
        "rows": Rows.use(u),
        "lookup": Use(Lookup(5), v[:, :, 0].abs().long() % 5, u),
        "scale": Use(Scale((1,)), u + 1, u),
    }[kind]
    weights = torch.rand(records, generator=generator)
    size = use.form.rows(use.v, use.u)[:0].flatten(1).shape[1]
    for dtype in (torch.float32, torch.float64):
        added, put = torch.zeros(size, dtype=dtype), torch.full((size,), torch.nan, dtype=dtype)
        for onto, is_new in ((added, False), (put, True)):
            gradients = ParameterGradients([use], torch.Size([size]))
            gradients.add_weighted_sum(weights, onto, is_new=is_new)
        torch.testing.assert_close(put, added)
        assert bool(put.any()) == bool(records)


ROWS, WIDTH, AT = 40, 30, (1, 1, 3, 39)  # of a table, and looked up in it


def tied(records: int, powers: Sequence[int] = (0, 0, 0)) -> list[Use]:
    """Uses of a table that is a layer, too, with factors of these powers of ten."""
    shapes = (records, 3, WIDTH), (records, 3, ROWS), (records, len(AT), WIDTH)
    v, u, w = (torch.randn(s) * 10.0**k for s, k in zip(shapes, powers, strict=True))
    at = torch.tensor(AT).expand(records, -1)
    return [Use(OuterProduct(), v, u), Use(Lookup(ROWS), at, w)]


def tied_rows(uses: Sequence[Use]) -> Tensor:
    doubles = [each.to(torch.float64) for each in uses]
    return reduce(torch.add, (each.form.rows(each.v, each.u) for each in doubles)).flatten(1)


@pytest.mark.parametrize(
    "powers", [(0, 0, 0), (8, -8, 1), (-25, 5, -19), (15, 16, 30), (0, -30, 0)]
)
def test_a_tied_table_has_the_norms_of_its_rows(powers):
    """With none of the rows made: from inner products of positions, of the layer and of the table."""
    torch.manual_seed(0)
    uses = tied(5, powers)
    found = ParameterGradients(uses, torch.Size((ROWS, WIDTH)), None, Allowance(0)).squared_norms()
    torch.testing.assert_close(found, tied_rows(uses).square().sum(1), rtol=1e-4, atol=0.0)
    made = squares_of_tied(uses[::-1], may_keep=False)  # in either order
    torch.testing.assert_close(made, found, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("power", [-12, 0, 12])
def test_a_tied_table_whose_uses_cancel_stays_within_its_bound(power):
    """Norms of rows from which a look-up takes all that the layer gives them, up to rounding."""
    torch.manual_seed(0)
    layer, table = tied(50, (0, power, power))
    one_hot = torch.zeros_like(layer.u).index_fill_(2, torch.tensor(AT[2:]), 10.0**power)
    at = torch.tensor(AT[2:]).expand(50, -1)
    w = -layer.v.sum(1, keepdim=True).expand(-1, 2, -1) * 10.0**power * (1 + 1e-7)
    uses = [replace(layer, u=one_hot), replace(table, v=at, u=w.contiguous())]
    squares = squares_of_tied(uses, may_keep=False)
    assert (squares >= tied_rows(uses).square().sum(1)).all()
    # As long as rounding may be, of the terms' length: 5e-4 of it, by no means its own.
    terms = sum(each.form.lengths(each.v, each.u) for each in uses)
    assert (squares.sqrt() <= 3e-3 * terms).all()


@pytest.mark.parametrize("left", [5e-4, 1e-3, 2e-3, 3e-3, 5e-3, 0.01])
@pytest.mark.parametrize("width", [64, 20001])
def test_no_record_is_longer_than_its_norm_where_terms_cancel_in_part(left, width):
    """Norms of so small a part of the terms that it is about as large as their rounding.

    Wide vectors have equal entries, whose rounding errors do not cancel.
    """
    torch.manual_seed(0)
    n, rows = 300 if width == 64 else 20, 100
    at = torch.randint(rows, (n, 1))
    one_hot = F.one_hot(at, rows).float()
    u, (v, w) = torch.randn(n, 1, rows), torch.randn(2, n, 1, width if width == 64 else 1)
    v, w = (each.repeat(1, 1, width // each.shape[2]) for each in (v, w))
    near_v, near_w = (-(each + left * torch.randn(each.shape)) for each in (v, w))
    layer = Use(OuterProduct(), torch.cat([v, near_v], 1), torch.cat([u, u], 1))
    table = Use(Lookup(rows), torch.cat([at, at], 1), torch.cat([w, near_w], 1))
    tied = [Use(OuterProduct(), near_w, one_hot), Use(Lookup(rows), at, w)]
    for uses, found in (
        ([layer], layer.form.squares(layer.v, layer.u)),
        ([table], table.form.squares(table.v, table.u)),
        (tied, squares_of_tied(tied, may_keep=False)),
    ):
        assert (tied_rows(uses).square().sum(1) <= found * (1 + 1e-6)).all()


def test_a_layer_without_positions_leaves_a_tied_table_its_own_norms():
    layer, table = tied(2)
    uses = [layer, replace(table, v=table.v[:, :0], u=table.u[:, :0])]
    none = replace(layer, v=layer.v[:, :0], u=layer.u[:, :0])
    for each in (uses, [none, table]):
        made = ParameterGradients(each, torch.Size((ROWS, WIDTH)), None, Allowance(0))
        torch.testing.assert_close(
            made.squared_norms(), tied_rows(each).square().sum(1), rtol=1e-5, atol=0.0
        )


def test_uses_that_are_not_a_layer_and_a_table_have_no_such_norms():
    layer, table = tied(2)
    assert squares_of_tied([layer, Rows.use(torch.randn(2, ROWS, WIDTH))], may_keep=False) is None
    assert squares_of_tied([layer, table, layer], may_keep=False) is None
    wide = replace(
        layer, v=layer.v.repeat(1, 40, 1), u=layer.u.repeat(1, 40, 1)
    )  # rows are cheaper
    assert squares_of_tied([wide, table], may_keep=False) is None
