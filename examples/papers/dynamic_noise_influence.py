"""The influence of each step's noise on the final loss.

**Estimating the influence on private data is a query to those data that no ε covers.** Nothing here
adds noise, and nothing here is charged to a ledger: use public or synthetic data of the same kind,
or theory. The experiments of "On Dynamic Noise Influence in Differential Private Learning"
(anonymous submission) estimate on the private data and ignore the cost; so do the functions below,
for whoever reproduces them.

The influence q_t of step t is the coefficient of σ_t² in the expected final loss,
E f(θ_(T+1)) = const + Σ_t q_t σ_t². :class:`lightning_dp.schedules.FromInfluence` makes the best
schedule from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_dp._validate import positive, whole

__all__ = ["InfluenceFit", "quadratic_influence", "retraining_influence"]


def quadratic_influence(
    eigenvalues: Iterable[float],
    *,
    learning_rate: float,
    steps: int,
    noise_std: float = 1.0,
) -> tuple[float, ...]:
    r"""The exact influence of gradient descent on a quadratic loss, from its Hessian's eigenvalues.

    For :math:`f(\theta) = \frac12 (\theta-\theta^*)^\top H (\theta-\theta^*)`, steps
    :math:`\theta_{t+1} = \theta_t - \eta (\nabla f(\theta_t) + \sigma_t s \nu_t)` and
    :math:`\nu_t \sim N(0, I)`:

    .. math:: q_t = \frac{\eta^2 s^2}{2} \sum_j \lambda_j (1 - \eta \lambda_j)^{2 (T - t)},
              \quad t = 1..T.

    No clipping is assumed to happen. **Eigenvalues computed from private data are private: the
    schedule made from them is not covered by any ε.**

    Args:
        eigenvalues: the λ_j >= 0 of H, not all 0.
        learning_rate: η > 0.
        steps: T >= 1.
        noise_std: s, the noise on the gradient where σ_t = 1: clip norm over number of records.

    Returns:
        q_1 .. q_T (the first belongs to step 0 of a schedule).

    Raises:
        ValueError: for values outside these bounds, or if some q_t is not positive and finite.

    Example:
        >>> quadratic_influence([1.0], learning_rate=0.5, steps=3)
        (0.0078125, 0.03125, 0.125)
    """
    values = np.asarray(list(eigenvalues), dtype=float)
    if not (values.size and bool(np.all(values >= 0)) and bool(np.all(np.isfinite(values)))):
        raise ValueError("eigenvalues must be finite and at least 0, and there must be some.")
    learning_rate = positive("learning_rate", learning_rate)
    noise_std = positive("noise_std", noise_std)
    steps = whole("steps", steps)
    remaining = np.arange(steps - 1, -1, -1)[:, None]
    with np.errstate(over="ignore"):
        shares = values * (1 - learning_rate * values) ** (2 * remaining)
    influence = 0.5 * (learning_rate * noise_std) ** 2 * shares.sum(1)
    if not (bool(np.all(influence > 0)) and bool(np.all(np.isfinite(influence)))):
        raise ValueError(
            f"The influence is not positive and finite at every one of {steps} steps for "
            f"learning_rate={learning_rate} and eigenvalues in [{values.min():.4g}, "
            f"{values.max():.4g}]."
        )
    return tuple(influence.tolist())


@dataclass(frozen=True)
class InfluenceFit:
    """Least-squares fits of ``c2 σ_t² + c0`` to the final loss, one for each step that was varied.

    Args:
        steps: the steps t that were varied, 0-based.
        influence: c2 of each, the estimate of q_t; may come out negative.
        constant: c0 of each.
        standard_error: of each c2.
    """

    steps: tuple[int, ...]
    influence: tuple[float, ...]
    constant: tuple[float, ...]
    standard_error: tuple[float, ...]


def retraining_influence(
    train: Callable[[list[float]], float],
    noise_multipliers: Sequence[float],
    *,
    values: Sequence[float],
    repeats: int = 1,
    steps: Iterable[int] | None = None,
) -> InfluenceFit:
    """Estimate q_t by training again and again with the noise of one step varied (Appendix D).

    For each step t and each value, all other steps keep their noise; then ``c2 σ_t² + c0`` is
    fitted to the final losses by least squares, and c2 is the estimate of q_t.

    **On private data this looks at the un-noised final loss of many runs, and no ε covers it**, not
    even if every run was private by itself: neither the losses nor the runs are accounted here.

    Args:
        train: maps the noise multipliers of all steps to the final loss; each call draws its own
            noise.
        noise_multipliers: the schedule around which one step is varied.
        values: what σ_t is set to, at least two different (20 to 200 in the paper).
        repeats: how often each value is tried.
        steps: the steps to vary, 0-based; all by default.

    Raises:
        ValueError: for values outside these bounds, or if a final loss is not finite.

    Example:
        >>> loss = lambda sigmas: 7.0 + 2 * sigmas[0] ** 2 + 3 * sigmas[1] ** 2
        >>> fit = retraining_influence(loss, [1.0, 1.0], values=[1.0, 2.0, 3.0])
        >>> [round(c2, 6) for c2 in fit.influence]
        [2.0, 3.0]
    """
    if not repeats >= 1:
        raise ValueError(f"repeats={repeats} must be at least 1.")
    if len({float(value) for value in values}) < 2 or not all(v >= 0 for v in values):
        raise ValueError(f"values={list(values)} must be at least two different numbers >= 0.")
    varied = tuple(range(len(noise_multipliers)) if steps is None else steps)
    fits = [_fit(train, list(noise_multipliers), step, values, repeats) for step in varied]
    c2, c0, error = (tuple(column) for column in zip(*fits, strict=True))
    return InfluenceFit(varied, c2, c0, error)


def _fit(
    train: Callable[[list[float]], float],
    around: list[float],
    step: int,
    values: Sequence[float],
    repeats: int,
) -> tuple[float, float, float]:
    """``c2``, ``c0`` and the standard error of ``c2`` for one step."""
    if not 0 <= step < len(around):
        raise ValueError(f"steps holds {step}, but the schedule has {len(around)} steps.")
    squares, losses = [], []
    for value in values:
        for _ in range(repeats):
            noise = [*around[:step], float(value), *around[step + 1 :]]
            squares.append(float(value) ** 2)
            losses.append(float(train(noise)))
    if not np.all(np.isfinite(losses)):
        raise ValueError(f"A final loss is not finite with the noise of step {step} in {values}.")
    x, y = np.array(squares), np.array(losses)
    centred = x - x.mean()
    c2 = float(centred @ y / (centred @ centred))
    c0 = float(y.mean() - c2 * x.mean())
    residual = y - c2 * x - c0
    freedom = max(1, len(y) - 2)
    return c2, c0, float(math.sqrt(residual @ residual / freedom / (centred @ centred)))
