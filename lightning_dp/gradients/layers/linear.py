"""``nn.Linear``, also on sequences: the gradient of the weight is an outer product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_dp.functional import factor_norms
from lightning_dp.gradients.layers.base import (
    PRODUCTS,
    AbstractForm,
    Call,
    Rows,
    Scaled,
    Uses,
    above_what_vanishes,
    joined_positions,
    sum_of_products,
)

__all__ = ["OuterProduct", "linear"]

_LONG = 32  # positions from which on matrix products, not memory, are what rows cost


@dataclass(frozen=True)
class OuterProduct(AbstractForm):
    """Σ_t u_it v_itᵀ for v of shape (n, T, in) and u of shape (n, T, out)."""

    def rows(self, v: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            return torch.bmm(u.transpose(1, 2), v)
        return torch.bmm(u.transpose(1, 2), v, out=out)

    def writes_out(self, v: Tensor, u: Tensor) -> bool:
        return True

    def joined(self, calls: Sequence[Call]) -> list[Call]:
        """One call on the positions of all of them, the time steps of a recurrent layer."""
        return [joined_positions(calls)]

    def entries(self, v: Tensor, u: Tensor, shape: torch.Size, places: Tensor) -> Tensor:
        times, (row, column) = v.shape[1], (places // shape[1], places % shape[1])
        if not 0 < times * len(places) <= shape.numel():
            return super().entries(v, u, shape, places)  # all of them are no more work
        total = u[:, 0].index_select(1, row).mul_(v[:, 0].index_select(1, column))
        for t in range(1, times):
            total.addcmul_(u[:, t].index_select(1, row), v[:, t].index_select(1, column))
        return total

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        scaled = (u * weights.view(-1, 1, 1)).flatten(0, 1)
        return scaled.T @ v.flatten(0, 1)

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        norms = factor_norms(v.flatten(0, 1)) * factor_norms(u.flatten(0, 1))
        return norms.view(u.shape[:2]).sum(1)

    def squared_norms(self, calls: Sequence[Call], *, may_keep: bool) -> Tensor | None:
        """From the T x T inner products of the vectors, if they are fewer than the entries.

        ‖Σ_s u_s v_sᵀ‖² = Σ_st (u_s · u_t)(v_s · v_t).
        """
        (call,) = calls
        u, v = call.u, call.v
        times, rows, columns = u.shape[1], u.shape[2], v.shape[2]
        if times == 1:
            return (factor_norms(u) * factor_norms(v)).square_()
        if times * (rows + columns) > 2 * rows * columns or (times >= _LONG and may_keep):
            return None  # the rows cost no more, and if they are kept the sum is almost free
        size = max(1, PRODUCTS // times**2)
        norms = [
            _squares(*part) for part in zip(torch.split(u, size), torch.split(v, size), strict=True)
        ]
        return torch.cat(norms)


def _squares(u: Tensor, v: Tensor) -> Tensor:
    both = a, b = Scaled.of(u), Scaled.of(v)
    products = [torch.bmm(each.tensor, each.tensor.transpose(1, 2)) for each in both]
    squares = sum_of_products(products[0] * products[1])
    return above_what_vanishes(squares * (a.units * b.units).square_(), a, b)


def linear(layer: nn.Linear, inputs: Tensor, gradient: Tensor) -> Uses:
    """Weight and bias of one call; any dimensions between the first and the last are positions."""
    v = inputs.reshape(len(inputs), -1, inputs.shape[-1])
    u = gradient.reshape(len(gradient), -1, gradient.shape[-1])
    return [(layer.weight, Call(OuterProduct(), v, u)), (layer.bias, Rows.call(u.sum(1)))]
