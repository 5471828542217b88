"""Gradients of linear layers, an outer product for each record and layer: none is ever formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp.gradients.base import AbstractPerSampleGradients


@dataclass(frozen=True)
class Outer:
    """Record i has the matrix Σ_k left_k[:, i] right_k[:, i]ᵀ.

    Args:
        terms: pairs (left, right) of matrices with one column per record.
        squares: ‖right[:, i]‖² of a lone term, where it is known.
    """

    terms: tuple[tuple[Tensor, Tensor], ...]
    squares: Tensor | None = None

    def square_norms(self) -> Tensor:
        """Σ_kl (left_k · left_l)(right_k · right_l) of each record."""
        if self.squares is not None:
            return column_squares(self.terms[0][0]) * self.squares
        total = torch.zeros(())
        for k, (left, right) in enumerate(self.terms):
            total = total + column_squares(left) * column_squares(right)
            for other_left, other_right in self.terms[k + 1 :]:
                total = total + 2 * (left * other_left).sum(0) * (right * other_right).sum(0)
        return total.clamp(min=0)  # keeps NaN

    def weighted_sum(self, weights: Tensor, keep: Tensor | None) -> Tensor:
        """Σ_i weights_i · matrix_i, flat; with ``keep``, of those records only."""
        total = torch.zeros(())
        for left, right in self.terms:
            if keep is None:
                total = total + (left * weights) @ right.T
            else:  # 0 * NaN is NaN
                total = total + (left[:, keep] * weights[keep]) @ right[:, keep].T
        return total.reshape(-1)

    def combine(self, weight: float, other: Outer, other_weight: float) -> Outer:
        """weight · this + other_weight · other, without cancellation where they are close.

        a e hᵀ + b f gᵀ = (a e + b f) hᵀ - b f (h - g)ᵀ.
        """
        ((left, right),), ((other_left, other_right),) = self.terms, other.terms
        first = weight * left + other_weight * other_left, right
        if other_right is right:
            return Outer((first,), self.squares)
        return Outer((first, (-other_weight * other_left, right - other_right)))


class NetworkGradients(AbstractPerSampleGradients):
    """Gradients of a network of linear layers: per record and layer one outer product.

    Args:
        copies: how many records each column stands for; each of them is bounded by itself.
    """

    def __init__(self, layers: Sequence[Outer], copies: Tensor | None = None) -> None:
        self.layers, self.copies = layers, copies

    @property
    def count(self) -> int:
        return self.layers[0].terms[0][0].shape[1]

    def norms(self) -> Tensor:
        return sum(layer.square_norms() for layer in self.layers).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.copies is not None:
            weights = weights * self.copies
        is_zero = weights == 0
        keep = ~is_zero if bool(is_zero.any()) else None
        return torch.cat([layer.weighted_sum(weights, keep) for layer in self.layers])

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> NetworkGradients:
        ((other_weight, other),) = others
        if not isinstance(other, NetworkGradients) or other.count != self.count:
            raise TypeError("Only gradients of the same records and network can be combined.")
        return NetworkGradients(
            [
                mine.combine(weight, its, other_weight)
                for mine, its in zip(self.layers, other.layers, strict=True)
            ],
            self.copies,
        )


def column_squares(matrix: Tensor) -> Tensor:
    return matrix.square().sum(0)
