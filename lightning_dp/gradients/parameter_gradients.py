"""The gradients of one parameter, per record, from all the calls that used it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from lightning_dp.functional import squared_row_norms
from lightning_dp.gradients.forms import SLICE_BYTES, Call, Rows, above_rounding

__all__ = ["Memory", "ParameterGradients"]


class Memory:
    """Large tensors that one step after another uses: fresh memory costs more than the sums in it.

    A tensor belongs to whoever took it, until it is given back.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, count: int, shape: torch.Size, like: Tensor) -> Tensor:
        """A tensor of at least ``count`` rows of a shape; batches differ in size."""
        free = self._free.get((shape, like.dtype, like.device))
        tensor = free.pop() if free else None
        if tensor is None or len(tensor) < count:
            tensor = like.new_empty((count + count // 8, *shape))
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        key = (tensor.shape[1:], tensor.dtype, tensor.device)
        self._free.setdefault(key, []).append(tensor)


class ParameterGradients:
    """The gradients of one parameter for the n records of a chunk.

    Args:
        calls: all its uses.
        shape: its shape.
        memory: where gradients of all records are put, if they are kept.
    """

    def __init__(
        self, calls: Sequence[Call], shape: torch.Size, memory: Memory | None = None
    ) -> None:
        self.calls = list(calls)
        self._shape, self._numel = shape, shape.numel()
        self._memory = Memory() if memory is None else memory
        self._kept: Tensor | None = None
        self._borrowed: list[Tensor] = []  # to be given back

    @property
    def counts(self) -> set[int]:
        """The number of records that each call saw."""
        return {len(call.u) for call in self.calls}

    @property
    def kept_bytes(self) -> int:
        """The memory that is kept between the norms and the sum."""
        return 0 if self._kept is None else self._kept.nbytes

    def add(self, call: Call, *, combined: bool) -> None:
        """Count in one more use.

        Args:
            combined: the gradients will be combined with others at a point nearby. Else those of
                all records may stand for what they are made from, where they are smaller;
                differences between two points would lose digits.
        """
        size = len(call.u) * self._numel * call.u.element_size()
        if not combined and size <= call.nbytes and not isinstance(call.form, Rows):
            call = Rows.call(self._rows(call))
        last_two = [*self.calls[-1:], call]
        if len(last_two) == 2 and all(_is_rows_of(each, len(call.u)) for each in last_two):
            self.calls[-1:] = Rows().joined(last_two)  # not one of them for each time step
        else:
            self.calls.append(call)

    def squared_norms(self, keep_bytes: int = 0) -> Tensor:
        """Squared L2 norm of each record's gradient, shape (n,), float64.

        Args:
            keep_bytes: memory that may be kept for the sum.
        """
        self.calls = _joined(self.calls)
        count = len(self.calls[0].u)
        may_keep = count * self._numel * self.calls[0].u.element_size() <= keep_bytes
        forms = {call.form for call in self.calls}
        if len(forms) == 1:
            cheap = forms.pop().squared_norms(self.calls, may_keep=may_keep)
            if cheap is not None:
                return cheap
        if may_keep:
            self._kept = self._rows(*self.calls)
            return squared_row_norms(self._kept)
        size = max(1, SLICE_BYTES // (4 * self._numel))
        slices = [slice(start, start + size) for start in range(0, count, size)]
        squares = torch.cat(
            [squared_row_norms(_sum_of_rows([call.of(s) for call in self.calls])) for s in slices]
        )
        # The sum is made from other sums of the same terms, rounded in another way.
        lengths = reduce(torch.add, (call.form.lengths(call.v, call.u) for call in self.calls))
        return above_rounding(squares, lengths, self.calls[0].u.dtype)

    def _rows(self, *calls: Call) -> Tensor:
        """The gradients of all records, in memory that is used again if the form can."""
        first = calls[0]
        if len(calls) > 1 or not first.form.writes_out(first.v, first.u):
            return _sum_of_rows(calls)
        out = self._memory.take(len(first.u), self._shape, first.u)
        self._borrowed.append(out)
        return first.form.rows(first.v, first.u, out[: len(first.u)])

    def weighted_sum(self, weights: Tensor, records: Tensor | None = None) -> Tensor:
        """Σ_i weights_i g_i, flat; to be asked for once.

        Args:
            weights: of the records.
            records: which ones, if not all; the others are left out, whatever they hold.
        """
        calls, self.calls = _joined(self.calls), []
        if not calls:
            raise RuntimeError("The gradients were summed already; their memory is used again.")
        if self._kept is not None:
            calls = [Rows.call(self._kept)]
            self._kept = None
        if records is not None:
            calls = [call.of(records) for call in calls]
        sums = [c.form.weighted_sum(c.v, c.u, weights.to(c.u.dtype)) for c in calls]
        total = reduce(torch.add, (each.reshape(-1) for each in sums))
        while self._borrowed:
            self._memory.give_back(self._borrowed.pop())
        return total

    def entries(self, places: Tensor) -> Tensor:
        """g_i at some places of the flat parameter: shape (n, places)."""
        parts = (call.form.entries(call.v, call.u, self._shape, places) for call in self.calls)
        return reduce(torch.add, parts)

    def combine(
        self, weight: float, others: Sequence[tuple[float, ParameterGradients]]
    ) -> ParameterGradients:
        """Per record ``weight * g + Σ weight_k * g_k``; the others at other points."""
        calls = [_times(call, weight) for call in _joined(self.calls) if weight]
        for other_weight, other in others:
            new = [_times(call, other_weight) for call in _joined(other.calls)]
            if len(new) == len(calls):
                pairs = zip(calls, new, strict=True)
                calls = [part for pair in pairs for part in _both(*pair)]
            else:
                calls += new
        return ParameterGradients(calls, self._shape, self._memory)


def _sum_of_rows(calls: Sequence[Call]) -> Tensor:
    return reduce(torch.add, (call.form.rows(call.v, call.u) for call in calls))


def _is_rows_of(call: Call, count: int) -> bool:
    return isinstance(call.form, Rows) and len(call.u) == count


def _joined(calls: Sequence[Call]) -> list[Call]:
    """Calls of the same form together, where the form does that; all saw the same records."""
    if len(calls) == 1:
        return list(calls)
    forms = dict.fromkeys(call.form for call in calls)
    return [each for form in forms for each in form.joined([c for c in calls if c.form == form])]


def _times(call: Call, weight: float) -> Call:
    return call if weight == 1 else replace(call, u=call.u * weight)


def _both(here: Call, there: Call) -> list[Call]:
    """The sum of two calls, at different points."""
    alike = here.form == there.form and here.v.shape == there.v.shape
    if not alike or here.u.shape != there.u.shape:
        return [here, there]
    return here.form.both(here, there)
