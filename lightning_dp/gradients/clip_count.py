r"""The number of clipped records, next to the sum of clipped gradients, from one Gaussian mechanism."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_dp.boundary import LARGEST_NORM, PerSampleGradients
from lightning_dp.functional import clip_factors

__all__ = ["CountedGradients"]


class CountedGradients(PerSampleGradients):
    r"""Clipped gradients with one entry more, which counts the records that were clipped.

    Record i has the vector of d + 1 entries

    .. math:: v_i = (\mathrm{clip}_C(g_i),\; κ C c_i), \qquad
        c_i = 1 \text{ if } \|g_i\| > C, \text{ else } -1.

    Both parts depend on record i alone, and
    :math:`\|v_i\|^2 = \|\mathrm{clip}_C(g_i)\|^2 + κ^2 C^2 \le C^2 (1 + κ^2)`, so clipping v_i to
    C' = C√(1 + κ²) leaves it as it is: :func:`~lightning_dp.boundary.bounded_sum` for C' is the sum of
    the v_i, whose norms are told as those of any gradients. :func:`~lightning_dp.boundary.add_noise`
    adds N(0, z²C'²I) to all d + 1 entries: that is the Gaussian mechanism with multiplier z, one event,
    for add/remove (and zero-out) of a record. Replacing one moves the sum by at most 2C', as it moves a
    sum of gradients by at most 2C. So the charge for z is honest, and the price of the count is noise
    that is √(1 + κ²) times as long in the gradient. A c_i of ±1 instead of 1 and 0 halves the noise
    of the share: with B expected records it is (1 + Σ c_i / B) / 2, since their number is B on average.

    A record whose gradient is not finite, or longer than float32 can scale down, counts for nothing.

    Args:
        gradients: the g_i.
        clip_norm: C, finite.
        count_weight: κ > 0.
    """

    def __init__(
        self, gradients: PerSampleGradients, clip_norm: float, count_weight: float
    ) -> None:
        norms = gradients.norms()
        norms = norms.masked_fill(~(norms <= LARGEST_NORM), math.inf)
        self._gradients = gradients
        self._factors = clip_factors(norms, clip_norm)
        self._counts = torch.where(norms > clip_norm, 1.0, -1.0) * (count_weight * clip_norm)
        clipped = norms.clamp(max=clip_norm)
        longer = torch.hypot(clipped, clipped.new_tensor(count_weight * clip_norm))
        self._norms = longer.masked_fill(norms == math.inf, math.inf)

    def norms(self) -> Tensor:
        return self._norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = self._gradients.weighted_sum(weights * self._factors)
        return torch.cat([total, self._count(weights, total).unsqueeze(0)])

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        self._gradients.add_weighted_sum(weights * self._factors, onto[:-1])
        onto[-1] += self._count(weights, onto)

    def _count(self, weights: Tensor, like: Tensor) -> Tensor:
        return (weights * self._counts).sum().to(like)
