"""Per-sample gradients of a parameter as a bilinear form: a layer's input times what came back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_dp.functional import as_rows, squared_row_norms

__all__ = [
    "PRODUCTS",
    "AbstractForm",
    "Call",
    "Memory",
    "ParameterGradients",
    "Rows",
    "Uses",
    "above_rounding",
    "joined_positions",
    "sum_of_products",
]

# Gradients that are not kept for all records from the norms to the sum are made slice by slice.
_SLICE_BYTES = 4 << 20
PRODUCTS = 1 << 22  # inner products between positions that are in memory at once


# Rounding errors of an inner product, relative to the norms, stay below this many units.
_ROUNDING = 32


def above_rounding(squares: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """‖Σ_s a_s‖² of each record, and not less than rounding may hide.

    Terms that cancel leave errors of the size of (Σ_s ‖a_s‖)², and a norm that came out too small
    would let a record through that is longer than its bound.

    Args:
        squares: as computed from inner products, float64.
        lengths: Σ_s ‖a_s‖.
        dtype: of the inner products.
    """
    return torch.maximum(squares, _ROUNDING * torch.finfo(dtype).eps * lengths.square())


def sum_of_products(products: Tensor) -> Tensor:
    """‖Σ_s a_s‖² of each record from its (T, T) inner products, by :func:`above_rounding`.

    Float32 products, summed in float64: the products in float64 would double the work.
    """
    lengths = products.diagonal(dim1=1, dim2=2).clamp(min=0.0).sqrt().sum(1, dtype=torch.float64)
    return above_rounding(products.sum((1, 2), dtype=torch.float64), lengths, products.dtype)


class AbstractForm(ABC):
    """How a parameter's gradient f(v_i, u_i) of record i is made; linear in v and in u.

    v comes from the layer's input and u is the gradient of its output, records first in both.
    Being bilinear leaves no special cases: a parameter used in several calls is a sum over calls,
    and a combination of gradients at two points is one over differences,
    w f(v, u) + w' f(v', u') = f(v - v', w u) + f(v', w u + w' u'),
    which loses no digits when the points are close.
    """

    @abstractmethod
    def rows(self, v: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        """f(v_i, u_i) of each record: shape (n, *parameter shape).

        Args:
            out: memory for them, if :meth:`writes_out`.
        """

    def writes_out(self, v: Tensor, u: Tensor) -> bool:
        """Whether :meth:`rows` puts these gradients into ``out``."""
        return False

    @abstractmethod
    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        """Σ_i weights_i f(v_i, u_i), of the parameter's shape or flat, without making the rows."""

    def both(self, here: Call, there: Call) -> list[Call]:
        """f(v, u) + f(v', u') as calls that lose no digits where v and v' are close.

        What is done depends on where the tensors are, not on the values in them.
        """
        total = replace(there, u=here.u + there.u)
        if here.v.data_ptr() == there.v.data_ptr():  # the batch itself
            return [total]
        return [replace(here, v=here.v - there.v), total]

    def joined(self, calls: Sequence[Call]) -> list[Call]:
        """The same sum over fewer calls, where that is no more work than each of them by itself."""
        return list(calls)

    def along(
        self,
        v: tuple[Tensor, Tensor | None],
        u: tuple[Tensor, Tensor | None],
        weights: tuple[float, float],
    ) -> list[Call]:
        """w f + w' (the derivative of f along a direction), by the product rule.

        = f(v, w u + w' u̇) + f(v̇, w' u), the derivatives v̇ and u̇ given beside v and u, or None
        where they are zero.
        """
        (value, moved), back = v, _weighted(u, weights)
        calls = [Call(self, value, back)]
        return calls if moved is None else [*calls, Call(self, moved, weights[1] * u[0])]

    def entries(self, v: Tensor, u: Tensor, shape: torch.Size, places: Tensor) -> Tensor:
        """f(v_i, u_i) of each record at some places of the flat parameter: shape (n, k).

        Args:
            shape: of the parameter.
            places: k of them.
        """
        size = max(1, _SLICE_BYTES // (4 * shape.numel()))
        parts = zip(torch.split(v, size), torch.split(u, size), strict=True)
        return torch.cat([as_rows(self.rows(*part))[:, places] for part in parts])

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        """A bound on Σ_s ‖a_s‖ where f(v_i, u_i) = Σ_s a_s is computed, float64, shape (n,)."""
        return (squared_row_norms(v) * squared_row_norms(u)).sqrt()

    def squared_norms(self, calls: Sequence[Call], *, may_keep: bool) -> Tensor | None:
        """‖Σ_calls f(v_i, u_i)‖² of each record as float64, where that is cheaper than the rows.

        Args:
            calls: as :meth:`joined` leaves them.
            may_keep: the rows, if they are made, are kept for the sum.
        """
        return None


@dataclass(frozen=True)
class Call:
    """One use of a parameter in a forward pass, with what came back for it."""

    form: AbstractForm
    v: Tensor
    u: Tensor

    @property
    def nbytes(self) -> int:
        """The memory of its tensors."""
        return self.u.nbytes + (0 if self.v is self.u else self.v.nbytes)

    def of(self, records: Tensor | slice) -> Call:
        """The same for some of the records."""
        return replace(self, v=self.v[records], u=self.u[records])


def joined_positions(calls: Sequence[Call]) -> Call:
    """Calls of one form, of (n, T, ...) tensors, as one call with the positions of all."""
    if len(calls) == 1:
        return calls[0]
    v, u = (torch.cat(parts, dim=1) for parts in zip(*((c.v, c.u) for c in calls), strict=True))
    return replace(calls[0], v=v, u=u)


# Every parameter of a layer, with its use in one call.
Uses: TypeAlias = list[tuple[Tensor | None, Call]]


@dataclass(frozen=True)
class Rows(AbstractForm):
    """The gradients u_i themselves, of shape (n, *parameter shape); v is not used."""

    @classmethod
    def call(cls, u: Tensor) -> Call:
        """A use of which the gradients are known: of a bias, say."""
        return Call(cls(), u, u)

    def rows(self, v: Tensor, u: Tensor, out: Tensor | None = None) -> Tensor:
        return u

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        return weights @ as_rows(u)

    def both(self, here: Call, there: Call) -> list[Call]:
        return [self.call(here.u + there.u)]

    def joined(self, calls: Sequence[Call]) -> list[Call]:
        return [self.call(reduce(torch.add, (call.u for call in calls)))]

    def along(
        self,
        v: tuple[Tensor, Tensor | None],
        u: tuple[Tensor, Tensor | None],
        weights: tuple[float, float],
    ) -> list[Call]:
        return [self.call(call.u) for call in super().along((v[0], None), u, weights)]

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        return squared_row_norms(u).sqrt()

    def squared_norms(self, calls: Sequence[Call], *, may_keep: bool) -> Tensor | None:
        (call,) = calls
        return squared_row_norms(call.u)


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
        """How many records each call saw."""
        return {len(call.u) for call in self.calls}

    @property
    def kept_bytes(self) -> int:
        """How much memory is kept between the norms and the sum."""
        return 0 if self._kept is None else self._kept.nbytes

    def add(self, call: Call, *, may_fold: bool) -> None:
        """Count in one more use.

        Args:
            may_fold: whether the gradients of all records may stand for what they are made from,
                where they are smaller. Differences between two points would lose digits.
        """
        size = len(call.u) * self._numel * call.u.element_size()
        if may_fold and size <= call.nbytes and not isinstance(call.form, Rows):
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
        size = max(1, _SLICE_BYTES // (4 * self._numel))
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


def _weighted(u: tuple[Tensor, Tensor | None], weights: tuple[float, float]) -> Tensor:
    """w u + w' u̇."""
    value, moved = u
    total = value if weights[0] == 1 else weights[0] * value
    return total if moved is None else torch.add(total, moved, alpha=weights[1])


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
