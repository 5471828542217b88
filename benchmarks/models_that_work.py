"""The table "models that work": how right, how fast and how large a private step of each model is.

    python benchmarks/models_that_work.py [--families language ...] [--models GPT-2 ...]
    python benchmarks/models_that_work.py --only error          # a few minutes
    python benchmarks/models_that_work.py --record              # keeps what it finds
    python benchmarks/models_that_work.py --print               # what was kept, as in docs/models.md

Models are random and small, of the libraries that are installed (the extra "models"). The error is
that of zoo/oracle.py. A step is forward, backward, clipping, noise and SGD of 128 records (of 32, for
picture libraries and diffusion) on one thread, beside the same without privacy; seconds are those of
the processor, so that other work on the machine disturbs less. Memory is the peak of two steps above
the loaded model, in a forked process (Linux only). Start-up is what a private fit with all checks
takes until its first step of six records ended, more than one without privacy does.
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
from zoo.oracle import compare, trained

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.boundary import Query, Term, add_noise
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.functional import unflatten
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.gradients.chunks import Replay
from lightning_dp.gradients.passes import RecordPasses

RECORDED = Path(__file__).with_name("models_that_work.json")
COLUMNS = ("error", "time", "memory", "start")
ROUNDS, STEPS, WARM_UP = 3, 2, 1
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


def private_step(case: Case) -> Step:
    """The same with gradients per record, clipping and noise."""
    module, batch, size = timed(case)
    params = trained(module)
    passes = RecordPasses(module, params, "auto")
    optimizer, noise = torch.optim.SGD(params, lr=0.01), NoiseSource()
    chunk = Replay(lambda: module.training_step(batch, 0), size)

    def step() -> None:
        total = passes.answer(QUERY, chunk)
        assert total is not None
        mean = add_noise(total, QUERY.noise_multiplier, noise, World()).mean(size).value
        for param, grad in zip(params, unflatten(mean, params), strict=True):
            param.grad = grad
        optimizer.step()

    return step


def time_of(case: Case) -> dict[str, float]:
    """Seconds of a step without privacy, and how many times as long the private one is."""
    steps = {"plain": plain_step(case), "private": private_step(case)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + ROUNDS):
        for name in sorted(steps, reverse=turn % 2 == 1):
            start = time.process_time()
            for _ in range(STEPS):
                steps[name]()
            times[name].append((time.process_time() - start) / STEPS)
    medians = {name: statistics.median(found[WARM_UP:]) for name, found in times.items()}
    return {"seconds": medians["plain"], "time": medians["private"] / medians["plain"]}


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


class _Clock(L.Callback):
    """The moment at which the first step ended."""

    end = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.end = time.process_time()


def _seconds_to_first_step(case: Case, callbacks: list[L.Callback]) -> float:
    module = case.training(dropout=0.1)
    loader = DataLoader(Records(case.batch(24)), 6, shuffle=True)
    clock = _Clock()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu", max_steps=1, callbacks=[*callbacks, clock],
            default_root_dir=folder, **dict.fromkeys(quiet, False),
        )  # fmt: skip
        start = time.process_time()
        trainer.fit(module, loader)
    return clock.end - start


def start_of(case: Case) -> dict[str, float]:
    """Seconds that a private fit takes longer until its first step ended."""
    privacy = DifferentialPrivacy(noise_multiplier=1.0, target_delta=1e-6)
    private = _seconds_to_first_step(case, [privacy])
    return {"start": private - _seconds_to_first_step(case, [])}


def error_of(case: Case) -> dict[str, Any]:
    """The engine and its error."""
    found = compare(case)
    return {"engine": found.engine, "error": found.error}


MEASURES: dict[str, Callable[[Case], dict[str, Any]]] = {
    "error": error_of,
    "time": time_of,
    "memory": memory_of,
    "start": start_of,
}


def measure(case: Case, columns: list[str]) -> dict[str, Any]:
    """A row of the table: what was asked for, or the refusal."""
    found: dict[str, Any] = {}
    if case.refused:
        columns = ["start"]  # a fit
    for column in columns:
        try:
            found.update(MEASURES[column](case))
        except (UnsupportedModelError, MisconfigurationException) as error:
            return {"refused": str(error)}
        except Exception as error:
            found[f"{column} failed"] = f"{type(error).__name__}: {error}"
    return found


def line(name: str, row: dict[str, Any]) -> str:
    """A row as it stands in the table."""
    if "refused" in row:
        return f"| {name} | refused | | | | |"
    forms = {"error": "{:.0e}", "time": "{:.2f}", "memory": "{:.2f}", "start": "{:.1f}"}
    cells = [form.format(row[k]) if k in row else "" for k, form in forms.items()]
    engine = row.get("engine", "").split(",")[0]
    return f"| {name} | {engine} | {' | '.join(cells)} |"


def table(kept: dict[str, dict[str, Any]]) -> str:
    """The whole table, in Markdown."""
    lines = []
    for family, cases in FAMILIES.items():
        rows = [line(case.name, kept[case.name]) for case in cases if case.name in kept]
        head = [
            f"| {family} | engine | error | time | memory | start-up (s) |",
            "|---|---|---|---|---|---|",
        ]
        lines += [*head, *rows, ""] if rows else []
    return "\n".join(lines)


def summary(kept: dict[str, dict[str, Any]]) -> str:
    """Return the number that train, their errors and their times, in words."""
    wrong = {case.name for cases in FAMILIES.values() for case in cases if case.refused}
    rows = {name: row for name, row in kept.items() if name not in wrong}
    exact = sum(row.get("error", 1.0) < 1e-5 for row in rows.values())
    timed = [row["time"] for row in rows.values() if "time" in row]
    fast = sum(found <= 2 for found in timed)
    return (
        f"{len(rows)} models; {exact} with an error below 1e-5; {fast} of {len(timed)} at most twice "
        f"as long; {len(kept) - len(rows)} that mix records, for comparison."
    )


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
        print(line(case.name, row), row.get("refused", ""), flush=True)
        for column in (name for name in row if name.endswith("failed")):
            print(f"    {column}: {row[column]}", flush=True)
        if arguments.record:
            now = {"error", "engine", "refused"} if "error" in arguments.only else {"refused"}
            earlier = {k: v for k, v in kept.get(case.name, {}).items() if k not in now}
            kept[case.name] = row if "refused" in row else {**earlier, **row}
            RECORDED.write_text(json.dumps(kept, indent=1) + "\n")
    print(summary(found))


if __name__ == "__main__":
    main()
