"""The forms of linear layers, embeddings and norm layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dp.functional import (
    block_norms,
    factor_norms,
    squares_of_blocks,
)
from lightning_dp.gradients.bilinear import (
    PRODUCTS,
    AbstractFolding,
    AbstractForm,
    Rows,
    Scaled,
    Use,
    above_what_vanishes,
    joined_positions,
    joined_rows,
    sum_of_products,
)

__all__ = ["Lookup", "OuterProduct", "Scale"]


_CACHED_BYTES = 1 << 20
_LONG = 32  # positions from which on matrix products, not memory, are what rows cost


@dataclass(frozen=True)
class OuterProduct(AbstractForm):
    """Σ_t u_it v_itᵀ for v of shape (n, T, in) and u of shape (n, T, out)."""

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        return torch.bmm(u.transpose(1, 2), v)

    def writes_out(self, v: Tensor, u: Tensor) -> bool:
        return True

    def put(self, v: Tensor, u: Tensor, out: Tensor) -> Use:
        rows = out.view(len(u), u.shape[2], v.shape[2])
        return Rows.use(torch.bmm(u.transpose(1, 2), v, out=rows))

    def put_and_square(self, v: Tensor, u: Tensor, out: Tensor) -> tuple[Use, Tensor]:
        if out.device.type != "cpu" or out.dtype != torch.float32 or not len(v):
            return super().put_and_square(v, u, out)
        rows = out.view(len(u), u.shape[2], v.shape[2])
        size = max(1, _CACHED_BYTES // rows[:1].nbytes)  # looked at while they are in the cache
        parts = zip(*(torch.split(each, size) for each in (v, u, rows)), strict=True)
        made = (torch.bmm(y.transpose(1, 2), x, out=part) for x, y, part in parts)
        norms = torch.cat([block_norms(each.flatten(1)) for each in made])
        return Rows.use(rows), squares_of_blocks(norms, rows.flatten(1))

    def prefers_rows(self, v: Tensor, u: Tensor) -> bool:
        times, rows, columns = u.shape[1], u.shape[2], v.shape[2]
        # Of rows twice as large as v and u, inner products take less than half of the work.
        return times >= _LONG and 2 * times * (rows + columns) > rows * columns

    def joined(self, uses: Sequence[Use]) -> list[Use]:
        """Return one use with the positions of all of them, the time steps of a recurrent layer."""
        return [joined_positions(uses)]

    def of_records(self, use: Use, folding: AbstractFolding) -> list[Use]:
        return [joined_rows(use, folding)]

    def entries(self, v: Tensor, u: Tensor, shape: torch.Size, places: Tensor) -> Tensor:
        times, (row, column) = v.shape[1], (places // shape[1], places % shape[1])
        if not 0 < times * len(places) <= shape.numel():
            return super().entries(v, u, shape, places)  # all of them are no more work
        total = u[:, 0].index_select(1, row).mul_(v[:, 0].index_select(1, column))
        for t in range(1, times):
            total.addcmul_(u[:, t].index_select(1, row), v[:, t].index_select(1, column))
        return total

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        v, u = _scaled(v, u, weights)
        return u.T @ v

    def add_weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor, onto: Tensor) -> None:
        if onto.dtype != u.dtype or onto.dtype != v.dtype:
            super().add_weighted_sum(v, u, weights, onto)
            return
        v, u = _scaled(v, u, weights)
        onto.view(u.shape[1], v.shape[1]).addmm_(u.T, v)

    def put_weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor, into: Tensor) -> None:
        if into.dtype != u.dtype or into.dtype != v.dtype:
            super().put_weighted_sum(v, u, weights, into)
            return
        v, u = _scaled(v, u, weights)
        torch.mm(u.T, v, out=into.view(u.shape[1], v.shape[1]))

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        norms = factor_norms(v.flatten(0, 1)) * factor_norms(u.flatten(0, 1))
        return norms.view(u.shape[:2]).sum(1)

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        """Return squared norms from the T x T inner products of the vectors, if these are fewer.

        ‖Σ_s u_s v_sᵀ‖² = Σ_st (u_s · u_t)(v_s · v_t).
        """
        (use,) = uses
        u, v = use.u, use.v
        times, rows, columns = u.shape[1], u.shape[2], v.shape[2]
        if times == 0:
            return u.new_zeros(len(u), dtype=torch.float64)
        if times == 1:
            return (factor_norms(u) * factor_norms(v)).square_()
        if times * (rows + columns) > 2 * rows * columns or (may_keep and self.prefers_rows(v, u)):
            return None  # the rows cost no more, and if they are kept the sum is almost free
        size = max(1, PRODUCTS // max(1, times**2))
        if size >= len(u):
            return _squares_of_products(_products(u), _products(v))
        norms = [
            _squares_of_products(_products(y), _products(x))
            for y, x in zip(torch.split(u, size), torch.split(v, size), strict=True)
        ]
        return torch.cat(norms)


def _scaled(v: Tensor, u: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as matrices of all positions, the narrower one times the weights of the records."""
    weights = weights.view(-1, 1, 1)
    v, u = (v * weights, u) if v.shape[2] < u.shape[2] else (v, u * weights)
    return v.flatten(0, 1), u.flatten(0, 1)


def _products(factor: Tensor) -> tuple[Scaled, Tensor]:
    """Return a factor in range, and the (T, T) inner products of its vectors."""
    scaled = Scaled.of(factor)
    return scaled, torch.bmm(scaled.tensor, scaled.tensor.transpose(1, 2))


def _squares_of_products(of_u: tuple[Scaled, Tensor], of_v: tuple[Scaled, Tensor]) -> Tensor:
    (a, left), (b, right) = of_u, of_v
    squares = sum_of_products(left * right)
    return above_what_vanishes(squares * (a.units * b.units).square_(), a, b)


@dataclass(frozen=True)
class Lookup(AbstractForm):
    """Row r: Σ over t with v_it = r of u_it, for v of shape (n, T) and u of shape (n, T, width)."""

    rows_of_table: int

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        table = u.new_zeros(len(u), self.rows_of_table, u.shape[2])
        return table.scatter_add_(1, v.unsqueeze(2).expand_as(u), u)

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        table = u.new_zeros(self.rows_of_table * u.shape[2])
        self.add_weighted_sum(v, u, weights, table)
        return table

    def add_weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor, onto: Tensor) -> None:
        scaled = (u * weights.view(-1, 1, 1)).to(onto.dtype)
        onto.view(self.rows_of_table, -1).index_add_(0, v.flatten(), scaled.flatten(0, 1))

    def both(self, here: Use, there: Use) -> list[Use]:
        """Count a position that looks up the same row at both points once, with the sum of its u."""
        moved = (here.v != there.v).unsqueeze(2)
        own = here.u.masked_fill(~moved, 0.0)
        return [replace(here, u=own), replace(there, u=there.u + here.u.masked_fill(moved, 0.0))]

    def joined(self, uses: Sequence[Use]) -> list[Use]:
        return [joined_positions(uses)]

    def of_records(self, use: Use, folding: AbstractFolding) -> list[Use]:
        return [joined_rows(use, folding)]

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        return factor_norms(u) * math.sqrt(u.shape[1])

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        """Return Σ over positions s, t of equal rows of u_s · u_t: nothing of the table's size."""
        (use,) = uses
        v, u = use.v, use.u
        if v.shape[1] == 0:
            return u.new_zeros(len(u), dtype=torch.float64)
        size = max(1, PRODUCTS // v.shape[1] ** 2)
        norms = [
            _squares_of_lookup(*part)
            for part in zip(torch.split(u, size), torch.split(v, size), strict=True)
        ]
        return torch.cat(norms)


def _squares_of_lookup(u: Tensor, v: Tensor) -> Tensor:
    scaled = Scaled.of(u)
    products = torch.bmm(scaled.tensor, scaled.tensor.transpose(1, 2))
    products.masked_fill_(v.unsqueeze(2) != v.unsqueeze(1), 0.0)
    return above_what_vanishes(sum_of_products(products) * scaled.units.square(), scaled)


_SLICE_ENTRIES = 1 << 17


@dataclass(frozen=True)
class Scale(AbstractForm):
    """Σ_t v_it u_it, entry by entry, over all dimensions that the parameter does not have.

    Args:
        sum_over: those dimensions; the first one, of the records, is not among them.
    """

    sum_over: tuple[int, ...]

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        if not self.sum_over:
            return v * u
        if v.device.type == "cpu" and self.sum_over == tuple(range(2, v.dim())) and v.numel():
            return _sums_of_products(v, u)
        size = max(1, _SLICE_ENTRIES // (u[:1].numel() or 1))  # products that stay in the cache
        parts = zip(torch.split(v, size), torch.split(u, size), strict=True)
        return torch.cat([(a * b).sum(self.sum_over) for a, b in parts])

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        total: Tensor = torch.tensordot(weights, self.rows(v, u), dims=1)
        return total

    def of_records(self, use: Use, folding: AbstractFolding) -> list[Use]:
        form = Scale((1, *(dimension + 1 for dimension in self.sum_over)))
        return [Use(form, folding.apart(use.v), folding.apart(use.u))]


def _sums_of_products(v: Tensor, u: Tensor) -> Tensor:
    """Return Σ_t v_ict u_ict for tensors of shape (n, channels, *size), without writing products down.

    The gradient of a norm layer's weight, where each channel of each record is a channel with its own
    group, of mean 0 and deviation 1.
    """
    shape, channels = v.shape[:2], v.shape[:2].numel()
    v, u = v.reshape(1, channels, -1), u.reshape(1, channels, -1)
    one = v.new_ones(channels)
    sums: Tensor = torch.ops.aten.native_group_norm_backward(
        u,
        v,
        torch.zeros_like(one),
        one,
        one,
        1,
        channels,
        v.shape[2],
        channels,
        [False, True, False],
    )[1]
    return sums.view(shape)
