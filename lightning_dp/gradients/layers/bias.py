"""Biases: the gradient of the output, already summed over positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp.gradients.layers.base import AbstractForm, Call

__all__ = ["Bias"]


@dataclass(frozen=True)
class Bias(AbstractForm):
    """u_i itself, of shape (n, *parameter shape); v is not used."""

    def rows(self, v: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        return u

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        total: Tensor = torch.tensordot(weights, u, dims=1)
        return total

    def both(self, here: Call, there: Call) -> list[Call]:
        return [self.call(here.u + there.u)]

    @classmethod
    def call(cls, u: Tensor) -> Call:
        """A use of a bias."""
        return Call(cls(), u, u)
