"""The cost of engine="one_by_one": a private step with each record alone, per record.

    python benchmarks/alone.py [--models MLP CNN ...]

Beside a step without privacy through the Trainer on the same batch, and on batches of one record, which
is what cannot be saved. Runs alternate, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from functools import partial

from models import SMALL, Model
from step import measure, ours, quiet, without_privacy

ROUNDS = 3
STEPS = 4
RECORDS = 32


def of_one_record(model: Model, steps: int) -> float:
    """A step without privacy on a single record."""
    return without_privacy(replace(model, batch_size=1), steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(SMALL), default=list(SMALL))
    arguments = parser.parse_args()
    quiet()
    runs = {
        "together": without_privacy,
        "of one record": of_one_record,
        "one_by_one": partial(ours, engine="one_by_one"),
    }
    for name in arguments.models:
        model = replace(SMALL[name], batch_size=RECORDS)
        times = {
            who: statistics.median(taken)
            for who, taken in measure(runs, model, STEPS, ROUNDS).items()
        }
        each = times["one_by_one"] / RECORDS
        print(
            f"{name}, batch {RECORDS}: {1e3 * each:.2f} ms a record, {each / times['of one record']:.2f} "
            f"plain steps of one record, {times['one_by_one'] / times['together']:.1f} plain steps of "
            "the batch in all"
        )


if __name__ == "__main__":
    main()
