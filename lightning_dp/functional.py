"""Stateless functions behind clipping and smoothing, for direct use."""

from __future__ import annotations

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
    """Squared L2 norm of each record's part, accumulated in two levels, as float64."""
    rows = as_rows(gradient)
    rows = rows if rows.dtype == torch.float64 else rows.float()
    if rows.shape[1] <= _ROW:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return norms.double().square_()
    whole = rows.shape[1] // _ROW * _ROW
    parts = [torch.linalg.vector_norm(rows[:, whole:], dim=1, keepdim=True)]
    if whole:
        blocks = rows[:, :whole].reshape(len(rows), -1, _ROW)
        parts.append(torch.linalg.vector_norm(blocks, dim=2))
    return torch.cat(parts, dim=1).double().square_().sum(1)


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
    factors = (clip_norm / norms).clamp(max=1.0)
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
