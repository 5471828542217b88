"""Gradients per record as book-keeping has them: what each layer saw and got back, summed on demand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dp._precision import full_precision, where_used
from lightning_dp._shards import held_here, sum_into_shard
from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.functional import flat_memory, parts_of
from lightning_dp.gradients.base import number_of_records
from lightning_dp.gradients.materialised import places_in, restricted
from lightning_dp.gradients.parameter_gradients import Allowance, ParameterGradients, without_zeros
from lightning_dp.gradients.quick_norms import squared_norms_of_all

__all__ = ["BookkeptGradients"]


class BookkeptGradients(AbstractPerSampleGradients):
    """Gradients per record that are never made: for each parameter, what its layers saw and got back.

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
        counts = {len(use.u) for gradient in self._used for use in gradient.uses}
        self._count = number_of_records(counts)
        self._dtype = params[0].dtype if params else torch.float32
        self._scale, self._factor = scale, scale * self._count

    @property
    def count(self) -> int:
        return self._count

    def norms(self) -> Tensor:
        if not self._used:
            return torch.zeros(0, dtype=torch.float64)
        with full_precision(self._params[0].device):
            norms = squared_norms_of_all(self._used).sqrt() * abs(self._factor)
        return where_used(norms, self._params[0].device)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = flat_memory(held_here(self._params))
        self._sum_up(weights, total, is_new=True)
        return total

    def add_weighted_sum(self, weights: Tensor, onto: Tensor) -> None:
        self._sum_up(weights, onto, is_new=False)

    def _sum_up(self, weights: Tensor, onto: Tensor, *, is_new: bool) -> None:
        """Add the sum to a vector; to nothing, if nobody has written into it."""
        weights, records, left_out = without_zeros(weights * self._factor)
        weights = weights.to(torch.promote_types(self._dtype, torch.float32))
        here = held_here(self._params)
        parts = zip(self._params, here, parts_of(onto, here), self._gradients, strict=True)
        with full_precision(onto.device):
            for param, held, part, gradient in parts:
                # Of sharded parameters one whole gradient at a time, on all processes together.
                whole = part if held is param else part.new_zeros(param.numel())
                if is_new and (gradient is None or whole is not part):
                    part.zero_()
                if gradient is not None:
                    is_first = is_new and whole is part
                    gradient.add_weighted_sum(weights, whole, records, left_out, is_new=is_first)
                if whole is not part:
                    sum_into_shard(whole.view(param.shape), part, param)

    def discard(self) -> None:
        for gradient in self._used:
            gradient.discard()

    def restrict(self, coordinates: Tensor) -> AbstractPerSampleGradients:
        parts = []
        chosen = places_in(coordinates, self._params)
        for param, gradient, places in zip(self._params, self._gradients, chosen, strict=True):
            dtype = torch.promote_types(param.dtype, torch.float32)
            if gradient is None or not len(places):
                parts.append(
                    torch.zeros(self._count, len(places), dtype=dtype, device=param.device)
                )
            else:
                with full_precision(param.device):
                    parts.append(gradient.entries(places).to(dtype))
        return restricted(parts, self._factor)

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> BookkeptGradients:
        combined: list[ParameterGradients | None] = []
        factors, allowance = [], Allowance()
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
            combined.append(
                here.combine(weight * self._scale, there, allowance) if is_used else None
            )
        return BookkeptGradients(self._params, combined, 1.0)
