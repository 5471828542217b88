"""The form of convolutions in any number of dimensions, stride, padding, dilation and groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.gradients.bilinear import (
    PRODUCTS,
    SLICE_BYTES,
    AbstractForm,
    Folding,
    OuterProduct,
    Use,
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
        if v.device.type != "cpu" or not self._has_patches:
            return False
        patches = math.prod(self.weight_shape[1:]) * u.shape[3:].numel()
        return patches <= _PATCHES_PER_CHANNEL * self.weight_shape[0]

    def _products(self, v: Tensor, u: Tensor, out: Tensor) -> None:
        """Write down what the kernel sees at each position, of some records at a time."""
        size = max(1, _ENTRIES // (math.prod(self.weight_shape[1:]) * u[:1, :, 0].numel() or 1))
        for x, y, rows in zip(*(torch.split(each, size) for each in (v, u, out)), strict=True):
            x, y = self._as_outer_product(x, y)
            torch.bmm(y.transpose(1, 2), x, out=rows.flatten(2))

    @property
    def _has_patches(self) -> bool:
        return len(self.stride) == 2 and self.groups == 1

    def _positions(self, u: Tensor) -> int:
        """Return how many output positions a record has, in all its rows."""
        return u.shape[1:].numel() // self.weight_shape[0]

    def _as_outer_product(self, v: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the kernel sees at each position, and what came back: those of a linear layer.

        Shapes (n, f · positions, in · kernel) and (n, f · positions, out).
        """
        v, u = self._of_rows(v), self._of_rows(u).flatten(3)
        seen = F.unfold(
            v.flatten(0, 1), self.weight_shape[2:], self.dilation, self.padding, self.stride
        )
        seen = seen.view(*v.shape[:2], *seen.shape[1:])
        x, y = (each.transpose(1, 2).flatten(2).transpose(1, 2) for each in (seen, u))
        return x, y

    def _convolutions(self, v: Tensor, u: Tensor, out: Tensor) -> None:
        """Run the records as groups of a convolution, some of them at a time."""
        # (n, f, in, ...) as (f, n·in, ...): with n times as many groups no channel of one record
        # meets one of another, so the weight gradient has a block for each record.
        size = _TOGETHER if v.device.type == "cpu" else len(v) or 1  # a call costs a device more
        parts = zip(*(torch.split(each, size) for each in (v, u, out)), strict=True)
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
        positions, patch = self._positions(u), shape[1:].numel()
        if not self._has_patches or not 0 < positions * len(places) <= shape.numel():
            return super().entries(v, u, shape, places)  # all of them are no more work
        size = max(1, SLICE_BYTES // (4 * positions * max(patch, len(places))))
        found = []
        for part in zip(torch.split(v, size), torch.split(u, size), strict=True):
            x, y = self._as_outer_product(*part)
            products = y.index_select(2, places // patch) * x.index_select(2, places % patch)
            found.append(products.sum(1))
        return torch.cat(found)

    def lengths(self, v: Tensor, u: Tensor) -> Tensor:
        overlaps = math.prod(self.weight_shape[2:])  # patches that have a position
        return super().lengths(v, u) * math.sqrt(overlaps)

    def squared_norms(self, uses: Sequence[Use], *, may_keep: bool) -> Tensor | None:
        """Return squared norms from inner products of patches and of output gradients, if these are few.

        They are those of a linear layer whose inputs are the patches, which are written down for some
        records at a time.
        """
        outputs, patch = self.weight_shape[0], math.prod(self.weight_shape[1:])
        positions = sum(self._positions(use.u) for use in uses)
        is_few = 0 < 2 * positions * (patch + outputs) <= outputs * patch
        if not (self._has_patches and is_few):
            return None
        size = max(1, min(PRODUCTS // positions**2, SLICE_BYTES // (4 * positions * patch)))
        found = []
        for start in range(0, len(uses[0].u), size):
            parts = [use.of(slice(start, start + size)) for use in uses]
            factors = [self._as_outer_product(use.v, use.u) for use in parts]
            v, u = (torch.cat(each, 1) for each in zip(*factors, strict=True))
            found.append(OuterProduct().squares(v, u))
        return torch.cat(found)
