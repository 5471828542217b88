r"""The gradient of a unit of privacy: the mean of those of its rows, made before any clipping.

A unit u has r_u rows in a batch of R rows and n units: a user's own rows, or K random views of one
record. Its gradient is

.. math:: g_u = \frac1{r_u} \sum_{j \text{ of } u} \nabla \ell_j .

**Sensitivity.** :func:`~lightning_dp.boundary.bounded_sum` adds :math:`\mathrm{clip}_C(g_u)`. g_u depends
on the rows of u and on r_u, so on u alone, and clipping comes last: adding or removing a unit moves the
sum by at most C whatever r_u is and whichever function of u's own rows g_u is (a sum, a mean over r_u or
over a fixed number). The mean over u's *own* number is taken because C then has the meaning that it has
for single records, the norm of an ordinary gradient, and a unit with few rows counts as much as one with
many. For records read K times it is the mean over augmentations of De et al. (2022, arXiv:2204.13650),
for users that of Charles et al. (2024, arXiv:2407.07737).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_dp.gradients.base import AbstractPerSampleGradients
from lightning_dp.gradients.batches import RowOwners
from lightning_dp.gradients.parameter_sum import MaterialisedGradients, restricted

__all__ = ["UnitMeans"]


class UnitMeans(AbstractPerSampleGradients):
    """Means over the rows of each unit, from an engine's sums over them.

    Args:
        sums: n/R Σ_j ∇ℓ_j of each unit: what engines make of the mean over R rows for n units.
        shares: R / (n r_u), shape (n,).
    """

    def __init__(self, sums: AbstractPerSampleGradients, shares: Tensor) -> None:
        self._sums, self._shares = sums, shares

    @classmethod
    def of(cls, sums: AbstractPerSampleGradients, owners: RowOwners) -> AbstractPerSampleGradients:
        """Return the means; where all units have as many rows, the sums are the means."""
        shares = len(owners.owners) / (owners.records * owners.counts.double())
        is_same = sums.count != owners.records or bool((shares == 1).all())
        return sums if is_same else cls(sums, shares)

    @property
    def count(self) -> int:
        return self._sums.count

    def norms(self) -> Tensor:
        norms = self._sums.norms()
        return norms * self._shares.to(norms)

    def norms_by_parameter(self) -> Tensor:
        norms = self._sums.norms_by_parameter()
        return norms * self._shares.to(norms).unsqueeze(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self._sums.weighted_sum(self._weighted(weights))

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        self._sums.add_weighted_sum(self._weighted(weights), onto)

    def _weighted(self, weights: Tensor) -> Tensor:
        """Return weights, of units or of units and parameters, times the shares."""
        shares = self._shares.to(weights)
        return weights * (shares if weights.dim() == 1 else shares.unsqueeze(1))

    def restrict(self, coordinates: Tensor) -> MaterialisedGradients:
        few = self._sums.restrict(coordinates)
        assert isinstance(few, MaterialisedGradients)
        entries = few.entries()
        return restricted([entries * self._shares.to(entries).unsqueeze(1)], 1.0)

    def discard(self) -> None:
        self._sums.discard()

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> UnitMeans:
        sums = [(each, other._sums) for each, other in others if isinstance(other, UnitMeans)]
        if len(sums) < len(others):
            raise TypeError("Only gradients of the same units and engine can be combined.")
        return UnitMeans(self._sums.combine(weight, sums), self._shares)
