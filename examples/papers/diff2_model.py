"""The network of diff2.py and its answers to queries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diff2_data import Records, Split
from outer_products import NetworkGradients, Outer
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from lightning_dp.boundary import Query
from lightning_dp.functional import flatten, unflatten

HIDDEN = 10


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
        hidden = torch.ones(HIDDEN + 1, records.columns)
        hidden[:-1] = softplus(inner)
        return inner, hidden, params[1] @ hidden

    def loss(self, outputs: Tensor, records: Records) -> float:
        """The mean loss."""
        if self.data.is_regression:
            return records.mean((outputs[0] - records.y[0]).square())
        return records.mean(cross_entropy(outputs.T, records.y, reduction="none"))

    def on_test(self, params: Sequence[Tensor]) -> tuple[float, float]:
        """The loss on the test records, and the share that is put into a wrong class."""
        test = self.data.test
        outputs = self._forward(params, test)[-1]
        wrong = math.nan
        if not self.data.is_regression:
            wrong = test.mean((outputs.argmax(0) != test.y).float())
        return self.loss(outputs, test), wrong

    def at(self, params: Sequence[Tensor]) -> Point:
        """Outputs and gradients of the training records."""
        records = self.data.train
        inner, hidden, outputs = self._forward(params, records)
        if self.data.is_regression:
            error = 2 * (outputs - records.y)
        else:
            error = outputs.softmax(0)
            error[records.y, torch.arange(records.columns)] -= 1
        back = (params[1][:, :-1].T @ error) * inner.sigmoid()
        first = Outer(((back, records.x),), records.squares)
        layers = [first, Outer(((error, hidden),))]
        return Point(outputs, NetworkGradients(layers, records.copies))


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
