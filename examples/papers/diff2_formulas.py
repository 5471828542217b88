"""The noise that the DIFF2 paper states, for comparison only.

Murata and Suzuki, DIFF2: Differential Private Optimization via Gradient Differences (2023).
**It is neither used nor reported by a private run**: there the noise is calibrated, and ε is
computed for the steps that ran.
"""

from __future__ import annotations

import math

from lightning_dp import Diff2


def paper_noise(
    diff2: Diff2, target_epsilon: float, target_delta: float, *, steps: int, num_records: int
) -> tuple[float, float]:
    """Return (σ1, σ2) of Proposition 4.1: noise over C on the mean, full batch, replace-one.

    σ1² = 4 u α ⌈R/T⌉ / (n² ε), σ2² = 4 u/(u - 1) α (R - ⌈R/T⌉) / (n² ε), with
    α = 1 + ⌈2 log(1/δ) / ε⌉, R = ``steps`` and n = ``num_records`` over all workers of equal
    size. It is larger than what (ε, δ) needs.

    Example:
        >>> noise = paper_noise(Diff2(20), 3.0, 1e-5, steps=2000, num_records=16_512)
        >>> [round(sigma, 6) for sigma in noise]
        [0.002346, 0.020448]
    """
    for name, value in (("target_epsilon", target_epsilon), ("target_delta", target_delta)):
        if not value > 0:
            raise ValueError(f"{name}={value} must be greater than 0.")
    alpha = 1 + math.ceil(2 * math.log(1 / target_delta) / target_epsilon)
    unit = 4 * alpha / (num_records**2 * target_epsilon)
    restarts = math.ceil(steps / diff2.restart_every)
    sigma1 = math.sqrt(unit * diff2.u * restarts)
    if steps == restarts:
        return sigma1, 0.0
    return sigma1, math.sqrt(unit * diff2.u / (diff2.u - 1) * (steps - restarts))
