"""The solver of the cubic model against SciPy on small dense problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from lightning_dp.estimators.cubic_newton import average_weight, inner_step


def problem(size: int, smallest: float, largest: float, seed: int) -> tuple[Any, Any]:
    """Gradient and Hessian with eigenvalues between these."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((size, size)))
    hessian = basis @ np.diag(np.linspace(smallest, largest, size)) @ basis.T
    return rng.standard_normal(size), hessian


def scipys(g: Any, h: Any, m: float, box: float | None = None) -> Any:
    """The minimiser of g·v + v·Hv/2 + (M/6)‖v‖³ by a trust-region, or with bounds, L-BFGS-B."""

    def value(v: Any) -> float:
        return float(g @ v + v @ h @ v / 2 + m / 6 * np.linalg.norm(v) ** 3)

    def slope(v: Any) -> Any:
        return g + h @ v + m / 2 * np.linalg.norm(v) * v

    start = -0.01 * g
    if box is not None:
        bounds = [(-box, box)] * len(g)
        options = {"ftol": 1e-15, "gtol": 1e-10}
        return minimize(value, start, jac=slope, bounds=bounds, options=options).x

    def hessian(v: Any) -> Any:
        length = np.linalg.norm(v)
        return h + m / 2 * (length * np.eye(len(v)) + np.outer(v, v) / max(length, 1e-300))

    options = {"gtol": 1e-10}
    return minimize(value, start, jac=slope, hess=hessian, method="trust-exact", options=options).x


def minimise(slope: Callable[[Tensor], Tensor], size: int, tau: int, **settings: Any) -> Tensor:
    """Return Σ_(s=1..τ) 2s / (τ (τ + 1)) v_s of τ steps from 0; ``slope`` is v -> g + H v."""
    offset = average = torch.zeros(size, dtype=torch.float64)
    for step in range(tau):
        offset = inner_step(offset, slope(offset), step, **settings)
        average = average + average_weight(step + 1, tau) * offset
    return average


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("size", "box", "m"),
    [
        (1, None, 0.5),
        (1, 0.15, 20.0),
        (3, None, 20.0),
        (3, 0.15, 0.0),
        (8, None, 0.0),
        (8, 0.15, 0.5),
    ],
)
def test_the_average_reaches_scipys_minimum(size, box, m):
    g, h = problem(size, 1.0, 3.0, seed=size)
    bounds = None
    if box is not None:
        limit = torch.full((size,), box, dtype=torch.float64)
        bounds = (-limit, limit)
    found = minimise(
        lambda v: torch.from_numpy(g) + torch.from_numpy(h) @ v,
        size,
        3000,
        strong_convexity=1.0,
        hessian_lipschitz=m,
        max_step_size=0.1,
        bounds=bounds,
    )
    np.testing.assert_allclose(found.numpy(), scipys(g, h, m, box), rtol=0, atol=2e-4)


def test_the_minimum_of_a_model_that_is_not_convex_where_it_begins():
    """Negative curvature at 0: the cubic term alone bounds the model."""
    g, h = problem(4, -0.5, 2.0, seed=0)
    found = minimise(
        lambda v: torch.from_numpy(g) + torch.from_numpy(h) @ v,
        4,
        4000,
        strong_convexity=0.5,
        hessian_lipschitz=10.0,
        max_step_size=0.05,
    )
    np.testing.assert_allclose(found.numpy(), scipys(g, h, 10.0), rtol=0, atol=1e-3)


def test_one_step_by_hand():
    offset, slope = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -1.0])
    options = {"strong_convexity": 0.5, "hessian_lipschitz": 2.0}
    # η_2 = 2 / (0.5 · 4) = 1, (M/2) ‖v‖ = 5.
    expected = torch.tensor([3 - 1 - 15.0, 4 + 1 - 20.0])
    assert torch.equal(inner_step(offset, slope, 2, **options), expected)
    shorter = inner_step(offset, slope, 2, **options, max_step_size=0.1)
    torch.testing.assert_close(shorter, offset + 0.1 * (expected - offset))
    limit = torch.tensor([1.0, 20.0])
    assert inner_step(offset, slope, 2, **options, bounds=(-limit, limit)).tolist() == [-1, -15]
