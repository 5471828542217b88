"""``python -m lightning_dp.plan``: a table of batch sizes and epochs, and a choice."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from lightning_dp._validate import Check, positive, probability, whole
from lightning_dp.plan.suggestion import LEAST_STEPS, Suggestion, suggest, text
from lightning_dp.plan.training_plan import TrainingPlan

_DESCRIPTION = """\
Plan a private training before it is run: batch size, epochs, noise, time, learning rate. No data are
needed, and nothing is spent."""

_EPILOG = """\
examples:
  python -m lightning_dp.plan --records 22000 --epsilon 3
  python -m lightning_dp.plan --records 22000 --epsilon 1 3 8 --records-per-second 400 --hours 1
  python -m lightning_dp.plan --records 22000 --epsilon 3 --batch-size 128 --epochs 2
  python -m lightning_dp.plan --records 22000 --epsilon 3 --batches"""


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
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    more = {"num_parameters": options.parameters, "layer_inputs": options.layer_inputs}
    pairs = zip(found, yours, strict=True)
    blocks = []
    for each, plan in pairs:
        blocks.append(text(each, yours=plan, **more))
        if options.batches:
            blocks += [_batches(one) for one in (each.best, plan) if one is not None]
    print("\n\n".join(blocks))
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
    relations = ("add_remove", "replace_one", "zero_out")
    add("--relation", choices=relations, default="add_remove", help="default: %(default)s")
    add("--records-per-second", type=amount, help="gradients of records, of your machine")
    add("--hours", type=amount, help="the time that there is; needs --records-per-second")
    add("--least-steps", type=count, default=LEAST_STEPS, help="default: %(default)s")
    add("--parameters", type=count, help="d, trained weights: gives the norm of the noise")
    add("--layer-inputs", type=count, default=256, help="of a typical layer (default: %(default)s)")
    add("--batches", action="store_true", help="compare samplings and correlated noise, too")
    add("--batch-size", type=count, help="yours, to be compared; needs --epochs")
    add("--epochs", type=count, help="yours, to be compared; needs --batch-size")
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


def _batches(plan: TrainingPlan) -> str:
    """Return the best of each sampling and noise for a plan, a line each."""
    from lightning_dp.noise_plan import suggest_batches  # with torch

    found = suggest_batches(
        plan.num_records, plan.batch_size, plan.epochs, target_epsilon=plan.target_epsilon,
        target_delta=plan.target_delta, relation=plan.relation,
    )  # fmt: skip
    lines = [
        f"batches of {plan.records_per_step:,.0f} in {plan.steps:,} steps: z, and the noise in the "
        "iterates of SGD, Poisson batches = 1"
    ]
    shown = set[tuple[type, type]]()
    for each in (found.best, *sorted(found.table, key=lambda each: each.error)):
        if (kind := (type(each.sampling), type(each.noise))) not in shown:
            chosen = " " if shown else "*"
            shown.add(kind)
            words = f"sampling={_call(each.sampling)}, noise={_call(each.noise)}"
            if each.relation != plan.relation:
                words += f", relation={each.relation!r}"
            lines.append(f"{each.noise_multiplier:8.3g} {each.error:8.2f}{chosen} {words}")
    return "\n".join(lines)


def _call(setting: Any) -> str:
    """Return a sampling or a noise as it is written, with its numbers."""
    given = {each.name: getattr(setting, each.name) for each in fields(setting) if each.repr}
    numbers = (f"{k}={v}" for k, v in given.items() if type(v) in (int, float))
    return f"{type(setting).__name__}({', '.join(numbers)})"


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


if __name__ == "__main__":
    sys.exit(main())
