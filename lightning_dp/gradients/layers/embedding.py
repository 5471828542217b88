"""``nn.Embedding``: the gradient of a row is the sum over the positions that looked it up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_dp.functional import factor_norms
from lightning_dp.gradients.layers.base import (
    PRODUCTS,
    AbstractForm,
    Call,
    Scaled,
    Uses,
    above_what_vanishes,
    joined_positions,
    sum_of_products,
)

__all__ = ["Lookup", "embedding"]


@dataclass(frozen=True)
class Lookup(AbstractForm):
    """Row r: Σ over t with v_it = r of u_it, for v of shape (n, T) and u of shape (n, T, width)."""

    rows_of_table: int

    def rows(self, v: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        table = u.new_zeros(len(u), self.rows_of_table, u.shape[2])
        return table.scatter_add_(1, v.unsqueeze(2).expand_as(u), u)

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        table = u.new_zeros(self.rows_of_table, u.shape[2])
        scaled = u * weights.view(-1, 1, 1)
        return table.index_add_(0, v.flatten(), scaled.flatten(0, 1))

    def both(self, here: Call, there: Call) -> list[Call]:
        """A position that looks up the same row at both points counts once, with the sum of its u."""
        moved = (here.v != there.v).unsqueeze(2)
        own = here.u.masked_fill(~moved, 0.0)
        return [replace(here, u=own), replace(there, u=there.u + here.u.masked_fill(moved, 0.0))]

    def joined(self, calls: Sequence[Call]) -> list[Call]:
        return [joined_positions(calls)]

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        return factor_norms(u) * math.sqrt(u.shape[1])

    def squared_norms(self, calls: Sequence[Call], *, may_keep: bool) -> Tensor | None:
        """Σ over positions s, t of equal rows of u_s · u_t: nothing of the table's size."""
        (call,) = calls
        v, u = call.v, call.u
        size = max(1, PRODUCTS // v.shape[1] ** 2)
        norms = [
            _squares(*part) for part in zip(torch.split(u, size), torch.split(v, size), strict=True)
        ]
        return torch.cat(norms)


def _squares(u: Tensor, v: Tensor) -> Tensor:
    scaled = Scaled.of(u)
    products = torch.bmm(scaled.tensor, scaled.tensor.transpose(1, 2))
    products.masked_fill_(v.unsqueeze(2) != v.unsqueeze(1), 0.0)
    return above_what_vanishes(sum_of_products(products) * scaled.units.square(), scaled)


def embedding(layer: nn.Embedding, inputs: Tensor, gradient: Tensor) -> Uses:
    """The table of one call."""
    v = inputs.reshape(len(inputs), -1)
    u = gradient.reshape(*v.shape, layer.embedding_dim)
    if layer.padding_idx is not None:
        u = u.masked_fill((v == layer.padding_idx).unsqueeze(2), 0.0)
    return [(layer.weight, Call(Lookup(layer.num_embeddings), v, u))]
