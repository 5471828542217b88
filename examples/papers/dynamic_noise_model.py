"""The losses of dynamic_noise.py: values, and clipped sums of gradients that are never formed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dynamic_noise_data import Records
from outer_products import NetworkGradients, Outer
from torch import Tensor

HIDDEN = 100


@dataclass(frozen=True)
class Problem:
    """A loss on records: its value, and its per-sample gradients by hand."""

    loss: str
    records: Records

    def start(self, seed: int) -> list[Tensor]:
        """Zeros; for the network Kaiming-uniform weights, the bias as a last column."""
        d = self.records.x.shape[1]
        if self.loss != "network":
            return [torch.zeros(1, d, dtype=torch.float64)]
        generator = torch.Generator().manual_seed(seed)

        def layer(rows: int, columns: int) -> Tensor:
            bound = columns**-0.5
            weights = torch.rand(rows, columns + 1, generator=generator) * 2 - 1
            return weights.double() * bound

        return [layer(HIDDEN, d), layer(1, HIDDEN)]

    def _forward(self, params: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The output for each record, and the inputs of each layer."""
        inputs = [self.records.x]
        if self.loss == "network":
            inputs = [with_one(self.records.x)]
            inputs.append(with_one((inputs[0] @ params[0].T).relu()))
        return (inputs[-1] @ params[-1].T).squeeze(1), inputs

    def value(self, params: list[Tensor]) -> float:
        output, _ = self._forward(params)
        if self.loss == "squared":
            return float((output - self.records.y).square().mean() / 2)
        return float(torch.nn.functional.softplus(-self.records.y * output).mean())

    def gradients(self, params: list[Tensor]) -> NetworkGradients:
        output, inputs = self._forward(params)
        y = self.records.y
        delta = output - y if self.loss == "squared" else -y * torch.sigmoid(-y * output)
        layers = [(delta.unsqueeze(1), inputs[-1])]
        if self.loss == "network":
            back = delta.unsqueeze(1) * params[1][:, :-1] * (inputs[1][:, :-1] > 0)
            layers.insert(0, (back, inputs[0]))
        return NetworkGradients([Outer(((left.T, right.T),)) for left, right in layers])


def with_one(x: Tensor) -> Tensor:
    """A column of ones for the bias."""
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)
