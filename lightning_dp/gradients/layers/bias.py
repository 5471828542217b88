"""Biases: the gradient of the output, already summed over positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    def along(
        self,
        v: tuple[Tensor, Tensor | None],
        u: tuple[Tensor, Tensor | None],
        weights: tuple[float, float],
    ) -> list[Call]:
        return [replace(call, v=call.u) for call in super().along((v[0], None), u, weights)]

    @classmethod
    def call(cls, u: Tensor) -> Call:
        """A use of a bias."""
        return Call(cls(), u, u)
