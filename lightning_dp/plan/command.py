"""``python -m lightning_dp.plan``: a table of batch sizes and epochs, and what to choose."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_dp._validate import optional, positive, whole
from lightning_dp.plan.suggestion import LEAST_STEPS, Suggestion, suggest
from lightning_dp.plan.training_plan import TrainingPlan
from lightning_dp.plan.words import as_dict, text

__all__ = ["main"]

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
        more = _more(options)
        found = [_suggested(options, epsilon) for epsilon in options.epsilon]
        yours = [_yours(options, each) for each in found]
        if options.picture is not None:
            _draw(found, options.picture)
    except (ImportError, OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
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
    add = parser.add_argument
    add("--records", type=_count, required=True, help="N, records in the training set")
    add("--epsilon", type=float, nargs="+", required=True, help="budgets, a table for each")
    add("--delta", type=float, help="default: the largest power of ten up to 1 / (10 N)")
    relations = ("add_remove", "replace_one")
    add("--relation", choices=relations, default="add_remove", help="default: %(default)s")
    add("--records-per-second", type=float, help="gradients of records, of your machine")
    add("--hours", type=float, help="the time that there is; needs --records-per-second")
    add("--least-steps", type=_count, default=LEAST_STEPS, help="default: %(default)s")
    add("--parameters", type=_count, help="d, trained weights: gives the length of the noise")
    add(
        "--layer-inputs", type=_count, default=256, help="of a typical layer (default: %(default)s)"
    )
    add("--batch-size", type=_count, help="yours, to be compared; needs --epochs")
    add("--epochs", type=_count, help="yours, to be compared; needs --batch-size")
    add("--json", action="store_true", help="print JSON, with all plans")
    add("--picture", type=Path, help="draw to this file (.png, .svg, .pdf); needs matplotlib")
    return parser


def _count(text: str) -> int:
    """Return a whole number, written as 60000 or as 6e4."""
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number: write 60000, or 6e4.")


def _more(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the words need besides a suggestion; refuse what is quickly seen to be wrong."""
    if (options.batch_size is None) != (options.epochs is None):
        raise ValueError(
            f"batch_size={options.batch_size}, epochs={options.epochs}: give both, or neither."
        )
    return {
        "num_parameters": optional(whole)("parameters", options.parameters),
        "layer_inputs": whole("layer_inputs", options.layer_inputs),
    }


def _suggested(options: argparse.Namespace, epsilon: float) -> Suggestion:
    hours = optional(positive)("hours", options.hours)
    return suggest(
        options.records,
        epsilon,
        target_delta=options.delta,
        relation=options.relation,
        records_per_second=options.records_per_second,
        seconds=None if hours is None else 3600 * hours,
        least_steps=options.least_steps,
    )


def _yours(options: argparse.Namespace, found: Suggestion) -> TrainingPlan | None:
    if options.batch_size is None:
        return None
    return found.best.changed(batch_size=options.batch_size, epochs=options.epochs)


def _draw(found: Sequence[Suggestion], path: Path) -> None:
    from lightning_dp.plan.picture import plot_suggestions

    plot_suggestions(found).savefig(path, dpi=110)
