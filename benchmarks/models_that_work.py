"""The table "models that work": how right, how fast and how large a private step of each model is.

    python benchmarks/models_that_work.py [--families language ...] [--models GPT-2 ...]
    python benchmarks/models_that_work.py --only error          # a few minutes
    python benchmarks/models_that_work.py --record              # keeps what it finds
    python benchmarks/models_that_work.py --print               # what was kept: models_that_work.md

Models are random and small, of the libraries that are installed (the extra "models"). The error is
that of zoo/oracle.py. A step is forward, backward, clipping, noise and SGD of 128 records (of 32, for
picture libraries and diffusion) on one thread, beside the same without privacy; seconds are those of
the processor, so that other work on the machine disturbs less. Memory is the peak of two steps above
the loaded model, in a forked process (Linux only). The rung is the one of the ladder of "auto" that
answered; a model that mixes records is refused by the checks of a fit. Where it is "layers" and
engine="records" takes the model too, the two are timed in the same turns.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from memory import resident
from torch.utils.data import DataLoader
from zoo import FAMILIES, Case, Records, Training, missing
from zoo.case import Batch
from zoo.oracle import compare, rung_of, trained

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.boundary import Query, Term, add_noise
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.functional import unflatten
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.passes import RecordPasses, Replay

RECORDED = Path(__file__).with_name("models_that_work.json")
COLUMNS = ("error", "time", "memory")
WARM_UP = 1
ROUNDS, SECONDS = (3, 24), 2.0  # as many rounds as take about so long, within bounds
QUERY = Query((Term(),), clip_norm=1.0, noise_multiplier=1.0)
Step = Callable[[], object]


def timed(case: Case) -> tuple[Training, Batch, int]:
    """The model and the batch of the columns of costs."""
    width, size = case.timed
    return case.training(width=width), case.batch(size), size


def plain_step(case: Case) -> Step:
    """One step without privacy."""
    module, batch, _ = timed(case)
    optimizer = module.configure_optimizers()

    def step() -> None:
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()

    return step


def private_step(case: Case, engine: str = "auto") -> Step:
    """The same with gradients per record, clipping and noise."""
    module, batch, size = timed(case)
    params = trained(module)
    passes = RecordPasses(module, params, engine)
    optimizer, noise = torch.optim.SGD(params, lr=0.01), NoiseSource()
    chunk = Replay(lambda records: module.training_step(records, 0), batch, size)

    def step() -> str:
        total = passes.answer(QUERY, chunk)
        assert total is not None
        mean = add_noise(total, QUERY.noise_multiplier, noise, World()).mean(size).value
        for param, grad in zip(params, unflatten(mean, params), strict=True):
            param.grad = grad
        optimizer.step()
        return rung_of(passes.description)

    return step


def time_of(case: Case) -> dict[str, float]:
    """Seconds of a step without privacy, and how many times as long the private one is.

    Where "layers" answered: how many times as long as this one "records" takes, if it answers.
    """
    steps: dict[str, Step] = {"plain": plain_step(case), "auto": private_step(case)}
    if steps["auto"]() == "layers" and (other := private_step(case, "records"))() == "records":
        steps["records"] = other
    times: dict[str, list[float]] = {name: [] for name in steps}
    fewest, most = ROUNDS
    for turn in range(WARM_UP + most):
        for name in sorted(steps, reverse=turn % 2 == 1):
            start = time.process_time()
            steps[name]()
            times[name].append(time.process_time() - start)
        spent = sum(sum(found[WARM_UP:]) for found in times.values())
        if turn >= WARM_UP + fewest - 1 and spent > SECONDS:
            break
    medians = {name: statistics.median(found[WARM_UP:]) for name, found in times.items()}
    found = {"seconds": medians["plain"], "time": medians["auto"] / medians["plain"]}
    others = {"records": medians["records"] / medians["auto"]} if "records" in steps else {}
    return {**found, **others}


def _peak(make: Callable[[Case], Step], case: Case, answer: Any) -> None:
    libc = ctypes.CDLL(
        None
    )  # glibc: freed memory goes back to the system at once, and is counted again
    for setting, size in ((-3, 65536), (-1, 65536), (-2, 0)):  # mmap and trim threshold, top pad
        libc.mallopt(setting, size)
    step = make(case)
    libc.malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(2):
        step()
    answer.send(resident("VmHWM") - before)


def peak_of(make: Callable[[Case], Step], case: Case) -> float:
    """MiB above the loaded model."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=_peak, args=(make, case, there))
    child.start()
    child.join()
    return float(here.recv()) if child.exitcode == 0 else float("nan")


def memory_of(case: Case) -> dict[str, float]:
    """MiB of a step without privacy, and how many times as much the private one takes."""
    plain, private = peak_of(plain_step, case), peak_of(private_step, case)
    return {"MiB": plain, "memory": private / max(plain, 1.0)}


def error_of(case: Case) -> dict[str, Any]:
    """The rung, what it says of itself, and its error, if anything could be compared."""
    found = compare(case)
    row = {"rung": found.rung, "engine": found.engine}
    compared = {"clipped": found.clipped, "dropout": found.total, "error": found.error}
    return {**row, **{name: error for name, error in compared.items() if error == error}}


def fit(case: Case) -> None:
    """Train two steps with all checks.

    Raises:
        UnsupportedModelError: if no rung takes the model.
        MisconfigurationException: if a check finds that it mixes records.
    """
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-6)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu", max_steps=2, callbacks=[privacy], default_root_dir=folder,
            **dict.fromkeys(quiet, False),
        )  # fmt: skip
        trainer.fit(case.training(), DataLoader(Records(case.batch(24)), 6, shuffle=True))


MEASURES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "error": error_of,
    "time": time_of,
    "memory": memory_of,
}


def measure(case: Case, columns: list[str]) -> dict[str, Any]:
    """A row of the table: what was asked for, or the refusal."""
    row: dict[str, Any] = {}
    try:
        if case.refused:
            fit(case)
            row["rung"] = "not refused"
        for column in () if case.refused else columns:
            row.update(MEASURES[column](case))
    except (UnsupportedModelError, MisconfigurationException) as error:
        return {"rung": "refused", "refused": str(error)}
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    return row


def line(name: str, row: dict[str, Any]) -> str:
    """A row as it stands in the table; an error without dropout is marked, so is a failure."""
    forms = {"error": "{:.0e}", "time": "{:.2f}", "memory": "{:.2f}"}
    cells = {name: form.format(row[name]) if name in row else "" for name, form in forms.items()}
    if "error" in row and "dropout" not in row:
        cells["error"] += "*"
    rung = "failed" if "failed" in row else row.get("rung", "")
    return f"| {name} | {rung} | {' | '.join(cells.values())} |"


def table(kept: dict[str, dict[str, Any]]) -> str:
    """The whole table, in Markdown."""
    lines = []
    for family, cases in FAMILIES.items():
        rows = [line(case.name, kept[case.name]) for case in cases if case.name in kept]
        head = [
            f"| {family} | rung | error | time | memory |",
            "|---|---|---|---|---|",
        ]
        lines += [*head, *rows, ""] if rows else []
    return "\n".join(lines)


def summary(kept: dict[str, dict[str, Any]]) -> str:
    """Return how many train on each rung, their errors and their costs, in words."""
    mixing = {case.name for cases in FAMILIES.values() for case in cases if case.refused}
    rows = {name: row for name, row in kept.items() if name not in mixing}
    rungs = Counter("failed" if "failed" in row else row.get("rung", "") for row in rows.values())
    exact = sum(row.get("error", 1.0) < 1e-5 for row in rows.values())
    parts = [f"{len(rows)} models", *(f"{n} on {rung}" for rung, n in rungs.most_common())]
    parts += [f"{exact} with an error below 1e-5"]
    for column in ("time", "memory"):
        found = [row[column] for row in rows.values() if column in row]
        parts += [f"median {column} {statistics.median(found):.2f}"] if found else []
    both = {name: row["records"] for name, row in rows.items() if "records" in row}
    if both:
        dear = [f"{name} ({ratio:.2f})" for name, ratio in both.items() if ratio > 1.3]
        parts += [
            f"records to layers where both run ({len(both)}) {statistics.median(both.values()):.2f}"
        ]
        parts += [f"above 1.3: {', '.join(dear) or 'none'}"]
    return f"{'; '.join(parts)}; {len(kept) - len(rows)} that mix records, for comparison."


def _merged(earlier: dict[str, Any], row: dict[str, Any], columns: list[str]) -> dict[str, Any]:
    """Return the new row with the earlier costs that were not measured again."""
    costs = {"time": ("seconds", "time", "records"), "memory": ("MiB", "memory")}
    still = [k for column, names in costs.items() if column not in columns for k in names]
    if "error" not in columns:
        still += ["rung", "engine", "clipped", "dropout", "error"]
    if row.get("rung") in ("refused", "not refused"):
        return row
    return {**{k: earlier[k] for k in still if k in earlier}, **row}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--models", nargs="+", help="parts of names")
    parser.add_argument("--only", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--record", action="store_true", help="keep what is found")
    parser.add_argument("--print", action="store_true", help="print what was kept")
    arguments = parser.parse_args()
    kept = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    if arguments.print:
        print(table(kept) + "\n" + summary(kept))
        return
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = {}
    for case in (case for family in arguments.families for case in FAMILIES[family]):
        if missing(case) or not any(part in case.name for part in arguments.models or [""]):
            continue
        row = found[case.name] = measure(case, arguments.only)
        print(line(case.name, row), row.get("refused", row.get("failed", "")), flush=True)
        if arguments.record:
            kept[case.name] = _merged(kept.get(case.name, {}), row, arguments.only)
            RECORDED.write_text(json.dumps(kept, indent=1) + "\n")
    print(summary(found))


if __name__ == "__main__":
    main()
