"""Pictures, for those who have matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_dp.accounting import Gaussian, PoissonGaussian, Relation, epsilon
from lightning_dp.schedules.base import AbstractSchedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_schedule"]

_EPSILON_POINTS = 24


def plot_schedule(
    schedule: AbstractSchedule,
    steps: int,
    *,
    scale: float,
    sample_rate: float,
    delta: float,
    relation: Relation = "add_remove",
    ax: Axes | None = None,
) -> Axes:
    """Draw the noise multiplier σ_t of each step and, on a second axis, ε after each step.

    ε after t steps is the guarantee of releasing the first t steps, had t been fixed in advance,
    by the package's own accountant; it is computed at 24 steps and drawn through them.

    Args:
        schedule: the shape.
        steps: T >= 1.
        scale: the noise multiplier where the shape is 1, e.g. from
            :func:`lightning_dp.accounting.calibrate`.
        sample_rate: q in (0, 1]; 1 is full batches.
        delta: in (0, 1).
        relation: ``"add_remove"`` or ``"replace_one"``.
        ax: where to draw; a new figure by default.

    Returns:
        the axes of σ_t. That of ε_t is the last of its figure's axes.

    Raises:
        ImportError: without matplotlib.
        ValueError: if an argument is illegal.

    Example:
        >>> from lightning_dp.schedules import Exponential
        >>> ax = plot_schedule(Exponential(0.01), 100, scale=2.0, sample_rate=0.1, delta=1e-5)
        >>> ax.get_ylabel()
        'noise multiplier $\\\\sigma_t$'
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not steps >= 1:
        raise ValueError(f"steps={steps!r} must be an integer of at least 1.")
    if not scale > 0:
        raise ValueError(f"scale={scale} must be greater than 0.")
    pyplot = _pyplot()
    sigmas = [scale * schedule(step) for step in range(steps)]
    counts = sorted(
        {max(1, round(i * steps / _EPSILON_POINTS)) for i in range(_EPSILON_POINTS + 1)}
    )
    events = [
        Gaussian(sigma) if sample_rate == 1 else PoissonGaussian(sigma, sample_rate)
        for sigma in sigmas
    ]
    epsilons = [epsilon(events[:count], delta, relation) for count in counts]

    ax = pyplot.subplots()[1] if ax is None else ax
    ax.plot(range(1, steps + 1), sigmas, color="C0", label=r"$\sigma_t$")
    ax.set_xlabel("step")
    ax.set_ylabel(r"noise multiplier $\sigma_t$", color="C0")
    ax.set_ylim(bottom=0)
    spent = ax.twinx()
    spent.plot([0, *counts], [0.0, *epsilons], color="C1", label=r"$\epsilon_t$")
    spent.set_ylabel(rf"$\epsilon$ after $t$ steps, $\delta$ = {delta:g}", color="C1")
    spent.set_ylim(bottom=0)
    return ax


def _pyplot() -> Any:
    """matplotlib.pyplot, or an error that says how to get it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "plot_schedule needs matplotlib: pip install 'lightning-dp[examples]', or matplotlib."
        ) from error
    return pyplot
