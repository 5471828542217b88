"""Norms and sums of gradients per record, from what each parameter's layers saw and got back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce

import torch
from torch import Tensor

from lightning_dp._refusals import RefusedRun
from lightning_dp._world import held_here, sum_into_shard
from lightning_dp.functional import (
    flat_dtype,
    flat_memory,
    full_precision,
    parts_of,
    squared_row_norms,
    squares_of_products,
    where_used,
)
from lightning_dp.gradients.base import (
    AbstractPerSampleGradients,
    number_of_records,
)
from lightning_dp.gradients.bilinear import (
    Rows,
    Use,
    hidden_by_rounding,
    in_slices,
    squares_of_tied,
)

__all__ = [
    "Allowance",
    "BookkeptGradients",
    "MaterialisedGradients",
    "ParameterGradients",
    "ScratchPool",
    "at_least_float32",
    "places_in",
    "restricted",
    "without_zeros",
]


# Gradients of all records that are larger than what they are made from are kept for the sum, beyond
# that, up to this much.
_KEEP_BYTES = 64 << 20


class Allowance:
    """Bytes that gradients of all records may take, beyond what they are made from, in one pass."""

    def __init__(self, left: int | None = None) -> None:
        self.left = _KEEP_BYTES if left is None else left


class ScratchPool:
    """Large tensors that one step after another uses: fresh memory costs more than the sums in it.

    A tensor belongs to whoever took it, until it is given back.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, count: int, shape: torch.Size, like: Tensor) -> Tensor:
        """Return a tensor of at least ``count`` rows of a shape; batches differ in size."""
        free = self._free.get((shape, like.dtype, like.device))
        tensor = free.pop() if free else None
        if tensor is None or len(tensor) < count:
            tensor = like.new_empty((count + count // 8, *shape))
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Let others take the tensor."""
        key = (tensor.shape[1:], tensor.dtype, tensor.device)
        self._free.setdefault(key, []).append(tensor)


def without_zeros(weights: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the weights of records that have a part in a sum, which these are, and which are not.

    The latter two as :meth:`ParameterGradients.add_weighted_sum` takes them: 0 * NaN is NaN.
    """
    if weights.device.type != "cpu":
        return weights, None, weights == 0  # a look at them would wait for the device
    if weights.all():
        return weights, None, None
    records = weights.nonzero().flatten()
    return weights[records], records, None


class ParameterGradients:
    """The gradients of one parameter for the n records of a chunk.

    Args:
        uses: all its uses.
        shape: its shape.
        memory: where gradients of all records are put, if they are kept.
        allowance: how many may be.
    """

    def __init__(
        self,
        uses: Sequence[Use],
        shape: torch.Size,
        memory: ScratchPool | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self.uses = list(uses)
        self._shape, self._numel = shape, shape.numel()
        self._memory = ScratchPool() if memory is None else memory
        self._allowance = Allowance() if allowance is None else allowance
        self._kept: Use | None = None
        self._squares: tuple[Tensor, Tensor] | None = None  # some rows, and their squared norms
        self._borrowed: list[Tensor] = []  # to be given back

    def add(self, use: Use, *, combined: bool) -> None:
        """Count in one more use.

        Unless ``combined`` with others at a point nearby, where differences would lose digits, the
        gradients of all records may stand for what they are made from, if smaller or quicker.
        """
        if not (combined or isinstance(use.form, Rows)) and self._is_made_at_once(use):
            use = self._made(use)
        last = self.uses[-1] if self.uses else None
        are_rows = last is not None and isinstance(use.form, Rows) and last.form == use.form
        if last is not None and are_rows and len(last.u) == len(use.u):
            self.uses[-1:] = use.form.joined([last, use])  # not one of them for each time step
        else:
            self.uses.append(use)

    def _is_made_at_once(self, use: Use) -> bool:
        """Return whether gradients take the place of v and u: smaller, or cheap and not much larger."""
        more = self._size(use) - use.nbytes
        if more > 0:
            if more > self._allowance.left or not use.form.prefers_rows(use.v, use.u):
                return False
            self._allowance.left -= more
        return True

    def _size(self, use: Use) -> int:
        """Return the bytes of the gradients of all records."""
        return use.u.shape[0] * self._numel * use.u.element_size()

    def factors(self) -> tuple[Tensor, ...] | None:
        """Return tensors whose norms multiply to those of the gradients; None if something is known.

        As :func:`~lightning_dp.functional.squares_of_products` takes them: of float32, on the CPU.
        """
        if len(self.uses) > 1:
            self.uses = _joined(self.uses)
        u, v = self.uses[0].u, self.uses[0].v
        is_plain = u.dtype is v.dtype is torch.float32 and u.is_cpu and v.is_cpu
        if len(self.uses) > 1 or self._squares is not None or not is_plain:
            return None
        return self.uses[0].form.factors(v, u)

    def squared_norms(self) -> Tensor:
        """Return the squared L2 norm of each record's gradient, shape (n,), float64."""
        self.uses = _joined(self.uses)
        size = self._size(self.uses[0])
        may_keep = size <= self._allowance.left
        # A norm is not a sum over uses: ‖Σ f(v, u)‖² has products between all of them, which a form
        # knows for its own uses only.
        forms = {use.form for use in self.uses}
        if len(forms) == 1:
            if (known := self._known_squares(self.uses)) is not None:
                return known
            cheap = forms.pop().squared_norms(self.uses, may_keep=may_keep)
        else:
            cheap = squares_of_tied(self.uses, may_keep=may_keep)
        if cheap is not None:
            return cheap
        if may_keep:
            self._allowance.left -= size
            self._kept = self._made(*self.uses)
            # Of the very numbers that are summed: no margin.
            known = self._known_squares([self._kept])
            return squared_row_norms(self._kept.u) if known is None else known
        squares = in_slices(self._squares_of_rows, 4 * self._numel, *_tensors(self.uses))
        # The sum is made from other sums of the same terms, rounded in another way.
        lengths = reduce(torch.add, (use.form.lengths(use.v, use.u) for use in self.uses))
        return torch.maximum(squares, hidden_by_rounding(lengths, self.uses[0].u.dtype))

    def _squares_of_rows(self, *tensors: Tensor) -> Tensor:
        pairs = zip(self.uses, tensors[::2], tensors[1::2], strict=True)
        return squared_row_norms(_sum_of_rows([replace(use, v=v, u=u) for use, v, u in pairs]))

    def _made(self, *uses: Use) -> Use:
        """Return the gradients of all records, in memory that is used again if the form says so."""
        first = uses[0]
        if len(uses) > 1:
            return Rows.use(_sum_of_rows(uses))
        rows, squares = first.form.rows_in(first.v, first.u, partial(self._borrow, first.u))
        if squares is not None:
            self._squares = rows, squares
        return Rows.use(rows)

    def _borrow(self, like: Tensor) -> Tensor:
        memory = self._memory.take(len(like), self._shape, like)
        self._borrowed.append(memory)
        return memory[: len(like)]

    def _known_squares(self, uses: Sequence[Use]) -> Tensor | None:
        """Return the squared norms that were computed with the rows, if these rows are all there is."""
        if self._squares is None or len(uses) != 1:
            return None
        rows, squares = self._squares
        return squares if uses[0].u is rows else None

    def add_weighted_sum(
        self,
        weights: Tensor,
        onto: Tensor,
        records: Tensor | None = None,
        left_out: Tensor | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        """Add Σ_i weights_i g_i to a flat vector; to be asked for once.

        Args:
            weights: of the records.
            onto: the vector.
            records: which ones, if not all; the others are left out, whatever they hold.
            left_out: true for those that are left out, where they are not to be counted.
            is_new: nothing was written into the vector, whose entries count for nothing.
        """
        uses = self.uses if self._kept is None else [self._kept]
        if len(uses) > 1:
            uses = _joined(uses)
        if not uses:
            raise RefusedRun(
                "weighted_sum() may be called once; its buffers are reused.",
                topic="out-of-order",
            )
        if records is not None:
            uses = [use.of(records) for use in uses]
        weights = weights if weights.dtype is onto.dtype else weights.to(onto.dtype)
        for use in uses:
            if left_out is not None:
                use = use.without(left_out)
            use = use if use.u.dtype is onto.dtype else use.to(onto.dtype)
            use.form.add_weighted_sum(use, weights, onto, is_new=is_new)
            is_new = False
        self.discard()

    def discard(self) -> None:
        """Give back the memory that is used again; nothing can be asked for after it."""
        self.uses, self._kept, self._squares = [], None, None
        while self._borrowed:
            self._memory.give_back(self._borrowed.pop())

    @property
    def _quickest(self) -> list[Use]:
        """Uses from which sums and entries are made; differences keep their digits in others."""
        return self.uses if self._kept is None else [self._kept]

    def of(self, records: Tensor) -> ParameterGradients:
        """Return the same for some of the records; nothing is computed."""
        parts = [use.of(records) for use in self._quickest]
        return ParameterGradients(parts, self._shape, None, self._allowance)

    def entries(self, places: Tensor) -> Tensor:
        """Return g_i at some places of the flat parameter: shape (n, places)."""
        parts = (use.form.entries(use.v, use.u, self._shape, places) for use in self._quickest)
        return reduce(torch.add, parts)

    def combine(
        self,
        weight: float,
        others: Sequence[tuple[float, ParameterGradients]],
        allowance: Allowance | None = None,
    ) -> ParameterGradients:
        """Return per record ``weight * g + Σ weight_k * g_k``; the others at other points."""
        uses = [_times(use, weight) for use in _joined(self.uses) if weight]
        for other_weight, other in others:
            new = [_times(use, other_weight) for use in _joined(other.uses)]
            if len(new) != len(uses):
                uses += new
                continue
            pairs, uses = zip(uses, new, strict=True), []
            for a, b in pairs:
                are_alike = a.form == b.form and a.v.shape == b.v.shape and a.u.shape == b.u.shape
                uses += a.form.both(a, b) if are_alike else [a, b]
        return ParameterGradients(uses, self._shape, self._memory, allowance)


def _tensors(uses: Sequence[Use]) -> list[Tensor]:
    return [each for use in uses for each in (use.v, use.u)]


def _sum_of_rows(uses: Sequence[Use]) -> Tensor:
    return reduce(torch.add, (use.form.rows(use.v, use.u) for use in uses))


def _joined(uses: Sequence[Use]) -> list[Use]:
    """Join uses of the same form, where the form does that; all saw the same records."""
    if len(uses) == 1:
        return list(uses)
    forms = dict.fromkeys(use.form for use in uses)
    return [each for form in forms for each in form.joined([c for c in uses if c.form == form])]


def _times(use: Use, weight: float) -> Use:
    return use if weight == 1 else replace(use, u=use.u * weight)


class BookkeptGradients(AbstractPerSampleGradients):
    """Gradients per record that are never made: for each parameter, what its layers saw and got back.

    Args:
        params: the trained parameters, in the order of flat vectors.
        gradients: for each parameter, or None where it was not used.
        scale: multiplies all of them; the loss was the mean over the records.
        count: n; None if gradients tell it, and it is 0 where there are none.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        gradients: Sequence[ParameterGradients | None],
        scale: float,
        count: int | None = None,
    ) -> None:
        self._params, self._gradients = params, gradients
        self._used = [gradient for gradient in gradients if gradient is not None]
        counts = {len(use.u) for gradient in self._used for use in gradient.uses}
        self._count = number_of_records(counts if count is None else counts | {count})
        self._dtype = params[0].dtype if params else torch.float32
        self._scale, self._factor = scale, scale * self._count

    @property
    def count(self) -> int:
        return self._count

    def of(self, records: Tensor) -> BookkeptGradients:
        """Return the same for some of the records, in their order; nothing is computed."""
        parts = [None if each is None else each.of(records) for each in self._gradients]
        # The mean is still over all of them.
        scale = self._scale * self._count / max(1, len(records))
        return BookkeptGradients(self._params, parts, scale, len(records))

    def norms(self) -> Tensor:
        if not self._used:
            none = torch.zeros(self._count, dtype=torch.float64)
            return where_used(none, self._params[0].device)
        with full_precision(self._params[0].device):
            factors, others = [], []
            for each in self._used:
                if (product := each.factors()) is None:
                    others.append(each.squared_norms())
                else:
                    factors.append(product)
            if factors:
                others.append(squares_of_products(factors))
            norms = reduce(torch.add, others).sqrt_().mul_(abs(self._factor))
        return where_used(norms, self._params[0].device)

    def norms_by_parameter(self) -> Tensor:
        device = self._params[0].device
        norms = torch.zeros(self._count, len(self._params), dtype=torch.float64)
        for place, gradient in enumerate(self._gradients):
            if gradient is not None:
                with full_precision(device):
                    squares = gradient.squared_norms()
                norms = norms.to(squares)  # of a device with float64 it stays there
                norms[:, place] = squares.sqrt() * abs(self._factor)
        return where_used(norms, device)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = flat_memory(held_here(self._params))
        self.add_weighted_sum(weights, total, is_new=True)
        return total

    def add_weighted_sum(self, weights: Tensor, onto: Tensor, *, is_new: bool = False) -> None:
        parts = parts_of(onto, held_here(self._params))
        with full_precision(onto.device):
            for _ in self._added(weights, parts, is_new=is_new):
                pass

    def sums_by_parameter(self, weights: Tensor) -> Iterator[Tensor]:
        sizes = list(map(Tensor.numel, here := held_here(self._params)))
        memory = here[0].new_empty(max(sizes), dtype=flat_dtype(here))
        with full_precision(memory.device):
            yield from self._added(weights, (memory[:size] for size in sizes), is_new=True)

    def _added(self, weights: Tensor, parts: Iterable[Tensor], *, is_new: bool) -> Iterator[Tensor]:
        """Add each parameter's sum to the flat part for it, and yield that."""
        weights = (weights * self._factor).to(torch.promote_types(self._dtype, torch.float32))
        of_all = without_zeros(weights) if weights.dim() == 1 else None
        each = zip(self._params, held_here(self._params), parts, self._gradients, strict=True)
        for place, (param, held, part, gradient) in enumerate(each):
            # Of sharded parameters one whole gradient at a time, on all processes together.
            whole = part if held is param else part.new_zeros(param.numel())
            if is_new and (gradient is None or whole is not part):
                part.zero_()
            if gradient is not None:
                is_first = is_new and whole is part
                own, records, left_out = of_all or without_zeros(weights[:, place])
                gradient.add_weighted_sum(own, whole, records, left_out, is_new=is_first)
            if whole is not part:
                sum_into_shard(whole.view(param.shape), part, param)
            yield part

    def discard(self) -> None:
        for gradient in self._used:
            gradient.discard()

    def restrict(self, coordinates: Tensor) -> MaterialisedGradients:
        chosen = list(places_in(coordinates, self._params))
        return restricted(self._columns(chosen), self._factor)

    def _columns(self, chosen: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients at some places of each parameter, which are not yet scaled."""
        parts = []
        for param, gradient, places in zip(self._params, self._gradients, chosen, strict=True):
            dtype = torch.promote_types(param.dtype, torch.float32)
            if gradient is None or not len(places):
                none = torch.zeros(self._count, len(places), dtype=dtype, device=param.device)
                parts.append(none)
                continue
            with full_precision(param.device):
                parts.append(gradient.entries(places).to(dtype))
        return parts

    def combine(
        self, weight: float, others: Sequence[tuple[float, AbstractPerSampleGradients]]
    ) -> BookkeptGradients:
        points: list[tuple[float, BookkeptGradients]] = []
        for other_weight, other in others:
            if not isinstance(other, BookkeptGradients) or other.count != self.count:
                raise TypeError("Only gradients of the same records and engine can be combined.")
            points.append((other_weight * other._scale, other))
        combined: list[ParameterGradients | None] = []
        allowance = Allowance()
        for place, param in enumerate(self._params):
            there = [(w, g) for w, each in points if (g := each._gradients[place]) is not None]
            here = self._gradients[place]
            if here is None and not there:
                combined.append(None)
                continue
            here = ParameterGradients([], param.shape) if here is None else here
            combined.append(here.combine(weight * self._scale, there, allowance))
        return BookkeptGradients(self._params, combined, 1.0, self._count)


# -- gradients that are all in memory -------------------------------------------------------------


class MaterialisedGradients(BookkeptGradients):
    """One tensor of shape (n, *parameter shape) per parameter.

    Args:
        params: the trained parameters, in the order of flat vectors.
        gradients: for each parameter its per-sample gradients, or None where it was not used.
        scale: multiplies all of them.
    """

    def __init__(
        self, params: Sequence[Tensor], gradients: Sequence[Tensor | None], scale: float
    ) -> None:
        parts = [
            None
            if rows is None
            else ParameterGradients([Rows.use(at_least_float32(rows))], rows.shape[1:])
            for rows in gradients
        ]
        super().__init__(params, parts, scale)
        self._scale, self._factor = scale / max(1, self._count), scale

    def entries(self) -> Tensor:
        """Return each record's gradient as a row, shape (n, d); before they are summed."""
        every = [torch.arange(param.numel(), device=param.device) for param in self._params]
        parts = self._columns(every)
        return torch.cat(parts, dim=1) * self._factor


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it is in half of that."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def restricted(parts: Sequence[Tensor], scale: float) -> MaterialisedGradients:
    """Return gradients at some coordinates only, from the columns that belong to each parameter."""
    rows = torch.cat(list(parts), dim=1)
    return MaterialisedGradients([rows.new_empty(rows.shape[1])], [rows], scale)


def places_in(coordinates: Tensor, params: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the places in each parameter, on its device, of sorted places in flat vectors.

    No device is waited for, if the coordinates are on the host.
    """
    sizes = torch.tensor([param.numel() for param in params], device=coordinates.device)
    ends = sizes.cumsum(0)
    cuts = torch.searchsorted(coordinates.contiguous(), ends).tolist()
    for param, end, start, stop in zip(params, ends.tolist(), [0, *cuts], cuts, strict=False):
        yield (coordinates[start:stop] - (end - param.numel())).to(param.device)
