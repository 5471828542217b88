"""The form of convolutions in any number of dimensions, stride, padding, dilation and groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.functional import squared_row_norms
from lightning_dp.gradients.bilinear import (
    PRODUCTS,
    SLICE_BYTES,
    AbstractFolding,
    AbstractForm,
    Rows,
    Scaled,
    Use,
    above_rounding,
    above_what_vanishes,
    sum_in_float64,
)

__all__ = ["Convolution"]


_TOGETHER = 32  # records in one convolution: batches of every size stay fast

# Writing down what the kernel sees pays if each of its entries is used for enough output channels. The
# bound was fitted to timings of many shapes on one core; it decides about time alone.
_PATCHES_PER_CHANNEL = 4096


@dataclass(frozen=True)
class Convolution(AbstractForm):
    """The weight gradient of a convolution of (n, in, *size) with output gradient (n, out, *size).

    Where a record has f rows, both have a second dimension for them: (n, f, in, *size).

    The records' gradients are those of one convolution with n times as many groups, one record
    after the other in the channels, or products with what lines of the kernel see: which of the two is
    decided by the shapes, so that all processes do the same. Norms of wide layers on small maps come
    from inner products.
    """

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        use = self.put(v, u, u.new_empty(len(u) * math.prod(self.weight_shape)))
        return use.form.rows(use.v, use.u)

    def writes_out(self, v: Tensor, u: Tensor) -> bool:
        return True

    def keeps_memory(self) -> bool:
        return False  # the backward pass has just freed as much, and the next forward pass needs it

    def put(self, v: Tensor, u: Tensor, out: Tensor) -> Use:
        v, u = self._of_rows(v), self._of_rows(u)
        if not self._prefers_products(v, u):
            rows = out.view(len(u), *self.weight_shape)
            self._convolutions(v, u, rows)
            return Rows.use(rows)
        outputs, inputs, *kernel = self.weight_shape
        window = Window.of(kernel, self.stride, self.padding, self.dilation)
        lines, *rest = window.kernel
        by_line = out.view(lines, len(u), outputs, *rest, inputs)
        window.put_products(v, u, by_line.flatten(3))
        by_record = by_line.transpose(0, 1)
        return Use(Lines(self.weight_shape), by_record, by_record)

    def _prefers_products(self, v: Tensor, u: Tensor) -> bool:
        """Tell from the shapes if matrix products are likely to be faster than convolutions."""
        if v.device.type != "cpu" or self.groups > 1:
            return False
        patches = math.prod(self.weight_shape[1:]) * u.shape[-len(self.stride) :].numel()
        return patches <= _PATCHES_PER_CHANNEL * self.weight_shape[0]

    def _convolutions(self, v: Tensor, u: Tensor, out: Tensor) -> None:
        """Run the records as groups of a convolution, some of them at a time."""
        # (n, f, in, ...) as (f, n·in, ...): with n times as many groups no channel of one record
        # meets one of another, so the weight gradient has a block for each record.
        start = 0
        for x, y in zip(torch.split(v, _TOGETHER), torch.split(u, _TOGETHER), strict=True):
            n = len(x)
            x, y = (part.transpose(0, 1).flatten(1, 2) for part in (x, y))
            shape = (n * self.weight_shape[0], *self.weight_shape[1:])
            rows = self._backward(x, y, shape, n * self.groups)
            out[start : start + n] = rows.view(n, *self.weight_shape)
            start += n

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        scaled = u * weights.view(-1, *[1] * (u.dim() - 1))
        v, scaled = (self._of_rows(each).flatten(0, 1) for each in (v, scaled))
        return self._backward(v, scaled, self.weight_shape, self.groups)

    def of_records(self, use: Use, folding: AbstractFolding) -> list[Use]:
        return [Use(self, folding.apart(use.v), folding.apart(use.u))]

    def _of_rows(self, tensor: Tensor) -> Tensor:
        """Return shape (n, f, channels, *size), f = 1 where a record has one row."""
        has_rows = tensor.dim() == 3 + len(self.stride)
        return tensor if has_rows else tensor.unsqueeze(1)

    def _backward(self, v: Tensor, u: Tensor, shape: tuple[int, ...], groups: int) -> Tensor:
        weight = v.new_empty(1).expand(shape)  # only its shape is looked at
        gradient: Tensor = torch.ops.aten.convolution_backward(
            u, v, weight, None, self.stride, self.padding, self.dilation,
            False, [0] * len(self.stride), groups, [False, True, False],
        )[1]  # fmt: skip
        return gradient

    def entries(self, v: Tensor, u: Tensor, shape: torch.Size, places: Tensor) -> Tensor:
        v, u = self._of_rows(v), self._of_rows(u)
        each = u.shape[1] * u.shape[3:].numel() * len(places)
        if len(self.stride) != 2 or self.groups > 1 or not 0 < each <= shape.numel():
            return super().entries(v, u, shape, places)  # all of them are no more work
        at = torch.unravel_index(places, shape)
        size = max(1, SLICE_BYTES // (4 * each))
        parts = zip(torch.split(v, size), torch.split(u, size), strict=True)
        return torch.cat([self._entries_at(*part, at) for part in parts])

    def _entries_at(self, v: Tensor, u: Tensor, at: Sequence[Tensor]) -> Tensor:
        """Return entries of each record's gradient, from what the kernel's entries see."""
        output, channel, *entry = at
        padded = self._padded(v.flatten(0, 1))
        seen = padded.view(*v.shape[:2], *padded.shape[1:])
        for k in range(2):
            reach = self.dilation[k] * (self.weight_shape[2 + k] - 1) + 1
            seen = seen.unfold(3 + k, reach, self.stride[k])
        line, column = (k * d for k, d in zip(entry, self.dilation, strict=True))
        seen = seen[:, :, channel, :, :, line, column]  # (places, n, f, *positions)
        return (u[:, :, output].permute(2, 0, 1, 3, 4) * seen).flatten(2).sum(2).T

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        return super().lengths(v, u) * math.sqrt(
            math.prod(self.weight_shape[2:])
        )  # overlapping patches

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        """Return squared norms from inner products of patches and of output gradients, if these are few.

        ‖Σ_s u_s p_sᵀ‖² = Σ_st (u_s · u_t)(p_s · p_t) over output positions s and t. The products of
        patches are sums of those of single positions: nothing of the patches' size is made.
        """
        # A weight that several rows of a record use is a weight that is used several times.
        uses = [row for use in uses for row in self._one_for_each_row(use)]
        v, u = uses[0].v, uses[0].u
        if len(self.stride) != 2 or self.groups > 1 or any(c.v.shape != v.shape for c in uses):
            return None
        outputs, channels, *kernel = self.weight_shape
        inner, outer = self._padded(v).shape[2:].numel(), u.shape[2:].numel()
        products = inner**2 * channels + outer**2 * (outputs + math.prod(kernel))
        if (len(uses) + 1) * products > outer * outputs * channels * math.prod(kernel):
            return None
        size = max(1, PRODUCTS // inner**2)
        parts = (slice(start, start + size) for start in range(0, len(u), size))
        return torch.cat([self._squares([use.of(part) for use in uses]) for part in parts])

    def _one_for_each_row(self, use: Use) -> list[Use]:
        v, u = self._of_rows(use.v), self._of_rows(use.u)
        return [Use(self, v[:, k], u[:, k]) for k in range(u.shape[1])]

    def _squares(self, uses: Sequence[Use]) -> Tensor:
        scaled = [(Scaled.of(use.v), Scaled.of(use.u)) for use in uses]
        units = torch.stack([v.units * u.units for v, u in scaled])
        largest = units.amax(0)
        pairs = zip(scaled, units, strict=True)
        parts = [(v.tensor, u.tensor, unit / largest) for (v, u), unit in pairs]
        squares = self._squares_of(parts) * largest.square()
        return reduce(lambda so_far, each: above_what_vanishes(so_far, *each), scaled, squares)

    def _squares_of(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """Return ‖Σ weight f(v, u)‖² of each record, over (v, u, weight)."""
        total = torch.zeros_like(parts[0][2])
        lengths = torch.zeros_like(total)
        # ‖Σ_a f_a‖² = Σ_a ‖f_a‖² + 2 Σ_(b<a) f_a · f_b over the uses a and b of the weight.
        for i, (v, u, weight) in enumerate(parts):
            for j, (v2, u2, weight2) in enumerate(parts[: i + 1]):
                us = torch.bmm(u.flatten(2).transpose(1, 2), u2.flatten(2))
                products = self._patch_products(v, v2, u.shape[2:]) * us.view(len(us), -1)
                sums = sum_in_float64(products) * weight * weight2
                total += sums if i == j else 2 * sums
                if i == j:
                    # ‖u_s p_s‖ of each position s, from the diagonal: how long the terms are that may
                    # have cancelled, for the margin of rounding errors.
                    own = products.view(us.shape).diagonal(dim1=1, dim2=2).clamp(min=0.0)
                    lengths += sum_in_float64(own.sqrt()) * weight
        return above_rounding(total, lengths, parts[0][1].dtype)

    def _patch_products(self, v: Tensor, w: Tensor, size: torch.Size) -> Tensor:
        """Return inner products of every patch of v with every patch of w, shape (n, positions²)."""
        v, w = self._padded(v), self._padded(w)
        # A patch is the positions at all offsets of the kernel, so p_s · q_t is the sum over offsets k
        # of v[s + k] · w[t + k]: products of single positions, read at places shifted together.
        single = torch.bmm(v.flatten(2).transpose(1, 2), w.flatten(2))
        single = single.view(len(v), *v.shape[2:], *w.shape[2:])
        total: Tensor | None = None
        for offset in itertools.product(*map(range, self.weight_shape[2:])):
            rows, columns = (
                slice(k * d, k * d + (n - 1) * s + 1, s)
                for k, d, n, s in zip(offset, self.dilation, size, self.stride, strict=True)
            )
            part = single[:, rows, columns, rows, columns]
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        return total.view(len(v), -1)

    def _padded(self, v: Tensor) -> Tensor:
        rows, columns = self.padding
        return F.pad(v, (columns, columns, rows, rows))


_ENTRIES = 1 << 18  # of patches that are written down at once: they stay in the cache


@dataclass(frozen=True)
class Window:
    """The places where a convolution's kernel sees its input.

    What one line of the kernel sees (its first dimension is the number of the line) another one sees
    some lines of the input further on. So it is written down once, and each line of the kernel is a
    product with that part of it which begins so much further on.

    Args:
        kernel: its size, as all of these in at least two dimensions.
        stride: of the convolution.
        padding: of the input.
        dilation: of the kernel.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def of(cls, kernel: Sequence[int], *others: Sequence[int]) -> Window:
        """Return a window, where a kernel of one dimension is a single line."""
        if len(kernel) > 1:
            return cls(tuple(kernel), *map(tuple, others))
        stride, padding, dilation = others
        return cls((1, *kernel), (1, *stride), (0, *padding), (1, *dilation))

    def put_products(self, v: Tensor, u: Tensor, out: Tensor) -> None:
        """Write Σ over positions of output gradient times what a line sees there, for each record.

        Args:
            v: the input, shape (n, f, in, *size), for f rows of a record.
            u: the gradient of the output, shape (n, f, out, *size).
            out: shape (lines, n, out, entries of a line).
        """
        if v.dim() == 4:
            v, u = v.unsqueeze(3), u.unsqueeze(3)
        size, u = u.shape[3:], u.flatten(3)
        rows, positions, width = v.shape[1], u.shape[3], size[1:].numel()
        step = max(1, _ENTRIES // (rows * self._entries_seen(v.shape[2], size) or 1))
        for part in (slice(start, start + step) for start in range(0, len(u), step)):
            seen = self._seen(v[part].flatten(0, 1), size)
            seen = seen.view(-1, rows, *seen.shape[1:])
            for line, target in enumerate(out[:, part]):
                further, phase = divmod(line * self.dilation[0], self.stride[0])
                places = slice(further * width, further * width + positions)
                torch.bmm(u[part, 0], seen[:, 0, phase, places], out=target)
                for row in range(1, rows):
                    target.baddbmm_(u[part, row], seen[:, row, phase, places])

    def _lines_seen(self, lines: int) -> tuple[int, int]:
        """Return how many phases of the stride the kernel's lines meet, and the lines in each."""
        reach = self.dilation[0] * (self.kernel[0] - 1)
        return min(self.stride[0], reach + 1), lines + reach // self.stride[0]

    def _entries_seen(self, channels: int, size: torch.Size) -> int:
        """Return the entries of :meth:`_seen` for one row."""
        phases, lines = self._lines_seen(size[0])
        return phases * lines * size[1:].numel() * math.prod(self.kernel[1:]) * channels

    def _seen(self, v: Tensor, size: torch.Size) -> Tensor:
        """Return what a line sees at each position: shape (N, phases, positions, entries of a line).

        The first input line of phase k is line k; between the lines of a phase is the stride.

        Args:
            v: shape (N, in, *size).
            size: of the output.
        """
        phases, lines = self._lines_seen(size[0])
        v = self._padded(v, phases + self.stride[0] * (lines - 1))
        count, line, *others, channel = v.stride()
        moves = (each * s for each, s in zip(others, self.stride[1:], strict=True))
        offsets = (each * d for each, d in zip(others, self.dilation[1:], strict=True))
        seen = v.as_strided(
            (len(v), phases, lines, *size[1:], *self.kernel[1:], v.shape[-1]),
            (count, line, line * self.stride[0], *moves, *offsets, channel),
        )
        return seen.reshape(len(v), phases, lines * size[1:].numel(), -1)

    def _padded(self, v: Tensor, least: int) -> Tensor:
        """Return the padded input with channels last: then a patch's lines are in one piece.

        Args:
            v: shape (N, in, *size).
            least: so many lines there must be.
        """
        first, *others = self.padding
        after = first + max(0, least - v.shape[2] - 2 * first)
        around = [0, 0, *(side for each in reversed(others) for side in (each, each)), first, after]
        v = v.movedim(1, -1)
        if any(around):
            v = F.pad(v, around)
        return v.contiguous() if math.prod(self.kernel[1:]) > 1 else v


@dataclass(frozen=True)
class Lines(Rows):
    """The gradients themselves, line by line of the kernel, of shape (n, lines, out, *rest, in).

    The lines of all records follow each other in memory.

    Args:
        shape: of the weight.
    """

    shape: tuple[int, ...]

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        return _in_order(u, 1).reshape(len(u), *self.shape)

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        sums = torch.stack([weights @ line.flatten(1) for line in u.unbind(1)])
        return _in_order(sums.view(u.shape[1:]), 0)

    def add_weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor, onto: Tensor) -> None:
        AbstractForm.add_weighted_sum(self, v, u, weights, onto)

    def put_weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor, into: Tensor) -> None:
        AbstractForm.put_weighted_sum(self, v, u, weights, into)

    def factors(self, v: Tensor, u: Tensor) -> tuple[Tensor, ...] | None:
        return None

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        return self._squares(u).sqrt()

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        (use,) = uses
        return self._squares(use.u)

    def _squares(self, u: Tensor) -> Tensor:
        return squared_row_norms(u.transpose(0, 1).flatten(0, 1)).view(u.shape[1], -1).sum(0)


def _in_order(tensor: Tensor, first: int) -> Tensor:
    """Return (..., lines, out, *rest, in) as (..., out, in, lines, *rest); ``first`` is that of lines."""
    last = tensor.dim() - 1
    rest = range(first + 2, last)
    return tensor.permute(*range(first), first + 1, last, first, *rest)
