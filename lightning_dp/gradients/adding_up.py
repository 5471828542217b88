"""The sum of the records' gradients, compared with the gradient of their loss: they are the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_dp.boundary import AbstractPerSampleGradients
from lightning_dp.functional import unflatten
from lightning_dp.gradients.base import ALONE, UnsupportedModelError

__all__ = ["check_sum", "plain_gradients"]


def plain_gradients(loss: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor | None] | None:
    """Return the gradient of the loss by plain autograd, parameter by parameter; the graph stays.

    None where it cannot be computed during another backward pass: of reentrant checkpoints.
    """
    try:
        return list(torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True))
    except RuntimeError:
        return None


def check_sum(
    found: AbstractPerSampleGradients,
    plain: Sequence[Tensor | None],
    params: Sequence[nn.Parameter],
    names: Sequence[str],
) -> None:
    r"""Refuse gradients of n records with :math:`\sum_i g_i \ne n \nabla \ell`, for the mean loss ℓ.

    A use of a parameter that the engine missed, or counted twice, shows here whatever it was.

    Args:
        found: the g_i.
        plain: the gradient of ℓ.
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
    ones = torch.ones(found.count, dtype=torch.float64, device=params[0].device)
    sums = unflatten(twin.weighted_sum(ones), params)
    wrong = []
    for name, param, total, own in zip(names, params, sums, plain, strict=True):
        expected = torch.zeros_like(total) if own is None else own.to(total.dtype) * found.count
        exact = 64 * torch.finfo(param.dtype).eps ** 0.5  # float32: 2 %; what was missed is more
        difference, size = float((total - expected).norm()), float(expected.norm())
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
