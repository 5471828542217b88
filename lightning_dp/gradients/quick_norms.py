"""Norms that are known from those of a few matrices, which are looked at once for all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce

import torch
from torch import Tensor

from lightning_dp.functional import are_trusted, as_rows, quick_squares
from lightning_dp.gradients.parameter_gradients import ParameterGradients

__all__ = ["squared_norms_of_all"]


def squared_norms_of_all(gradients: Sequence[ParameterGradients]) -> Tensor:
    """Return the squared norm of each record's gradient over several parameters, shape (n,), float64.

    Where a parameter's norm is a product of those of a few matrices, whether they came out right is
    looked up for all of them together. Where not, and for all others, each parameter tells its own.
    """
    matrices = _Matrices()
    noted = [(each, matrices.places(each.factors())) for each in gradients]
    matrices.look()
    quick, squares = list[tuple[int, ...]](), list[Tensor]()
    for each, places in noted:
        if matrices.are_right(places):
            quick.append(places)
        else:
            squares.append(each.squared_norms())
    if quick:
        squares.append(matrices.sum_of_products(quick))
    return reduce(torch.add, squares)


class _Matrices:
    """Matrices, each of which is held once, and the squared norms of their rows."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []  # so that no other one comes to stand in the same memory
        self._places: dict[tuple[object, ...], int] = {}
        self._right: list[bool] = []

    def places(self, factors: Sequence[Tensor]) -> tuple[int, ...]:
        """Return the places of some matrices, noting those that are new.

        Nothing if they are not all float32 on the CPU.
        """
        found = []
        for each in factors:
            if each.dtype != torch.float32 or not each.is_cpu:
                return ()
            rows = as_rows(each)
            key = rows.data_ptr(), rows.shape, rows.stride()
            if (place := self._places.get(key)) is None:
                self._places[key] = place = len(self._held)
                self._held.append(rows)
            found.append(place)
        return tuple(found)

    def look(self) -> None:
        """Compute the norms, and look up which are right."""
        if self._held:
            self._squares = quick_squares(self._held)
            self._right = are_trusted(self._squares, [rows.shape[1] for rows in self._held])

    def are_right(self, places: Sequence[int]) -> bool:
        """Tell whether there are places, and the norms there are right."""
        return bool(places) and all(map(self._right.__getitem__, places))

    def sum_of_products(self, places: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the sum of the products of the squared norms at the places of each parameter."""
        most, one = max(map(len, places)), len(self._held)  # where there is none, a column of ones
        chosen = _flat_places(tuple([(*each, *[one] * (most - len(each))) for each in places]))
        factors = self._squares.index_select(1, chosen).view(-1, len(places), most)
        return factors.prod(2).sum(1) if most > 1 else factors.flatten(1).sum(1)


@lru_cache(maxsize=64)
def _flat_places(places: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return places as a tensor: the same ones in every step of a model."""
    return torch.tensor(places).flatten()
