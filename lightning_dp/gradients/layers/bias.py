"""Biases: the gradient of the output, summed over positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp.gradients.layers.base import AbstractForm, Call

__all__ = ["Bias"]


@dataclass(frozen=True)
class Bias(AbstractForm):
    """Σ_t u_it for u of shape (n, T, entries); v is not used."""

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        return u.sum(1)

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        return torch.tensordot(weights, u.sum(1), dims=1)

    @classmethod
    def call(cls, u: Tensor) -> Call:
        """A use of a bias; of equal inputs, as far as differences are concerned."""
        return Call(cls(), torch.zeros(len(u), dtype=torch.bool, device=u.device), u)
