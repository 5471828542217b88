"""The network of diff2.py and the gradients of its records, none of which is ever formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diff2_data import Records, Split
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from lightning_dp.boundary import Query
from lightning_dp.functional import flatten, unflatten
from lightning_dp.gradients.base import AbstractPerSampleGradients

HIDDEN = 10


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
    """Gradients of a network of linear layers: per record and layer one outer product."""

    def __init__(self, layers: Sequence[Outer]) -> None:
        self.layers = layers

    @property
    def count(self) -> int:
        return self.layers[0].terms[0][0].shape[1]

    def norms(self) -> Tensor:
        return sum(layer.square_norms() for layer in self.layers).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
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
            ]
        )


def column_squares(matrix: Tensor) -> Tensor:
    return matrix.square().sum(0)


@dataclass(frozen=True)
class Point:
    """The results of a forward and backward pass at one point."""

    outputs: Tensor
    gradients: NetworkGradients

    def gradient_sum(self) -> Tensor:
        """Of all records, nothing clipped."""
        return self.gradients.weighted_sum(torch.ones(self.gradients.count))


class Network:
    """One hidden layer of 10 softplus units; squared loss, or cross-entropy for classes.

    A layer's parameters are one matrix with its bias as the last column.
    """

    def __init__(self, data: Split) -> None:
        self.data = data

    def start(self, seed: int) -> list[Tensor]:
        """Uniform in ±1/√fan_in."""
        generator = torch.Generator().manual_seed(seed)
        shapes = ((HIDDEN, self.data.train.x.shape[0]), (self.data.outputs, HIDDEN + 1))
        return [
            (2 * torch.rand(shape, generator=generator) - 1) / (shape[1] - 1) ** 0.5
            for shape in shapes
        ]

    def _forward(self, params: Sequence[Tensor], records: Records) -> tuple[Tensor, ...]:
        """Return the inputs of softplus, its results with a last row of ones, and the outputs."""
        inner = params[0] @ records.x
        hidden = torch.ones(HIDDEN + 1, records.count)
        hidden[:-1] = softplus(inner)
        return inner, hidden, params[1] @ hidden

    def loss(self, outputs: Tensor, y: Tensor) -> float:
        """The mean loss."""
        if self.data.is_regression:
            return float((outputs - y).square().mean())
        return float(cross_entropy(outputs.T, y))

    def test_loss(self, params: Sequence[Tensor]) -> float:
        test = self.data.test
        return self.loss(self._forward(params, test)[-1], test.y)

    def at(self, params: Sequence[Tensor]) -> Point:
        """Outputs and gradients of the training records."""
        records = self.data.train
        inner, hidden, outputs = self._forward(params, records)
        if self.data.is_regression:
            error = 2 * (outputs - records.y)
        else:
            error = outputs.softmax(0)
            error[records.y, torch.arange(records.count)] -= 1
        back = (params[1][:, :-1].T @ error) * inner.sigmoid()
        first = Outer(((back, records.x),), records.squares)
        return Point(outputs, NetworkGradients([first, Outer(((error, hidden),))]))


class Answers:
    """Answers queries about a network; remembers two points, as queries ask about the last one."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._seen: list[tuple[Tensor, Point]] = []

    def at(self, flat: Tensor, params: Sequence[Tensor]) -> Point:
        """The point with these parameters, given as a vector and in their shapes."""
        for key, point in self._seen:
            if torch.equal(key, flat):
                return point
        point = self.network.at(params)
        self._seen = [*self._seen[-1:], (flat, point)]
        return point

    def gradients(self, query: Query, params: Sequence[Tensor]) -> NetworkGradients:
        """Of each record the combination of gradients that the query asks for, not yet clipped."""
        here, *others = query.terms
        gradients = self.at(flatten(params), params).gradients
        if not others:
            return gradients
        return gradients.combine(
            here.weight,
            [
                (term.weight, self.at(term.point, unflatten(term.point, params)).gradients)
                for term in others
            ],
        )
