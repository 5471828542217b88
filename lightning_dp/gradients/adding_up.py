"""The sum of the records' gradients, compared with the gradient of their loss: they are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_dp._precision import has_float64
from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.functional import flat_zeros, parts_of, real
from lightning_dp.gradients.base import ALONE, UnsupportedModelError

__all__ = ["check_sum", "plain_gradients"]


def plain_gradients(loss: Tensor, params: Sequence[nn.Parameter]) -> Tensor | None:
    """Return the gradient of the loss by plain autograd, as a flat vector; the graph stays.

    None where it cannot be computed during another backward pass: of reentrant checkpoints.
    """
    try:
        found = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    except RuntimeError:
        return None
    parts: list[Tensor | None] = list(found)
    del found
    flat = flat_zeros(params)
    for place, part in enumerate(parts_of(flat, params)):
        own, parts[place] = parts[place], None  # freed, so that there are never two of all
        if own is not None:
            part.copy_(real(own.to_dense() if own.is_sparse else own).reshape(-1))
    return flat


def check_sum(
    found: AbstractPerSampleGradients,
    plain: Tensor,
    params: Sequence[nn.Parameter],
    names: Sequence[str],
) -> None:
    r"""Refuse gradients of n records with :math:`\sum_i g_i \ne n \nabla \ell`, for the mean loss ℓ.

    A use of a parameter that the engine missed, or counted twice, shows here whatever it was.

    Args:
        found: the g_i.
        plain: the gradient of ℓ, whose memory is used.
        params: the trained parameters.
        names: theirs, in the same order.

    Raises:
        UnsupportedModelError: naming parameters for which they differ.
    """
    if not found.count:
        return
    twin = found.combine(1.0, ())  # a sum can be asked for once
    lengths = float(twin.norms().sum())
    if not lengths < float("inf"):
        return
    plain.mul_(-found.count)
    sizes = [float(part.norm()) for part in parts_of(plain, params)]
    wide = torch.float64 if has_float64(params[0].device.type) else torch.float32
    ones = torch.ones(found.count, dtype=wide, device=params[0].device)
    twin.add_weighted_sum(ones, plain)
    differences = [float(part.norm()) for part in parts_of(plain, params)]
    wrong = []
    for name, param, difference, size in zip(names, params, differences, sizes, strict=True):
        exact = 64 * torch.finfo(param.dtype).eps ** 0.5  # float32: 2 %; what was missed is more
        if difference > exact * size + 1e-4 * lengths:
            wrong.append(name)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UnsupportedModelError(
            f"{', '.join(wrong[:3])}{more}: the gradients of single records do not add up to the "
            "gradient of the loss, so a use of these parameters was missed, or counted twice. Use "
            f"them in their own layers, called as modules. {ALONE}",
            topic="unseen-use",
        )
