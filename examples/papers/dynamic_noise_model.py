"""The losses of dynamic_noise.py: values, and clipped sums of gradients that are never formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dynamic_noise_data import Records
from outer_products import NetworkGradients, Outer
from torch import Tensor

HIDDEN, CLASSES = 100, 10


@dataclass(frozen=True)
class Problem:
    """A loss on records: its value, and its per-sample gradients by hand.

    Args:
        loss: "squared" or "logistic" of a linear model, "network" (logistic, a hidden layer of 100) or
            "digits" (cross-entropy of ten classes, two hidden layers of 100).
    """

    loss: str
    records: Records

    @property
    def sizes(self) -> tuple[int, ...]:
        """Outputs of the layers."""
        return {"network": (HIDDEN, 1), "digits": (HIDDEN, HIDDEN, CLASSES)}.get(self.loss, (1,))

    def start(self, seed: int) -> list[Tensor]:
        """Zeros; for networks Kaiming-uniform weights, the bias as a last column."""
        d = self.records.x.shape[1]
        if len(self.sizes) == 1:
            return [torch.zeros(1, d, dtype=torch.float64)]
        generator = torch.Generator().manual_seed(seed)

        def layer(rows: int, columns: int) -> Tensor:
            bound = columns**-0.5
            weights = torch.rand(rows, columns + 1, generator=generator) * 2 - 1
            return weights.double() * bound

        return [layer(*pair) for pair in zip(self.sizes, (d, *self.sizes), strict=False)]

    def _forward(self, params: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output for each record, and the inputs of each layer."""
        if len(params) == 1:
            return self.records.x @ params[0].T, [self.records.x]
        inputs = [with_one(self.records.x)]
        for weight in params[:-1]:
            inputs.append(with_one((inputs[-1] @ weight.T).relu()))
        return inputs[-1] @ params[-1].T, inputs

    def value(self, params: list[Tensor]) -> float:
        output, y = self._forward(params)[0], self.records.y
        if self.loss == "digits":
            return float(torch.nn.functional.cross_entropy(output, y))
        output = output.squeeze(1)
        if self.loss == "squared":
            return float((output - y).square().mean() / 2)
        return float(torch.nn.functional.softplus(-y * output).mean())

    def gradients(self, params: list[Tensor]) -> NetworkGradients:
        output, inputs = self._forward(params)
        y = self.records.y.unsqueeze(1)
        if self.loss == "digits":
            delta = output.softmax(1).scatter_add(1, y, -torch.ones_like(y, dtype=output.dtype))
        else:
            delta = output - y if self.loss == "squared" else -y * torch.sigmoid(-y * output)
        layers = [Outer(((delta.T, inputs[-1].T),))]
        for weight, given, before in zip(params[:0:-1], inputs[:0:-1], inputs[-2::-1], strict=True):
            delta = (delta @ weight[:, :-1]) * (given[:, :-1] > 0)
            layers.insert(0, Outer(((delta.T, before.T),)))
        return NetworkGradients(layers)


def with_one(x: Tensor) -> Tensor:
    """A column of ones for the bias."""
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
