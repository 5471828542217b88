"""The paper's own noise and steps on the data of cubic_newton.py, and what they really cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from cubic_newton_data import Problem
from cubic_newton_formulas import paper_epsilon, paper_noise, paper_steps
from torch import Tensor

from lightning_dp import CubicNewton
from lightning_dp.estimators.cubic_newton import average_weight, inner_step

DELTA, DELTA0, EPOCHS, BOX, DIAMETER = 1e-5, 0.01, 4, 0.5, 0.1
SEEDS = range(5)


@dataclass(frozen=True)
class Row:
    """One row of the table; ``steps`` is τ by equation (10), ``inner`` what was used."""

    stated: float
    kept: float
    steps: float
    inner: int
    sigma: float
    true: float
    values: Tensor


def paper_rows(of: Problem) -> Iterator[Row]:
    """L0 = 0.1, L1 = 1, M = 1, D = 0.1, α = 1, X = [-0.5, 0.5]^d, μ = λ = 1/m."""
    if of.clients == 1:
        return
    rounds = EPOCHS * of.records
    for stated in (0.4, 0.8):
        for kept in (0.1, 1.0):
            newton = CubicNewton(
                strong_convexity=of.weight_decay,
                hessian_lipschitz=1.0,
                inner_steps=1,
                max_grad_norm=0.1,
                max_hessian_norm=1.0,
                keep_fraction=kept,
            )
            plan = {"rounds": rounds, "num_records": of.records}
            k = newton.query_size(of.size)
            steps = paper_steps(newton, stated, DELTA0, **plan, diameter=DIAMETER, kept=k)
            sigma = paper_noise(newton, stated, DELTA0, **plan, diameter=DIAMETER)
            true = paper_epsilon(newton, stated, DELTA0, **plan, delta=DELTA)
            values = [_run(of, newton, sigma, rounds, k, seed) for seed in SEEDS]
            yield Row(stated, kept, steps, 1, sigma, true, torch.stack(values))


@torch.no_grad()
def _run(of: Problem, newton: CubicNewton, sigma: float, rounds: int, k: int, seed: int) -> Tensor:
    """One record of each client a round, τ = 1: all clients side by side, as the paper writes it."""
    generator = torch.Generator().manual_seed(seed)
    n, m, d = of.x.shape
    rows = torch.arange(n)
    orders = torch.argsort(torch.rand(n, m, generator=generator), dim=1)
    point = torch.zeros(d)
    for t in range(rounds):
        x = of.x[rows, orders[:, t % m]]
        slope = -torch.sigmoid(-(x @ point))[:, None] * x
        slope = slope * (newton.max_grad_norm / slope.norm(dim=1, keepdim=True)).clamp(max=1)
        slope = slope + of.weight_decay * point + sigma * torch.randn(n, d, generator=generator)
        moved = inner_step(
            torch.zeros(n, d),
            slope,
            0,
            strong_convexity=newton.strong_convexity,
            hessian_lipschitz=newton.hessian_lipschitz,
            bounds=(-BOX - point, BOX - point),
        )
        sent = torch.argsort(torch.rand(n, d, generator=generator), dim=1) < k
        point = point + average_weight(1, 1) * (d / k * sent * moved).mean(0)
        if not math.isfinite(float(point.abs().max())):
            break
    return of.suboptimality(point[:, None])[0]
