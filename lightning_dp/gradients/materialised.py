"""Per-sample gradients that are all in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_dp._precision import full_precision
from lightning_dp.functional import as_rows, flat_zeros, parts_of, per_sample_norms
from lightning_dp.gradients.base import AbstractPerSampleGradients, number_of_records

__all__ = ["MaterialisedGradients", "places_in", "restricted"]


class MaterialisedGradients(AbstractPerSampleGradients):
    """One tensor of shape (n, *parameter shape) per parameter.

    Args:
        params: the trained parameters, in the order of flat vectors.
        gradients: for each parameter its per-sample gradients, or None where it was not used.
        scale: multiplies all of them.
    """

    def __init__(
        self, params: Sequence[Tensor], gradients: Sequence[Tensor | None], scale: float
    ) -> None:
        self._params = params
        self._gradients = gradients
        self._scale = scale
        self._used = [gradient for gradient in gradients if gradient is not None]
        self._count = number_of_records([len(gradient) for gradient in self._used])

    @property
    def count(self) -> int:
        return self._count

    def norms(self) -> Tensor:
        if not self._used:
            return torch.zeros(0, dtype=torch.float64)
        return per_sample_norms(self._used) * abs(self._scale)

    def norms_by_parameter(self) -> Tensor:
        none = torch.zeros(self._count, dtype=torch.float64)
        found = [none if each is None else per_sample_norms([each]) for each in self._gradients]
        like = max(found, key=lambda norms: norms.device.type != "cpu")
        return torch.stack([each.to(like) for each in found], dim=1) * abs(self._scale)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = flat_zeros(self._params)
        self.add_weighted_sum(weights, total)
        return total

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        weights = weights * self._scale
        parts = zip(parts_of(onto, self._params), self._gradients, strict=True)
        for place, (part, gradient) in enumerate(parts):
            if gradient is None:
                continue
            own = weights if weights.dim() == 1 else weights[:, place]
            rows, is_left_out = as_rows(gradient).to(part.dtype), own == 0
            if rows.device.type != "cpu" or is_left_out.any():  # 0 * NaN is NaN
                rows = rows.masked_fill(is_left_out.unsqueeze(1), 0.0)
            with full_precision(part.device):
                part.addmv_(rows.T, own.to(part.dtype))

    def entries(self) -> Tensor:
        """Return each record's gradient as a row, shape (n, d): for few coordinates only."""
        parts = [
            torch.zeros(self._count, param.numel(), dtype=param.dtype, device=param.device)
            if gradient is None
            else as_rows(gradient)
            for param, gradient in zip(self._params, self._gradients, strict=True)
        ]
        return torch.cat(parts, dim=1) * self._scale

    def restrict(self, coordinates: Tensor) -> MaterialisedGradients:
        parts = []
        chosen = places_in(coordinates, self._params)
        for param, gradient, places in zip(self._params, self._gradients, chosen, strict=True):
            if gradient is None:
                parts.append(param.new_zeros(self._count, len(places)))
            else:
                parts.append(as_rows(gradient)[:, places])
        return restricted(parts, self._scale)

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> MaterialisedGradients:
        scale = weight * self._scale
        combined: list[Tensor | None] = list(self._gradients)
        if not scale:
            combined = [None] * len(combined)
        for other_weight, other in others:
            if not isinstance(other, MaterialisedGradients) or other.count != self.count:
                raise TypeError("Only gradients of the same records and engine can be combined.")
            factor = other_weight * other._scale / (scale or 1.0)
            for position, gradient in enumerate(other._gradients):
                if gradient is not None:
                    combined[position] = _plus(combined[position], gradient, factor)
        return MaterialisedGradients(self._params, combined, scale or 1.0)


def places_in(coordinates: Tensor, params: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the places in each parameter, on its device, of sorted places in flat vectors.

    No device is waited for, if the coordinates are on the host.
    """
    sizes = torch.tensor([param.numel() for param in params], device=coordinates.device)
    ends = sizes.cumsum(0)
    cuts = torch.searchsorted(coordinates.contiguous(), ends).tolist()
    for param, end, start, stop in zip(params, ends.tolist(), [0, *cuts], cuts, strict=False):
        yield (coordinates[start:stop] - (end - param.numel())).to(param.device)


def restricted(parts: Sequence[Tensor], scale: float) -> MaterialisedGradients:
    """Return gradients at some coordinates only, from the columns that belong to each parameter."""
    rows = torch.cat(list(parts), dim=1)
    return MaterialisedGradients([rows.new_empty(rows.shape[1])], [rows], scale)


def _plus(so_far: Tensor | None, gradient: Tensor, factor: float) -> Tensor:
    """Return ``so_far + factor * gradient``, in the memory of the first where it is plain memory."""
    if so_far is None:
        return gradient * factor
    if so_far.is_contiguous():
        return so_far.add_(gradient, alpha=factor)
    return torch.add(so_far, gradient, alpha=factor)
