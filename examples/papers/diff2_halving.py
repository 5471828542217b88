"""Tuning of diff2.py by successive halving: one setting of a method for all seeds of the table.

The rule is the same for both methods. Each of 30 settings runs R / 8 rounds on one seed; the best
twelve by a criterion run R / 2 rounds on it, the best four of those all R on three seeds, and the best
of them by the mean is the winner. (With six and two, as it was said before any run, it misses winners
of the full grid on California: results/diff2.md.) The noise is that of R rounds from the first round
on. Seeds (of the split, the first parameters and the noise) are in no table. A level is the mean of the
last ten values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from diff2_run import Noise, Run, Setting, Trace

SEEDS = (100, 101, 102)
CRITERIA = (0, 1)  # train loss, squared norm of its gradient


@dataclass(frozen=True)
class Rung:
    """All R / ``part`` rounds on the first ``seeds``; the best ``kept`` go on."""

    part: int
    seeds: int
    kept: int


HALVING = (Rung(8, 1, 12), Rung(2, 1, 4), Rung(1, 3, 1))
FULL = (Rung(1, 3, 1),)  # of every setting all rounds, on all seeds

Tuned = Mapping[str, tuple[Noise, Sequence[Setting]]]  # what is tried of each method


def dp_gd_grid() -> list[Setting]:
    return [Setting(0.5**i, clip) for i in range(10) for clip in (1.0, 3.0, 10.0)]


def diff2_grid() -> list[Setting]:
    """(T, C1, C2) that were best in a wider search on California."""
    radii = ((6, 3.0, 3.0), (6, 3.0, 10.0), (20, 1.0, 10.0), (60, 1.0, 10.0), (60, 3.0, 10.0))
    return [
        Setting(0.5**i, clip, interval, diff)
        for i, (interval, clip, diff) in itertools.product(range(1, 7), radii)
    ]


def winners(
    tuned: Tuned,
    rungs: Sequence[Rung],
    run_of: Callable[[Noise, Setting, int, int], Run],
    execute_all: Callable[[Sequence[Run]], Sequence[Trace]],
) -> dict[tuple[str, int], Setting]:
    """The best setting of each method by each criterion.

    Args:
        run_of: makes a run of a noise, a setting, a seed and the part of the rounds.
        execute_all: the runs of a rung, of all methods together.
    """
    left = {
        (title, criterion): list(dict.fromkeys(settings))
        for title, (_, settings) in tuned.items()
        for criterion in CRITERIA
    }
    for rung in rungs:
        runs = {
            (title, setting, seed): run_of(tuned[title][0], setting, seed, rung.part)
            for (title, _), settings in left.items()
            for setting in settings
            for seed in SEEDS[: rung.seeds]
        }
        traces = dict(zip(runs, execute_all(list(runs.values())), strict=True))
        for (title, criterion), settings in left.items():
            level = {
                setting: sum(
                    traces[title, setting, seed].level(criterion) for seed in SEEDS[: rung.seeds]
                )
                for setting in settings
            }
            left[title, criterion] = sorted(settings, key=level.__getitem__)[: rung.kept]
    return {key: settings[0] for key, settings in left.items()}
