"""The charges of runs, in their order, and how two records of them are one."""

from __future__ import annotations

from typing import TypeAlias

from lightning_dp.accounting.events import AbstractEvent

__all__ = ["JournalError", "Runs", "add_charge", "history_of", "longer_run"]

# Per run (one fit in one process): its charges in order, equal neighbours counted together.
Runs: TypeAlias = dict[str, list[tuple[AbstractEvent, int]]]


class JournalError(RuntimeError):
    """The record of what was spent is missing, damaged or in use: training must not go on."""


def add_charge(charges: list[tuple[AbstractEvent, int]], event: AbstractEvent) -> None:
    """Append one event, counting equal neighbours together."""
    if charges and charges[-1][0] == event:
        charges[-1] = (event, charges[-1][1] + 1)
    else:
        charges.append((event, 1))


def history_of(runs: Runs) -> list[tuple[AbstractEvent, int]]:
    """All events of all runs with their counts; the order has no meaning for ε."""
    counts: dict[AbstractEvent, int] = {}
    for charges in runs.values():
        for event, count in charges:
            counts[event] = counts.get(event, 0) + count
    return list(counts.items())


def longer_run(
    run: str, a: list[tuple[AbstractEvent, int]], b: list[tuple[AbstractEvent, int]]
) -> list[tuple[AbstractEvent, int]]:
    """The union of two records of one run: the longer one, of which the other is a beginning."""
    short, long = sorted((a, b), key=lambda charges: sum(count for _, count in charges))
    begins = all(
        ours[0] == theirs[0]
        and (ours[1] == theirs[1] or (i == len(short) - 1 and ours[1] < theirs[1]))
        for i, (ours, theirs) in enumerate(zip(short, long, strict=False))
    )
    if not begins or len(short) > len(long):
        raise JournalError(
            f"Two records of run {run} contradict each other; neither can be trusted."
        )
    return list(long)
