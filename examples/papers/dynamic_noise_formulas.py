"""Closed forms that a paper states; for comparison and reproduction only.

"On Dynamic Noise Influence in Differential Private Learning" (anonymous submission under review).
There, σ_t is the noise multiplier of full-batch step t = 1..T, and a budget R means R/2-zCDP:
Σ_t 1/σ_t² <= R.

**None of these numbers is used or reported by a private run.** There the shape of a schedule is
scaled by calibration, and ε is computed for the steps that ran.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_dp._validate import positive, whole
from lightning_dp.schedules import AbstractSchedule, Exponential, condition_number


def paper_noise(influence: Sequence[float], budget: float) -> list[float]:
    """σ_t = √((1/R) Σ_i √(q_i/q_t)), Lemma 4.1.

    Args:
        influence: q_t of each step, finite and greater than 0.
        budget: R of the run.

    Example:
        >>> paper_noise([1.0, 1.0, 1.0, 1.0], budget=1.0)
        [2.0, 2.0, 2.0, 2.0]
    """
    positive("budget", budget, of="paper_noise")
    for value in influence:
        positive("influence", value, of="paper_noise")
    total = math.fsum(math.sqrt(value) for value in influence)
    return [math.sqrt(total / math.sqrt(value) / budget) for value in influence]


def paper_uniform_noise(steps: int, budget: float) -> list[float]:
    """σ_t = √(T/R), Theorem 4.2.

    Example:
        >>> paper_uniform_noise(steps=2, budget=0.5)
        [2.0, 2.0]
    """
    steps = whole("steps", steps, of="paper_uniform_noise")
    positive("budget", budget, of="paper_uniform_noise")
    return [math.sqrt(steps / budget)] * steps


def paper_dynamic_gd_noise(kappa: float, steps: int, budget: float) -> list[float]:
    """σ_t² = (1/R) (γ^(-T/2) - 1)/(1 - √γ) γ^(t/2), t = 1..T, γ = 1 - 1/κ: Theorem 4.3 (Eq. 7).

    Args:
        kappa: κ > 1.
        steps: T of the run.
        budget: R of the run.

    Example:
        >>> noise = paper_dynamic_gd_noise(kappa=10.0, steps=50, budget=0.3927)
        >>> round(sum(1 / sigma**2 for sigma in noise), 6)
        0.3927
    """
    condition_number("kappa", kappa, of="paper_dynamic_gd_noise")
    steps = whole("steps", steps, of="paper_dynamic_gd_noise")
    positive("budget", budget, of="paper_dynamic_gd_noise")
    root = math.sqrt(1 - 1 / kappa)
    first = (root**-steps - 1) / (1 - root) / budget
    return [math.sqrt(first * root**t) for t in range(1, steps + 1)]


def paper_subsampled_budget(budget: float, sample_rate: float) -> float:
    """R' = R / q², Section 4.3: the paper's budget for minibatches. **Unsound**: never use it.

    Subsampling does not divide the cost of a Gaussian step by 1/q² for the noise that it would
    allow. For q = 0.01 and T = 1000 steps the true ε of a run planned for 4 is 19.

    Example:
        >>> round(paper_subsampled_budget(budget=0.5134, sample_rate=0.01))
        5134
    """
    positive("budget", budget, of="paper_subsampled_budget")
    if not 0 < sample_rate <= 1:
        raise ValueError(f"paper_subsampled_budget(sample_rate={sample_rate}) must be in (0, 1].")
    return budget / sample_rate**2


def fit_exponential(schedule: AbstractSchedule, steps: int) -> Exponential:
    r"""The k of :math:`\sigma_0 e^{-kt}` fitted by least squares to log s(t), t = 0 .. steps - 1.

    As in the experiments of "On Dynamic Noise Influence in Differential Private Learning"
    (Appendix D), which do not say whether σ or log σ is fitted: in the logarithm the fit is linear
    and does not depend on the scale. σ_0 is not returned; the budget sets it.

    Args:
        schedule: what is approximated.
        steps: T >= 1, over which it is.

    Raises:
        ValueError: if ``steps`` is not an integer of at least 1.

    Example:
        >>> from lightning_dp.schedules import DynamicGD
        >>> round(fit_exponential(DynamicGD(kappa=10.0), steps=50).rate, 6)    # -log(0.9) / 4
        0.02634
    """
    steps = whole("steps", steps, of="fit_exponential")
    times = np.arange(steps) - (steps - 1) / 2
    logs = np.log([schedule(step) for step in range(steps)])
    slope = 0.0 if steps == 1 else float(times @ logs / (times @ times))
    return Exponential(rate=-slope)
