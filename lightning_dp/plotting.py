"""Pictures of noise and ε, drawn with matplotlib if it is installed."""

from __future__ import annotations

import io
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lightning_dp._validate import number, positive, whole
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.base import AbstractAccountant, Relation, epsilon_text
from lightning_dp.accounting.events import AbstractEvent, History, sampled_gaussian
from lightning_dp.accounting.journal import Charges
from lightning_dp.accounting.pld import epsilon_curve
from lightning_dp.schedules import AbstractSchedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_schedule"]

_EPSILON_POINTS = 24
_MOST_SHAPES = 5000  # in an SVG; more are drawn as pixels


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
    steps = whole("steps", steps)
    scale = positive("scale", scale)
    sample_rate = number("sample_rate", sample_rate)
    pyplot = _pyplot("plot_schedule")
    sigmas = [scale * schedule(step) for step in range(steps)]
    charges: History = [(sampled_gaussian(sigma, sample_rate), 1) for sigma in sigmas]
    counts, epsilons = _epsilons(charges, delta, relation, PLDAccountant())

    ax = pyplot.subplots()[1] if ax is None else ax
    _draw_sigma(ax, charges, "C0")
    ax.set_xlabel("step")
    _draw_epsilon(ax.twinx(), counts, epsilons, delta, "C1")
    return ax


def plot_charges(
    runs: Charges,
    *,
    delta: float,
    relation: Relation,
    accountant: AbstractAccountant,
    budget: float | None = None,
    claim: float | None = None,
    title: str = "",
    ax: Axes | None = None,
    metrics: Mapping[str, Sequence[tuple[int, float]]] | None = None,
) -> Axes:
    """Draw the picture of :meth:`lightning_dp.report.PrivacyReport.plot`.

    ``claim`` is ε from the first step on, where it is not that of the charges; ``budget`` is a line.
    """
    if metrics and ax is not None:
        raise ValueError("metrics get a separate panel: leave out ax, or draw them yourself.")
    charges = [charge for run in runs.values() for charge in run if charge[0].is_gaussian]
    if not charges:
        raise ValueError("steps=0: nothing was charged, so there is nothing to draw.")
    pyplot = _pyplot("PrivacyReport.plot")
    counts, epsilons = _epsilons(charges, delta, relation, accountant, runs.external)
    if claim is not None:
        counts, epsilons = [0, 1, counts[-1]], [0.0, claim, claim]
    lowest = ax
    ax, sigma = _panels(pyplot, metrics) if ax is None else (ax, ax.twinx())
    (lowest or sigma).set_xlabel("noised steps")
    _draw_sigma(sigma, charges, "C0")
    if budget is not None:
        label = f"budget: $\\epsilon$ = {epsilon_text(budget)}"
        ax.axhline(budget, color="C3", linestyle="--", label=label)
    _draw_epsilon(ax, counts, epsilons, delta, "C1")
    ax.legend(loc="best")
    ends = itertools.accumulate(
        sum(count * event.num_steps for event, count in run) for run in runs.values()
    )
    for end in list(ends)[:-1]:
        ax.axvline(end + 0.5, color="0.6", linestyle=":", linewidth=1)  # another run begins
    if title:
        ax.set_title(title)
    return ax


def plot_federation(attendance: Sequence[tuple[int, int, bool, float]], *, names: int = 10) -> Axes:
    """Draw ε that each client claims over the rounds, above who was there.

    Args:
        attendance: rounds, clients, whether each answered then, and its ε; NaN for no claim.
        names: the most clients that get a colour and a name each.

    Returns:
        the axes of ε; those of the clients are the last of its figure's.

    Example:
        >>> ax = plot_federation([(0, 0, True, 0.5), (0, 1, False, math.nan), (1, 0, True, 0.7)])
        >>> [line.get_label() for line in ax.lines]
        ['client 0']
    """
    _, (above, below) = _pyplot("The picture of a federation").subplots(
        2, sharex=True, figsize=(7, 5), height_ratios=[3, 2], layout="constrained"
    )
    many: dict[str, Any] = {"rasterized": len(attendance) > _MOST_SHAPES}
    claims: dict[int, list[tuple[int, float]]] = {}
    for round_, client, _, epsilon in attendance:
        if math.isfinite(epsilon):
            claims.setdefault(client, []).append((round_, epsilon))
    for client, points in sorted(claims.items()):
        style = {"label": f"client {client}"} if len(claims) <= names else {"color": "0.5"}
        above.plot(*zip(*points, strict=True), marker=".", linewidth=1, **style, **many)
    if 0 < len(claims) <= names:
        above.legend(fontsize="small")
    above.set_ylabel(r"$\epsilon$ that a client claims")
    above.set_ylim(bottom=0)
    for answered, color, label in ((True, "C0", "answered"), (False, "C3", "left out")):
        places = [(i, c) for i, c, there, _ in attendance if there is answered]
        if places:
            squares = {"color": color, "label": label, "marker": "s", "s": 12, **many}
            below.scatter(*zip(*places, strict=True), **squares)
    below.legend(fontsize="small", loc="upper right")
    below.set_xlabel("round")
    below.set_ylabel("client")
    for axis in (below.xaxis, below.yaxis):
        axis.get_major_locator().set_params(integer=True)
    return cast("Axes", above)


def svg(draw: Callable[[], Axes]) -> bytes:
    """Return what a function draws in a new figure as SVG: the same bytes each time, and no date."""
    pyplot = _pyplot("A picture")
    content = io.BytesIO()
    figure = draw().get_figure(root=True)
    assert figure is not None
    with pyplot.rc_context({"svg.hashsalt": "lightning-dp", "svg.fonttype": "path"}):
        figure.savefig(content, format="svg", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return content.getvalue()


def _panels(
    pyplot: Any, metrics: Mapping[str, Sequence[tuple[int, float]]] | None
) -> tuple[Axes, Axes]:
    """Make the axes of ε and of σ_t in a new figure, below the metrics if there are any."""
    heights = [*([3] if metrics else []), 3, 1.5]
    figure, panels = pyplot.subplots(
        len(heights),
        sharex=True,
        figsize=(7, 1.1 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    figure.align_ylabels()
    for panel in panels:
        panel.grid(alpha=0.3)
    if metrics:
        for name, pairs in metrics.items():
            panels[0].plot(*zip(*pairs, strict=True), label=name)
        panels[0].legend(loc="lower right")
    return panels[-2], panels[-1]


def _epsilons(
    charges: History,
    delta: float,
    relation: Relation,
    accountant: AbstractAccountant,
    external: History = (),
) -> tuple[list[int], list[float]]:
    """Return some numbers of steps, the first 0 and the last all of them, and ε after each."""
    ends = list(itertools.accumulate(count for _, count in charges))
    steps = ends[-1]
    counts = sorted({round(i * steps / _EPSILON_POINTS) for i in range(_EPSILON_POINTS + 1)} | {1})

    def event(step: int) -> AbstractEvent:
        return charges[bisect_right(ends, step)][0]

    alike = len({event for event, _ in charges}) == 1
    plan = charges[0][0] if alike else event
    curve = epsilon_curve(plan, np.array(counts), delta, relation, accountant, external)
    first = [0, *itertools.accumulate(count * event.num_steps for event, count in charges)]
    starts = [0, *ends]

    def steps_after(charge: int) -> int:
        place = min(bisect_right(ends, charge), len(charges) - 1)
        return first[place] + (charge - starts[place]) * charges[place][0].num_steps

    return [steps_after(count) for count in counts], [float(value) for value in curve]


def _draw_sigma(ax: Axes, charges: History, color: str) -> None:
    """Draw a point for the first and the last of equal steps; steps count from 1."""
    steps: list[int] = []
    sigmas: list[float] = []
    done = 0
    for event, count in charges:
        covered = count * event.num_steps
        places = [done + 1] if covered == 1 else [done + 1, done + covered]
        steps += places
        sigmas += [getattr(event, "noise_multiplier", event.pair[0])] * len(places)
        done += covered
    ax.plot(steps, sigmas, color=color, label=r"$\sigma_t$")
    ax.set_ylabel(r"noise multiplier $\sigma_t$", color=color)
    ax.set_ylim(0, 1.1 * max(sigmas) or 1)


def _draw_epsilon(
    ax: Axes, counts: list[int], epsilons: list[float], delta: float, color: str
) -> None:
    ax.plot(counts, epsilons, color=color, label=r"$\epsilon_t$")
    ax.set_ylabel(rf"$\epsilon$ after $t$ steps, $\delta$ = {delta:g}", color=color)
    ax.set_ylim(bottom=0)
    if math.isinf(epsilons[-1]):
        ax.text(0.5, 0.5, r"$\epsilon = \infty$", transform=ax.transAxes, ha="center")


def _pyplot(caller: str) -> Any:
    """Return matplotlib.pyplot, or raise an error that says how to get it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            f"{caller} needs matplotlib: pip install 'lightning-dp[examples]', or matplotlib."
        ) from error
    return pyplot
