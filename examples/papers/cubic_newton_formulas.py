"""Noise, steps and true ε of the cubic Newton paper's Theorem 1, for comparison only.

Huo, Liu, Ding, Johansson and Shi, Federated Cubic Regularized Newton Learning with
Sparsification-amplified Differential Privacy. **None of these numbers is used or reported by a
private run**: there the noise is calibrated, and ε is computed for the steps that ran.
"""

from __future__ import annotations

import math

from lightning_dp import CubicNewton
from lightning_dp._validate import positive
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.events import PoissonRound


def paper_noise(
    newton: CubicNewton,
    target_epsilon: float,
    delta0: float,
    *,
    rounds: int,
    num_records: int,
    diameter: float,
    kept_fraction: float | None = None,
) -> float:
    """Return σ of Theorem 1, the noise on one record's gradient; not what the package adds.

    σ² = 160 τ T k log(1.25/δ0) (C_g + C_H D)² / (ε² m² d). Its claim does not hold for batches of
    two records or more, and for one record its true ε is larger than the stated one; see
    :func:`paper_epsilon`.

    Args:
        newton: says τ, C_g, C_H and k/d.
        target_epsilon, delta0: what the theorem states.
        rounds: T of the run.
        num_records: m, of one client.
        diameter: D, the diameter of the set of parameters.
        kept_fraction: k/d; by default ``newton.keep_fraction``, or 1.
    """
    _check_positive(target_epsilon=target_epsilon, rounds=rounds, num_records=num_records)
    _check_positive(delta0=delta0, diameter=diameter)
    ratio = kept_fraction or newton.keep_fraction or 1.0
    bound = newton.max_grad_norm + newton.max_hessian_norm * diameter
    steps = newton.inner_steps * rounds
    unit = math.sqrt(160 * steps * ratio * math.log(1.25 / delta0))
    return unit * bound / (target_epsilon * num_records)


def paper_steps(
    newton: CubicNewton,
    target_epsilon: float,
    delta0: float,
    *,
    rounds: int,
    num_records: int,
    diameter: float,
    kept: int,
) -> float:
    """Return τ of equation (10), not rounded; often far from useful.

    τ = (C_g + C_H D + M D²/2)² ε² m² / (k T log(1/δ0) (C_g + C_H D)²), k = ``kept``.
    """
    _check_positive(target_epsilon=target_epsilon, rounds=rounds, num_records=num_records)
    _check_positive(delta0=delta0, diameter=diameter, kept=kept)
    bound = newton.max_grad_norm + newton.max_hessian_norm * diameter
    slope = bound + newton.hessian_lipschitz * diameter**2 / 2
    unit = (slope / bound * target_epsilon * num_records) ** 2
    return unit / (kept * rounds * math.log(1 / delta0))


def paper_epsilon(
    newton: CubicNewton,
    target_epsilon: float,
    delta0: float,
    *,
    rounds: int,
    num_records: int,
    delta: float,
) -> float:
    """Return the true ε at ``delta`` of the noise of :func:`paper_noise`, by the accountant.

    Replace-one, as the paper draws: exactly one of a client's m records per round, so that a
    record replaces another one in the answer, which moves by up to 2Δ, with probability 1/m.
    A round is τ queries with z_s = σ / (2 √(k/d) (C_g + C_H D)); D, k and d cancel.

    Example:
        >>> newton = CubicNewton(strong_convexity=1.0, hessian_lipschitz=1.0, inner_steps=4)
        >>> plan = {"rounds": 40_000, "num_records": 10_000}
        >>> round(paper_epsilon(newton, 0.8, 0.01, **plan, delta=1e-5), 1)
        9.2
    """
    sigma = paper_noise(
        newton, target_epsilon, delta0, rounds=rounds, num_records=num_records, diameter=1.0
    )
    ratio = newton.keep_fraction or 1.0
    bound = math.sqrt(ratio) * (newton.max_grad_norm + newton.max_hessian_norm)
    event = PoissonRound((sigma / (2 * bound),) * newton.inner_steps, 1 / num_records)
    return PLDAccountant().epsilon([(event, rounds)], delta, "add_remove")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        positive(name, value)
