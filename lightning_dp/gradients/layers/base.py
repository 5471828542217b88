"""Per-sample gradients of a parameter as a bilinear form: a layer's input times what came back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from lightning_dp.functional import as_rows, per_sample_norms

__all__ = ["AbstractForm", "Call", "ParameterGradients"]

# Gradients of all records are kept from the norms to the sum if they have at most this many bytes.
# Larger ones are made slice by slice for the norms, and the sum is taken without making them.
_KEEP_BYTES = 64 << 20
_SLICE_BYTES = 4 << 20


class AbstractForm(ABC):
    """How a parameter's gradient f(v_i, u_i) of record i is made; linear in v and in u.

    v comes from the layer's input and u is the gradient of its output, records first in both.
    Being bilinear leaves no special cases: a parameter used in several calls is a sum over calls,
    and a combination of gradients at two points is one over differences,
    w f(v, u) + w' f(v', u') = f(v - v', w u) + f(v', w u + w' u'),
    which loses no digits when the points are close.
    """

    @abstractmethod
    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        """f(v_i, u_i) of each record: shape (n, *parameter shape)."""

    @abstractmethod
    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        """Σ_i weights_i f(v_i, u_i), of the parameter's shape, without making the rows."""

    def squared_norms(self, calls: Sequence[Call]) -> Tensor | None:
        """‖Σ_calls f(v_i, u_i)‖² of each record as float64, where that is cheaper than the rows."""
        return None


@dataclass(frozen=True)
class Call:
    """One use of a parameter in a forward pass, with what came back for it."""

    form: AbstractForm
    v: Tensor
    u: Tensor

    def of(self, records: Tensor | slice) -> Call:
        """The same for some of the records."""
        return replace(self, v=self.v[records], u=self.u[records])

    def rows(self) -> Tensor:
        return self.form.rows(self.v, self.u)


class ParameterGradients:
    """The gradients of one parameter for the n records of a chunk.

    Args:
        calls: all its uses.
        numel: its number of entries.
    """

    def __init__(self, calls: Sequence[Call], numel: int) -> None:
        self.calls = list(calls)
        self._numel = numel
        self._kept: Tensor | None = None

    @property
    def counts(self) -> set[int]:
        """How many records each call saw."""
        return {len(call.u) for call in self.calls}

    def squared_norms(self) -> Tensor:
        """Squared L2 norm of each record's gradient, shape (n,), float64."""
        forms = {call.form for call in self.calls}
        if len(forms) == 1:
            cheap = forms.pop().squared_norms(self.calls)
            if cheap is not None:
                return cheap
        count = len(self.calls[0].u)
        if 4 * count * self._numel <= _KEEP_BYTES:
            self._kept = _sum_of_rows(self.calls)
            return per_sample_norms([self._kept]).square_()
        size = max(1, _SLICE_BYTES // (4 * self._numel))
        slices = [slice(start, start + size) for start in range(0, count, size)]
        norms = [per_sample_norms([_sum_of_rows([c.of(s) for c in self.calls])]) for s in slices]
        return torch.cat(norms).square_()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ_i weights_i g_i, flat. A record of weight 0 is left out, whatever it holds."""
        kept = weights.nonzero().flatten()
        if len(kept) == len(weights):
            return self._weighted_sum(slice(None), weights)
        return self._weighted_sum(kept, weights[kept])

    def _weighted_sum(self, records: Tensor | slice, weights: Tensor) -> Tensor:
        if self._kept is not None:
            rows = as_rows(self._kept[records])
            return weights.to(rows.dtype) @ rows
        calls = [call.of(records) for call in self.calls]
        sums = (c.form.weighted_sum(c.v, c.u, weights.to(c.u.dtype)) for c in calls)
        return reduce(torch.add, sums).reshape(-1)

    def combine(
        self, weight: float, others: Sequence[tuple[float, ParameterGradients]]
    ) -> ParameterGradients:
        """Per record ``weight * g + Σ weight_k * g_k``; the others at other points."""
        calls = [_times(call, weight) for call in self.calls if weight]
        for other_weight, other in others:
            new = [_times(call, other_weight) for call in other.calls]
            if len(new) == len(calls):
                calls = [part for pair in zip(calls, new, strict=True) for part in _both(*pair)]
            else:
                calls += new
        return ParameterGradients(calls, self._numel)


def _sum_of_rows(calls: Sequence[Call]) -> Tensor:
    return reduce(torch.add, (call.rows() for call in calls))


def _times(call: Call, weight: float) -> Call:
    return call if weight == 1 else replace(call, u=call.u * weight)


def _both(here: Call, there: Call) -> Iterator[Call]:
    """f(v, u) + f(v', u') as f(v - v', u) + f(v', u + u')."""
    same_kind = here.form == there.form and here.v.shape == there.v.shape
    if not same_kind or here.u.shape != there.u.shape:
        yield from (here, there)
        return
    is_same = here.v.data_ptr() == there.v.data_ptr() or torch.equal(here.v, there.v)
    if not is_same and not here.v.is_floating_point():
        yield from (here, there)
        return
    if not is_same:
        yield replace(here, v=here.v - there.v)
    yield replace(there, u=here.u + there.u)
