"""Gradients per record of a convolution's weight, as matrix products for each line of the kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_dp.functional import squared_row_norms
from lightning_dp.gradients.forms import AbstractForm, Rows, Use

__all__ = ["Lines", "Window"]


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
