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

from lightning_dp.gradients.bilinear import (
    PRODUCTS,
    SLICE_BYTES,
    AbstractForm,
    Folding,
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
_PATCHES_PER_CHANNEL = 640
_ENTRIES = 1 << 18  # of patches that are written down at once: they stay in the cache


@dataclass(frozen=True)
class Convolution(AbstractForm):
    """The weight gradient of a convolution of (n, in, *size) with output gradient (n, out, *size).

    Where a record has f rows, both have a second dimension for them: (n, f, in, *size).

    The records' gradients are those of one convolution with n times as many groups, one record
    after the other in the channels, or products with what the kernel sees: which of the two is decided
    by the shapes, so that all processes do the same. Norms of wide layers on small maps come
    from inner products.
    """

    weight_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def rows(self, v: Tensor, u: Tensor) -> Tensor:
        v, u = self._of_rows(v), self._of_rows(u)
        rows = u.new_empty(len(u), *self.weight_shape)
        (self._products if self._prefers_products(v, u) else self._convolutions)(v, u, rows)
        return rows

    def _prefers_products(self, v: Tensor, u: Tensor) -> bool:
        """Return whether matrix products are likely to be faster than convolutions, by shapes alone."""
        if v.device.type != "cpu" or self.groups > 1 or len(self.stride) != 2:
            return False
        patches = math.prod(self.weight_shape[1:]) * u.shape[-len(self.stride) :].numel()
        return patches <= _PATCHES_PER_CHANNEL * self.weight_shape[0]

    def _products(self, v: Tensor, u: Tensor, out: Tensor) -> None:
        """Write down what the kernel sees at each position, of some records at a time."""
        patch = math.prod(self.weight_shape[1:])
        size = max(1, _ENTRIES // (patch * u[:1, :, 0].numel() or 1))
        kernel, options = self.weight_shape[2:], (self.dilation, self.padding, self.stride)
        parts = zip(*(torch.split(each, size) for each in (v, u, out)), strict=True)
        for x, y, rows in parts:
            seen = F.unfold(x.flatten(0, 1), kernel, *options)
            seen = seen.view(*x.shape[:2], *seen.shape[1:])
            # The positions of all rows of a record: (n, f, channels, positions) -> (n, channels, all).
            y, seen = (each.transpose(1, 2).flatten(2) for each in (y.flatten(3), seen))
            torch.bmm(y, seen.transpose(1, 2), out=rows.flatten(2))

    def _convolutions(self, v: Tensor, u: Tensor, out: Tensor) -> None:
        """Run the records as groups of a convolution, some of them at a time."""
        # (n, f, in, ...) as (f, n·in, ...): with n times as many groups no channel of one record
        # meets one of another, so the weight gradient has a block for each record.
        parts = zip(*(torch.split(each, _TOGETHER) for each in (v, u, out)), strict=True)
        for x, y, rows in parts:
            n = len(x)
            x, y = (part.transpose(0, 1).flatten(1, 2) for part in (x, y))
            shape = (n * self.weight_shape[0], *self.weight_shape[1:])
            rows.copy_(self._backward(x, y, shape, n * self.groups).view_as(rows))

    def weighted_sum(self, v: Tensor, u: Tensor, weights: Tensor) -> Tensor:
        scaled = u * weights.view(-1, *[1] * (u.dim() - 1))
        v, scaled = (self._of_rows(each).flatten(0, 1) for each in (v, scaled))
        return self._backward(v, scaled, self.weight_shape, self.groups)

    def of_records(self, use: Use, folding: Folding) -> Use:
        return Use(self, folding(use.v), folding(use.u))

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
        overlaps = math.prod(self.weight_shape[2:])  # patches that have a position
        return super().lengths(v, u) * math.sqrt(overlaps)

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
        size = max(1, PRODUCTS // max(1, inner**2))
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
