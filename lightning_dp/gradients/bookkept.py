"""What layers saw and what came back to them, as gradients per record that are never made."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.gradients.base import number_of_records
from lightning_dp.gradients.layers import ParameterGradients
from lightning_dp.gradients.materialised import restricted

__all__ = ["BookkeptGradients"]

# Gradients of all records that are made for the norms, and that are larger than what they are made
# from, are kept for the sum up to this much.
_KEEP_BYTES = 32 << 20


class BookkeptGradients(AbstractPerSampleGradients):
    """For each parameter what its layers saw and what came back.

    Args:
        params: the trained parameters, in the order of flat vectors.
        gradients: for each parameter, or None where it was not used.
        scale: multiplies all of them; the loss was the mean over the records.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[ParameterGradients | None],
        scale: float,
    ) -> None:
        self._params, self._gradients = params, gradients
        self._used = [gradient for gradient in gradients if gradient is not None]
        counts: set[int] = set().union(*(gradient.counts for gradient in self._used))
        self._count = number_of_records(counts)
        self._dtype = params[0].dtype if params else torch.float32
        self._scale, self._factor = scale, scale * self._count

    @property
    def count(self) -> int:
        return self._count

    def norms(self) -> Tensor:
        if not self._used:
            return torch.zeros(0, dtype=torch.float64)
        squares, left = [], _KEEP_BYTES
        for gradient in self._used:
            squares.append(gradient.squared_norms(left))
            left -= gradient.kept_bytes
        return reduce(torch.add, squares).sqrt() * abs(self._factor)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        weights = weights * self._factor
        records = None
        if not weights.all():  # 0 * NaN is NaN
            records = weights.nonzero().flatten()
            weights = weights[records]
        weights = weights.to(torch.promote_types(self._dtype, torch.float32))
        parts = []
        for param, gradient in zip(self._params, self._gradients, strict=True):
            dtype = torch.promote_types(param.dtype, torch.float32)
            if gradient is None:
                parts.append(torch.zeros(param.numel(), dtype=dtype, device=param.device))
            else:
                total = gradient.weighted_sum(weights, records)
                parts.append(total if total.dtype == dtype else total.to(dtype))
        return torch.cat(parts)

    def restrict(self, coordinates: Tensor) -> AbstractPerSampleGradients:
        parts, start = [], 0
        sizes = [param.numel() for param in self._params]
        ends = torch.tensor(sizes, device=coordinates.device).cumsum(0)
        cuts = torch.searchsorted(coordinates.contiguous(), ends).cpu()
        chosen = torch.tensor_split(coordinates, cuts)
        for param, gradient, own in zip(self._params, self._gradients, chosen, strict=False):
            places = (own - start).to(param.device)
            dtype = torch.promote_types(param.dtype, torch.float32)
            if gradient is None or not len(places):
                parts.append(
                    torch.zeros(self._count, len(places), dtype=dtype, device=param.device)
                )
            else:
                parts.append(gradient.entries(places).to(dtype))
            start += param.numel()
        return restricted(parts, self._factor)

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> BookkeptGradients:
        combined: list[ParameterGradients | None] = []
        factors = []
        for other_weight, other in others:
            if not isinstance(other, BookkeptGradients) or other.count != self.count:
                raise TypeError("Only gradients of the same records and engine can be combined.")
            factors.append((other_weight * other._scale, other))
        for position, (param, gradient) in enumerate(
            zip(self._params, self._gradients, strict=True)
        ):
            here = ParameterGradients([], param.shape) if gradient is None else gradient
            there = [(f, g) for f, o in factors if (g := o._gradients[position]) is not None]
            is_used = gradient is not None or there
            combined.append(here.combine(weight * self._scale, there) if is_used else None)
        return BookkeptGradients(self._params, combined, 1.0)
