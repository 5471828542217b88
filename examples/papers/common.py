"""The common parts of comparisons of methods: equal tuning effort, paired noises, resuming, tables.

A *group* is one method on one problem at one ε. Its work is a list of runs that anybody can write down
before the first one: the settings of :func:`design`, halved twice by :data:`RUNGS`, then the winner with
the noises of the table. Each finished run is one JSON line, so a comparison stops anywhere and goes on.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Memory
from scipy import stats

# Settings in a round, and the noises that each of them meets there for the first time.
RUNGS = ((18, 1), (6, 2), (2, 4))
NOISES = 20  # of the table: seeds 0, 1, ...
TUNING_SEED = 1000  # and on: noises that are in no table
CONFIDENCE = 0.95
FEWEST_PAIRS = 6  # no result of Wilcoxon's test on fewer is below 0.05

Setting = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """One method on one problem at one ε; ``settings`` are those it is tuned over."""

    problem: str
    method: str
    epsilon: float
    settings: tuple[Setting, ...]

    @property
    def name(self) -> tuple[str, str, float]:
        return self.problem, self.method, self.epsilon


@dataclass(frozen=True)
class Run:
    """One training: which setting of which group, with which noise."""

    problem: str
    method: str
    epsilon: float
    setting: int
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Args:
        validation: cross-entropy and accuracy on records that were not trained on.
        test: the same, on the test records: no choice is made by them.
        spent: ε of what ran, by the accountant.
        passes: evaluations of one record's gradient, over the number of records.
        seconds: of the process.
    """

    validation: tuple[float, float]
    test: tuple[float, float]
    spent: float
    passes: float
    seconds: float


Results = dict[Run, Outcome]


def design(grid: Mapping[str, Sequence[Any]], number: int = RUNGS[0][0]) -> tuple[Setting, ...]:
    """So many settings from a grid: every value of every column equally often, columns shuffled.

    Columns that come first are the same for all grids that begin with them.
    """
    rng = random.Random(0)
    columns = []
    for values in grid.values():
        column = [values[place % len(values)] for place in range(number)]
        rng.shuffle(column)
        columns.append(column)
    return tuple(dict(zip(grid, row, strict=True)) for row in zip(*columns, strict=True))


# -- which runs come next --------------------------------------------------------------------------


def tuning(
    group: Group, results: Results, score: Callable[[Outcome], float]
) -> tuple[list[Run], int | None]:
    """The runs of successive halving that are known and missing, and the winner once there is one.

    Args:
        score: of an outcome, on validation records; larger is better.
    """
    left, seeds = list(range(RUNGS[0][0])), 0
    for count, noises in RUNGS:
        if seeds:
            left = best_of(group, results, left, seeds, score)[:count]
        runs = [
            Run(*group.name, setting, TUNING_SEED + seed)
            for seed in range(seeds, seeds + noises)
            for setting in left
        ]
        if missing := [run for run in runs if run not in results]:
            return missing, None
        seeds += noises
    return [], best_of(group, results, left, seeds, score)[0]


def best_of(
    group: Group,
    results: Results,
    settings: Sequence[int],
    seeds: int,
    score: Callable[[Outcome], float],
) -> list[int]:
    """The settings in order of their mean score over the first tuning noises."""

    def mean(setting: int) -> float:
        runs = (Run(*group.name, setting, TUNING_SEED + seed) for seed in range(seeds))
        found = float(np.mean([score(results[run]) for run in runs]))
        return found if math.isfinite(found) else -math.inf

    return sorted(settings, key=lambda setting: (-mean(setting), setting))


def final(group: Group, winner: int, noises: int) -> list[Run]:
    """The runs of the table, with the first noises of it."""
    return [Run(*group.name, winner, seed) for seed in range(noises)]


@dataclass
class Agenda:
    """Missing runs, those most worth having first.

    Args:
        order: groups, each with the number of noises that its table is to have at that place.
        score: of a problem's outcome, for tuning; larger is better.
    """

    order: Sequence[tuple[Group, int]]
    score: Callable[[str, Outcome], float]
    _winners: dict[tuple[str, str, float], int] = field(default_factory=dict)

    def following(self, results: Results) -> Iterator[Run]:
        """The runs that can be made now; ``results`` hold no fewer than at the call before."""
        listed: set[Run] = set()
        for group, noises in self.order:
            if group.name not in self._winners:
                score = partial(self.score, group.problem)
                runs, winner = tuning(group, results, score)
                if winner is None:
                    yield from (run for run in runs if run not in listed)
                    listed.update(runs)
                    continue
                self._winners[group.name] = winner
            runs = final(group, self._winners[group.name], noises)
            yield from (run for run in runs if run not in results and run not in listed)
            listed.update(runs)


# -- running and resuming --------------------------------------------------------------------------


def print_heading(title: str, arguments: Sequence[str], data: str | None) -> None:
    """Print the title of a script's output, its command, and the versions that it runs with."""
    words = ["DIR" if word == data else word for word in arguments]
    print(f"# {title}\n\n    python examples/papers/{Path(sys.argv[0]).name} {shlex.join(words)}")
    packages = ("lightning-dp", "lightning", "torch", "numpy", "scipy", "scikit-learn")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    print(f"\nPython {platform.python_version()}, {versions}", flush=True)


def finished(make: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function, from the folder of finished runs where it is there.

    They are found by the arguments and the function's own source: a script that was stopped goes on.
    Remove ``outputs/finished_runs`` (or $LIGHTNING_DP_RUNS) after any other change.
    """
    folder = os.environ.get("LIGHTNING_DP_RUNS", "outputs/finished_runs")
    return Memory(folder, verbose=0).cache(make)(*arguments)


def finished_all(
    make: Callable[..., Any], arguments: Iterable[Sequence[Any]], jobs: int = 1
) -> list[Any]:
    """Return the same for many arguments, made side by side in so many processes.

    Classes of arguments come from modules that a script imports: those of the script itself have
    another name in the other processes, where a finished run would not be found again.
    """
    if jobs == 1:
        return [finished(make, *each) for each in arguments]
    return list(_processes(jobs).map(partial(finished, make), *zip(*arguments, strict=True)))


@lru_cache(maxsize=1)
def _processes(jobs: int) -> ProcessPoolExecutor:
    """Processes with one thread each."""
    return ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,))


def load(path: Path) -> Results:
    """The runs that a file holds; a line that was cut off is left out."""
    results: Results = {}
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        try:
            run, outcome = json.loads(line)
        except json.JSONDecodeError:
            continue
        outcome |= {name: tuple(outcome[name]) for name in ("validation", "test")}
        results[Run(**run)] = Outcome(**outcome)
    return results


def append(path: Path, run: Run, outcome: Outcome) -> None:
    """Write one finished run down."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as lines:
        lines.write("\n" * cut_off + json.dumps([asdict(run), asdict(outcome)]) + "\n")


def run_all(
    following: Callable[[Results], Iterator[Run]],
    execute: Callable[[Run], Outcome],
    path: Path,
    *,
    jobs: int = 1,
    minutes: float = math.inf,
) -> Results:
    """Make the runs that come next until there are none, or the time is over.

    Args:
        following: missing runs that can be made, in order, given those that were.
        execute: makes one; at the top level of a module if there are several jobs.
        path: of the file with the results.
        jobs: processes, each with one thread.
        minutes: after that no run is begun.
    """
    results, stop = load(path), time.monotonic() + 60 * minutes
    torch.set_num_threads(1)
    if jobs == 1:
        while time.monotonic() < stop and (run := next(following(results), None)):
            results[run] = execute(run)
            append(path, run, results[run])
        return results
    waiting: dict[Future[Outcome], Run] = {}
    pool = _processes(jobs)
    while True:
        if time.monotonic() < stop and len(waiting) < jobs:
            busy = set(waiting.values())
            for run in following(results):
                if len(waiting) == jobs:
                    break
                if run not in busy:
                    waiting[pool.submit(execute, run)] = run
        if not waiting:
            return results
        for done in wait(waiting, return_when=FIRST_COMPLETED).done:
            run = waiting.pop(done)
            results[run] = done.result()
            append(path, run, results[run])


# -- statistics ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation over runs, and half the interval of the mean (Student's t)."""

    mean: float
    deviation: float
    margin: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        count = len(values)
        deviation = float(np.std(values, ddof=1)) if count > 1 else math.nan
        factor = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) if count > 1 else math.nan
        return cls(float(np.mean(values)), deviation, factor * deviation / count**0.5, count)

    def text(self, digits: int, unit: str = "", note: str = "") -> str:
        """Mean ± standard deviation over runs, in brackets half the interval of the mean."""
        numbers = (self.mean, self.deviation, self.margin)
        mean, deviation, margin = (f"{number:.{digits}f}" for number in numbers)
        return f"{mean} ± {deviation} (± {margin}{note}){unit}"

    def gain(self, digits: int, p: float) -> str:
        """Mean of paired differences ± half its interval, and the p of its test; bold below 0.05."""
        mark = "**" if p < 0.05 else ""
        text = f"{self.mean:+.{digits}f} ± {self.margin:.{digits}f}"
        return f"{mark}{text}{mark} ({p_text(p)})"


def p_text(p: float) -> str:
    return "p < 0.001" if p < 1e-3 else f"p = {p:.2g}"


def paired_p(some: Sequence[float], others: Sequence[float]) -> float:
    """Two-sided p of the Wilcoxon signed-rank test on pairs of runs with the same seed."""
    differences = np.subtract(some, others)
    if len(differences) < FEWEST_PAIRS or not differences.any():
        return 1.0
    return float(stats.wilcoxon(differences).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """p values adjusted for their number, by Holm's method.

    Example:
        >>> holm([0.01, 0.5, 0.02])
        [0.03, 0.5, 0.04]
    """
    adjusted, largest = [1.0] * len(values), 0.0
    for rank, place in enumerate(np.argsort(values)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = largest
    return adjusted


def gains_text(pairs: Sequence[tuple[np.ndarray, np.ndarray]], digits: int) -> list[str]:
    """The gain of the first of each pair over the second; p by Wilcoxon, adjusted by Holm over all."""
    adjusted = holm([paired_p(some, others) for some, others in pairs])
    return [
        Summary.of(np.subtract(*pair)).gain(digits, p)
        for pair, p in zip(pairs, adjusted, strict=True)
    ]


TEST = (
    "± is the standard deviation over runs, in brackets half the 95 % interval of the mean (Student). "
    "Differences are paired by seed: mean ± half its 95 % interval, p by Wilcoxon's signed-rank test, "
    "two-sided, adjusted over the cells compared by Holm; bold where p < 0.05."
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
