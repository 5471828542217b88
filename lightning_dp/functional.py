"""Stateless functions behind clipping and smoothing, for direct use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dp._validate import number
from lightning_dp.smoothing import laplacian_smoothing

__all__ = ["clip_factors", "flatten", "laplacian_smoothing", "per_sample_norms", "unflatten"]

# float32 norms of long rows come out too small (3.7e-4 at 1e7 elements), and an under-estimated
# norm is an under-clipped record: sum squares in rows of this length (then the error is at most
# 3e-7, also for equal entries, where rounding errors do not cancel), and the rows in float64.
_ROW = 256

# Squares of float32 numbers below 1e-19 vanish: a norm is trusted if what they may hide is nothing
# beside it, else its row is summed again in float64.
_TRUSTED = 1e-10
_ENTRIES = 1 << 16  # of float64 copies: they stay in the cache

# Factors of a product must not come out too small, for what they are multiplied with may be large.
# So a norm has a floor, above all that is rounded to zero somewhere, and it is infinite where
# scaling the other factor down to it would leave too few digits.
_LEAST_FACTOR, _LARGEST_FACTOR = 1e-35, 1e33


def per_sample_norms(gradients: Sequence[Tensor]) -> Tensor:
    r"""L2 norm of each record's gradient over all parameters, :math:`\sqrt{\sum_p \|g_{i,p}\|^2}`.

    Args:
        gradients: one tensor per parameter, each of shape ``(n, *parameter shape)``, n records.

    Returns:
        float64 tensor of shape (n,); non-finite where a record's gradient is.

    Example:
        >>> per_sample_norms([torch.tensor([[3.0], [0.0]]), torch.tensor([[4.0], [2.0]])])
        tensor([5., 2.], dtype=torch.float64)
    """
    squares = [squared_row_norms(gradient) for gradient in gradients]
    return torch.stack(squares).sum(0).sqrt_()


def as_rows(gradient: Tensor) -> Tensor:
    """(n, *shape) as (n, d), also for shape () and for n = 0."""
    return gradient.flatten(1) if gradient.dim() > 1 else gradient.unsqueeze(-1)


def squared_row_norms(gradient: Tensor) -> Tensor:
    """Squared L2 norm of each record's part, accumulated in two levels, as float64.

    Right for all finite float32 numbers, if the rows themselves are what is summed afterwards. Of
    norms that are multiplied take :func:`factor_norms`.
    """
    rows = as_rows(gradient)
    if rows.dtype == torch.float64 or rows.device.type != "cpu":
        return _squares_in_float64(rows)  # elsewhere a look at the norms would wait for the device
    squares = _squares_in_float32(rows.float())
    least, most = (float(each) for each in squares.aminmax()) if len(squares) else (1.0, 1.0)
    small = rows.shape[1] * _TRUSTED**2
    if not (small < least and most < math.inf):
        again = (~((squares > small) & squares.isfinite())).nonzero().flatten()
        squares[again] = _squares_in_float64(rows[again])
    return squares


def _squares_in_float32(rows: Tensor) -> Tensor:
    if rows.shape[1] <= _ROW:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.double().square_()
    whole = rows.shape[1] // _ROW * _ROW
    parts = [torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)]
    if whole:
        blocks = rows[:, :whole].reshape(len(rows), -1, _ROW)
        parts.append(torch.linalg.vector_norm(blocks, dim=2))
    return torch.cat(parts, dim=1).double().square_().sum(1)


def _squares_in_float64(rows: Tensor) -> Tensor:
    """Some entries at a time; elsewhere than on the CPU more of them, for there is no cache to fit."""
    entries = _ENTRIES if rows.device.type == "cpu" else 64 * _ENTRIES
    columns = min(rows.shape[1], entries) or 1
    squares = []
    for some in torch.split(rows, max(1, entries // columns)):
        parts = [p.double().square().sum(1) for p in torch.split(some, columns, dim=1)]
        squares.append(torch.stack(parts).sum(0))
    return torch.cat(squares)


def factor_norms(factors: Tensor) -> Tensor:
    """L2 norm of each row as float64, for rows whose product with others is what is added.

    Never too small, for the others may be large: at least 1e-35, beside which nothing counts that
    some operation may round to zero. Infinite above 1e33, where the product cannot be held.

    Example:
        >>> factor_norms(torch.tensor([[3e-30, 4e-30], [0.0, 0.0], [3e36, 0.0]]))
        tensor([5.0000e-30, 1.4142e-35,        inf], dtype=torch.float64)
    """
    rows = as_rows(factors)
    norms = squared_row_norms(rows).sqrt_().add_(_LEAST_FACTOR * math.sqrt(rows.shape[1]))
    return norms.masked_fill_(norms > _LARGEST_FACTOR, math.inf)


def clip_factors(norms: Tensor, clip_norm: float) -> Tensor:
    """``min(1, C / norm)`` per record; 0 for a record whose norm is not finite.

    A factor of 0 means that the record contributes nothing, so one NaN, infinite or overflowing
    record changes the sum by no more than any other.

    Args:
        norms: shape (n,), non-negative or non-finite.
        clip_norm: C > 0, may be infinite.

    Example:
        >>> clip_factors(torch.tensor([0.5, 2.0, float("nan")]), clip_norm=1.0)
        tensor([1.0000, 0.5000, 0.0000])
    """
    if not number("clip_norm", clip_norm) > 0:
        raise ValueError(f"clip_norm={clip_norm} must be greater than 0.")
    factors = (clip_norm / norms.double()).clamp_(max=1.0).to(norms.dtype)
    return torch.where(torch.isfinite(norms), factors, torch.zeros_like(norms))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All entries in order as one flat vector.

    Example:
        >>> flatten([torch.zeros(2, 2), torch.ones(1)])
        tensor([0., 0., 0., 0., 1.])
    """
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of :func:`flatten`: views of ``vector``, cast to each tensor's shape and dtype.

    Example:
        >>> [part.shape for part in unflatten(torch.zeros(5), [torch.zeros(2, 2), torch.ones(1)])]
        [torch.Size([2, 2]), torch.Size([1])]
    """
    parts = torch.split(vector, [tensor.numel() for tensor in like])
    return [part.view_as(t).to(t.dtype) for part, t in zip(parts, like, strict=True)]
