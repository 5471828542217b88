"""Steps towards the minimum of a cubic-regularised second-order model, as pure functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["average_weight", "inner_step", "minimise_cubic_model"]


def inner_step(
    offset: Tensor,
    slope: Tensor,
    step: int,
    *,
    strong_convexity: float,
    hessian_lipschitz: float,
    max_step_size: float | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    r"""v_(s+1) = Proj(v_s - η_s (slope + (M/2) ‖v_s‖ v_s)), η_s = 2 / (μ (s + 2)).

    One step of projected gradient descent on g·v + v·Hv / 2 + (M/6) ‖v‖³.

    Args:
        offset: v_s, how far the iterate is from the point of the model.
        slope: g + H v_s, or an estimate of it.
        step: s = 0, 1, ...
        strong_convexity: μ.
        hessian_lipschitz: M.
        max_step_size: an upper bound on η_s; None for none.
        bounds: least and largest v, entry by entry; None projects nothing.

    Source: Algorithm 2 (GMSolver) of the paper that ``CubicNewton`` names.
    """
    size = 2 / (strong_convexity * (step + 2))
    size = size if max_step_size is None else min(size, max_step_size)
    norm = float(torch.linalg.vector_norm(offset, dtype=torch.float64))
    moved = offset - size * (slope + (hessian_lipschitz / 2 * norm) * offset)
    return moved if bounds is None else torch.clamp(moved, *bounds)


def average_weight(step: int, inner_steps: int) -> float:
    """2 s / (τ (τ + 1)): the weight of θ_s in the average over s = 1..τ; they add up to 1."""
    return 2 * step / (inner_steps * (inner_steps + 1))


def minimise_cubic_model(
    slope: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    inner_steps: int,
    strong_convexity: float,
    hessian_lipschitz: float,
    max_step_size: float | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The weighted average Σ_(s=1..τ) 2s / (τ (τ + 1)) v_s of τ steps of :func:`inner_step`.

    Args:
        slope: v -> g + H v, exact or noisy; called τ times, first at ``start``.
        start: v_0, usually zeros.
        inner_steps: τ.
        strong_convexity, hessian_lipschitz, max_step_size, bounds: see :func:`inner_step`.

    Example:
        >>> hessian, gradient = torch.diag(torch.tensor([1.0, 2.0])), torch.tensor([1.0, 1.0])
        >>> minimise_cubic_model(
        ...     lambda v: gradient + hessian @ v, torch.zeros(2),
        ...     inner_steps=2000, strong_convexity=1.0, hessian_lipschitz=0.0,
        ... )
        tensor([-1.0000, -0.5000])
    """
    offset, average = start, torch.zeros_like(start)
    for step in range(inner_steps):
        offset = inner_step(
            offset,
            slope(offset),
            step,
            strong_convexity=strong_convexity,
            hessian_lipschitz=hessian_lipschitz,
            max_step_size=max_step_size,
            bounds=bounds,
        )
        average = average + average_weight(step + 1, inner_steps) * offset
    return average
