"""Checks of isolation: their time, off and on in turn, and what they see of a list of bad modules.

    python benchmarks/isolation.py time               # a few minutes
    python benchmarks/isolation.py time --quick       # one short run each
    python benchmarks/isolation.py cost MLP       # of all comparisons in 1,000 steps, and in the first 60
    python benchmarks/isolation.py seen [NAME ...]    # what each bad module meets, checks on
    python benchmarks/isolation.py bounds [NAME ...]  # ε claimed and shown by 60 + 60 fits, checks off

"start" is from ``fit`` to the end of the first step, "step" the mean of all steps after it:
comparisons, more frequent at the start, are in it. Runs alternate, on one thread; the median counts.
"cost" takes the processor's time: how much longer compared steps of the schedule take than the median
step, as a part of the first 60 steps and of all; its epochs have 100. The modules are those of
``tests/audit/isolation_zoo``; names are parts of theirs.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from at_hand import named, trainer_arguments
from models import MODELS, Model
from step import Clock, Module, by_processor, now
from torch.utils.data import DataLoader, TensorDataset

from lightning_dp import Checks
from lightning_dp.callbacks import DifferentialPrivacy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "audit"))

NAMES = ("MLP", "ResNet", "transformer")
OFF = Checks(dry_run=False, loss_graph=False, comparisons=False, gradient_edits="none")
EACH: dict[str, dict[str, Any]] = {
    "off": {"checks": OFF},
    "dry run": {"checks": replace(OFF, dry_run=True)},
    "loss graph": {"checks": replace(OFF, loss_graph=True)},
    "comparisons": {"checks": replace(OFF, comparisons=True)},
    "used": {"checks": replace(OFF, gradient_edits=None)},
    "on": {},
}


def fit(model: Model, steps: int, checks: dict[str, Any]) -> tuple[float, float]:
    """Seconds until the first step is done, and for each step after it."""
    clock = Clock()
    begin, ends = ends_of(model, steps, checks, clock), clock.ends
    return ends[0] - begin, (ends[-1] - ends[0]) / (len(ends) - 1)


def ends_of(
    model: Model, steps: int, checks: dict[str, Any], clock: Clock, batches: int = 20
) -> float:
    """The second at which a fit begins; the clock has those at which its steps end."""
    size = model.batch_size * batches
    data = TensorDataset(model.records(size), torch.randint(10, (size,)))
    with tempfile.TemporaryDirectory() as folder:
        privacy = DifferentialPrivacy(
            noise_multiplier=1.0, target_delta=1e-6, ledger_dir=folder, **checks
        )
        trainer = L.Trainer(
            **trainer_arguments(),
            max_steps=steps,
            callbacks=[privacy, clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        loader = DataLoader(data, model.batch_size, shuffle=True)
        module, begin = Module(model.make()), now()
        trainer.fit(module, loader)
    return begin


class Due(Clock):
    """Also notes after which steps samples were compared on schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        super().on_train_batch_end(trainer, *others)
        self.counts.append(trainer.strategy.private_run.spot_checks)


def cost(names: list[str], steps: int, rounds: int) -> None:
    print(named())
    print(f"{'model':22s}{'step ms':>9s}{'first 60':>10s}{'compared':>10s}{f'of {steps}':>10s}")
    for name in names:
        found: list[tuple[float, ...]] = []
        for _ in range(rounds):
            clock = Due()
            ends_of(MODELS[name], steps + 1, {}, clock, batches=100)
            took = [b - a for a, b in pairwise(clock.ends)]
            due = [b - a for a, b in pairwise(clock.counts)]
            step = statistics.median(took[60:])
            more = [(each / step - 1) * is_due for each, is_due in zip(took, due, strict=True)]
            found.append((1e3 * step, sum(more[:60]) / 60, sum(due), sum(more) / steps))
        step, first, number, of_all = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"{name:22s}{step:9.2f}{first:10.1%}{number:10.0f}{of_all:10.1%}", flush=True)


def times(names: list[str], steps: int, rounds: int) -> None:
    print(named())
    print(f"{'model':14s}{'checks':>13s}{'start s':>9s}{'step ms':>9s}{'ratio':>7s}")
    for name in names:
        model = MODELS[name]
        fit(model, 3, {"checks": OFF})  # caches
        found: dict[str, list[tuple[float, float]]] = {each: [] for each in EACH}
        for _ in range(rounds):
            for each, checks in EACH.items():
                found[each].append(fit(model, steps, checks))
        medians = {
            each: tuple(statistics.median(part) for part in zip(*pairs, strict=True))
            for each, pairs in found.items()
        }
        for each, (start, step) in medians.items():
            ratio = step / medians["off"][1]
            print(f"{name:14s}{each:>13s}{start:9.2f}{1e3 * step:9.2f}{ratio:7.3f}", flush=True)


def seen(names: list[str]) -> None:
    from isolation_zoo.cases import BAD, checked_fit

    for name in chosen(BAD, names):
        try:
            checked_fit(BAD[name], BAD[name].neighbours(64)[0])
            said = "NOT SEEN"
        except Exception as error:
            said = f"{type(error).__name__}: {error}".replace("\n", " ")[:160]
        print(f"{name:36s}{BAD[name].seen_by:18s}{said}", flush=True)


def bounds(names: list[str]) -> None:
    from isolation_zoo.cases import BAD
    from two_points import two_points

    for name in chosen(BAD, names):
        print(f"{name:36s}{two_points(BAD[name])}", flush=True)


def chosen(cases: dict[str, Any], names: list[str]) -> list[str]:
    import isolation_zoo as zoo  # fills the list

    assert zoo.BAD is cases
    return [name for name in cases if not names or any(part in name for part in names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["time", "cost", "seen", "bounds"])
    parser.add_argument("names", nargs="*", help="parts of names")
    parser.add_argument("--quick", action="store_true", help="one run of 10 steps each")
    parser.add_argument("--steps", type=int, help="200; of cost 1,000")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_intermixed_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if arguments.what == "cost":
        by_processor()
        cost(arguments.names or list(NAMES), arguments.steps or 1000, arguments.rounds)
    elif arguments.what == "time":
        names = [n for n in NAMES if not arguments.names or n in arguments.names]
        steps, rounds = (10, 1) if arguments.quick else (arguments.steps or 200, arguments.rounds)
        times(names, steps, rounds)
    else:
        {"seen": seen, "bounds": bounds}[arguments.what](arguments.names)


if __name__ == "__main__":
    main()
