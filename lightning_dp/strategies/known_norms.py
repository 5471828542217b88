"""Gradients whose norms were asked for already."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_dp.boundary import AbstractPerSampleGradients

__all__ = ["KnownNorms"]


class KnownNorms(AbstractPerSampleGradients):
    """The same gradients, with norms that are computed once.

    Args:
        gradients: of the records of a chunk.
    """

    def __init__(self, gradients: AbstractPerSampleGradients) -> None:
        self._gradients = gradients
        self._norms: Tensor | None = None

    @property
    def count(self) -> int:
        return self._gradients.count

    def norms(self) -> Tensor:
        if self._norms is None:
            self._norms = self._gradients.norms()
        return self._norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        self.norms()  # what engines keep of them makes the sum
        return self._gradients.weighted_sum(weights)

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        self.norms()
        self._gradients.add_weighted_sum(weights, onto)

    def restrict(self, coordinates: Tensor) -> AbstractPerSampleGradients:
        return self._gradients.restrict(coordinates)

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> AbstractPerSampleGradients:
        return self._gradients.combine(weight, others)
