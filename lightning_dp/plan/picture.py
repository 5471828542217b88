"""The picture of a suggestion: what more epochs and larger batches do to the noise of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_dp.plan.suggestion import ENOUGH, LEAST_STEPS, Suggestion

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_suggestions"]


def plot_suggestions(found: Sequence[Suggestion]) -> Figure:
    """Draw the noise over the run, in that of full batches, over epochs: a line for each batch size.

    Each suggestion gets a panel, with a star at its best plan. A line is dashed where there are fewer
    than :data:`LEAST_STEPS` steps.

    Raises:
        ImportError: without matplotlib.
        ValueError: if nothing is given.
    """
    if not found:
        raise ValueError("found=[] holds no suggestion to draw.")
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "A picture of a plan needs matplotlib: pip install 'lightning-dp[examples]', or matplotlib."
        ) from error
    size = (1.5 + 4.5 * len(found), 4.2)
    figure, panels = pyplot.subplots(
        1, len(found), sharey=True, squeeze=False, figsize=size, layout="constrained"
    )
    for panel, each in zip(panels[0], found, strict=True):
        _draw(panel, each, pyplot.get_cmap("viridis"))
    panels[0, 0].set_ylabel("noise over the run (full batches = 1)")
    panels[0, -1].legend(title="batch size", loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    return figure


def _draw(ax: Axes, found: Suggestion, colours: Any) -> None:
    best = found.best
    for place, row in enumerate(found.table):
        colour = colours(0.9 * place / max(1, len(found.table) - 1))
        name = "all records" if row[0].sample_rate == 1 else f"{row[0].batch_size:,}"
        enough = [plan for plan in row if plan.steps >= LEAST_STEPS]
        for plans, style in ((row, ":"), (enough, "-")):
            xs, ys = [plan.epochs for plan in plans], [plan.excess for plan in plans]
            ax.plot(xs, ys, style, marker=".", color=colour, label=name if style == "-" else None)
    ax.plot(best.epochs, best.excess, "*", color="C3", markersize=15, zorder=5)
    ax.annotate(
        f"{best.batch_size:,}\n{best.steps:,} steps",
        (best.epochs, best.excess),
        textcoords="offset points",
        xytext=(9, 8),
        color="C3",
        fontsize=9,
        zorder=6,
        bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "alpha": 1, "edgecolor": "none"},
    )
    ax.axhline(ENOUGH, color="0.5", linewidth=0.8, linestyle="--")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    epochs = [plan.epochs for plan in found.table[0]]
    ax.set_xticks(epochs, [f"{each:g}" for each in epochs])
    ax.set_yticks([1, 1.5, 2, 4, 8], ["1", "1.5", "2", "4", "8"])
    ax.set_ylim(0.95, 1.2 * max(plan.excess for row in found.table for plan in row))
    ax.minorticks_off()
    ax.set_xlabel(f"epochs (dotted: fewer than {LEAST_STEPS} steps)")
    ax.set_title(
        f"N = {best.num_records:,}, ε = {best.target_epsilon:g}, δ = {best.target_delta:g}"
    )
    ax.grid(alpha=0.3)
