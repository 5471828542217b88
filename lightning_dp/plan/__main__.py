"""``python -m lightning_dp.plan``: a table of batch sizes and epochs, and a choice."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dp._validate import Check, positive, probability, whole
from lightning_dp.plan.suggestion import ENOUGH, LEAST_STEPS, Suggestion, as_dict, suggest, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["main", "plot_suggestions"]

_DESCRIPTION = """\
Plan a private training before it is run: batch size, epochs, noise, time, learning rate. No data are
needed, and nothing is spent."""

_EPILOG = """\
examples:
  python -m lightning_dp.plan --records 22000 --epsilon 3
  python -m lightning_dp.plan --records 22000 --epsilon 1 3 8 --records-per-second 400 --hours 1
  python -m lightning_dp.plan --records 22000 --epsilon 3 --batch-size 128 --epochs 2
  python -m lightning_dp.plan --records 22000 --epsilon 3 --json --picture plan.png"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 if the options cannot be used."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check(options)
        found = [_suggested(options, epsilon) for epsilon in options.epsilon]
        yours = [
            each.best.changed(batch_size=options.batch_size, epochs=options.epochs)
            if options.batch_size
            else None
            for each in found
        ]
        if options.picture is not None:
            plot_suggestions(found).savefig(options.picture, dpi=110)
    except (ImportError, OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    more = {"num_parameters": options.parameters, "layer_inputs": options.layer_inputs}
    pairs = zip(found, yours, strict=True)
    if options.json:
        plans = [as_dict(each, yours=plan, **more) for each, plan in pairs]
        print(json.dumps(plans, ensure_ascii=False, indent=1))
    else:
        print("\n\n".join(text(each, yours=plan, **more) for each, plan in pairs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lightning_dp.plan",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count, amount = parser.add_argument, _read(whole), _read(positive)
    add("--records", type=count, required=True, help="N, records in the training set")
    add("--epsilon", type=amount, nargs="+", required=True, help="budgets, a table for each")
    add("--delta", type=_read(probability), help="default: largest power of ten up to 1 / (10 N)")
    relations = ("add_remove", "replace_one")
    add("--relation", choices=relations, default="add_remove", help="default: %(default)s")
    add("--records-per-second", type=amount, help="gradients of records, of your machine")
    add("--hours", type=amount, help="the time that there is; needs --records-per-second")
    add("--least-steps", type=count, default=LEAST_STEPS, help="default: %(default)s")
    add("--parameters", type=count, help="d, trained weights: gives the norm of the noise")
    add("--layer-inputs", type=count, default=256, help="of a typical layer (default: %(default)s)")
    add("--batch-size", type=count, help="yours, to be compared; needs --epochs")
    add("--epochs", type=count, help="yours, to be compared; needs --batch-size")
    add("--json", action="store_true", help="print JSON, with all plans")
    add("--picture", type=Path, help="draw to this file (.png, .svg, .pdf); needs matplotlib")
    return parser


def _read(check: Check) -> Callable[[str], Any]:
    """Return a reader of an option's text, such as 60000 or 6e4; the parser names the option."""

    def read(text: str) -> Any:
        try:
            return check("", int(text) if text.isdecimal() else float(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).lstrip("=")) from None

    return read


def _check(options: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if (options.batch_size is None) != (options.epochs is None):
        raise ValueError("--batch-size and --epochs: give both, or neither.")
    speed = options.records_per_second
    if options.hours is not None and speed is None:
        raise ValueError("--hours needs --records-per-second (time a short run on synthetic data).")
    if options.hours is not None and options.hours * 3600 * speed < 1:
        raise ValueError(
            f"--hours={options.hours:g} affords no gradient: raise it, or --records-per-second."
        )


def _suggested(options: argparse.Namespace, epsilon: float) -> Suggestion:
    return suggest(
        options.records,
        epsilon,
        target_delta=options.delta,
        relation=options.relation,
        records_per_second=options.records_per_second,
        seconds=None if options.hours is None else 3600 * options.hours,
        least_steps=options.least_steps,
    )


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


if __name__ == "__main__":
    sys.exit(main())
