"""The one function that produces a bounded sum."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lightning_dp.functional import clip_factors
from lightning_dp.query import BoundedSum

__all__ = ["AbstractPerSampleGradients", "bounded_sum"]

# Between these float32 has room for a sum of millions of records, and for their weights.
_SMALLEST, _LARGEST = 1e-30, 1e32


class AbstractPerSampleGradients(ABC):
    """The gradients of the records of one chunk, held in whatever form an engine likes."""

    @property
    @abstractmethod
    def count(self) -> int:
        """n, the number of records."""

    @abstractmethod
    def norms(self) -> Tensor:
        """L2 norm of each record's gradient over all parameters, shape (n,)."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``sum_i weights[i] * g_i`` as a flat vector; may be asked for once, after the norms.

        A record of weight 0 contributes exactly 0, also when its gradient is not finite.
        """

    def restrict(self, coordinates: Tensor) -> AbstractPerSampleGradients:
        """Each record's gradient at some coordinates only: sorted, distinct places of flat vectors.

        The result holds n vectors of their number in memory.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be restricted to coordinates.")

    @abstractmethod
    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> AbstractPerSampleGradients:
        """Per record: ``weight * g_i + sum_k weight_k * other_k_i``, before any clipping.

        The others are of the same records, taken at other points by the same engine. The memory of
        this object may be used for the result.
        """


def bounded_sum(gradients: AbstractPerSampleGradients, clip_norm: float) -> BoundedSum:
    r""":math:`\sum_i g_i \min(1, C/\|g_i\|)`: adding or removing a record moves it by at most C.

    Promises: each record contributes a vector of L2 norm at most ``clip_norm`` (up to rounding);
    a record whose gradient is not finite contributes zero; no record affects another's part. It
    also contributes zero where float32 cannot hold its gradient scaled down.

    Raises:
        ValueError: if ``clip_norm`` is less than 1e-30.
    """
    if not clip_norm >= _SMALLEST:
        raise ValueError(
            f"clip_norm={clip_norm} must be at least {_SMALLEST:g}: float32 has no room for the sum of "
            "records that small."
        )
    unit = 1.0 if 1e-3 <= clip_norm <= 1e3 or clip_norm == math.inf else min(clip_norm, _LARGEST)
    norms = gradients.norms()
    held = norms.masked_fill(norms > _LARGEST, math.inf)
    total = gradients.weighted_sum(clip_factors(held, clip_norm) / unit)
    return BoundedSum(total if unit == 1 else total.mul_(unit), clip_norm)
