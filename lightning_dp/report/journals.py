"""A journal by itself: what was charged in it, by training runs or by a federated client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightning_dp.accounting import AbstractEvent, PLDAccountant, Relation
from lightning_dp.accounting.journal import Runs, history_of, read_journal
from lightning_dp.accounting.voided import reason_in, steps_in
from lightning_dp.federated.release_file import (
    check_nothing_is_missing,
    federations_in,
    progress_of_all,
)

__all__ = ["JournalAlone", "find_journal", "read_alone"]


@dataclass(frozen=True)
class JournalAlone:
    """A journal, at a δ and a relation that the user gave: it knows neither.

    Args:
        path: the file.
        ledger_id: of a training's ledger, or the id of a federated client's data set.
        steps: charges in it.
        epsilon: of all of them.
        parts: ε of each run of a training; of each federation over a client's data set.
        events: what was charged, by run.
    """

    path: Path
    ledger_id: str
    steps: int
    epsilon: float
    parts: dict[str, float]
    events: Runs

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """All events with their counts, over all runs."""
        return history_of(self.events)

    @property
    def voided(self) -> str | None:
        """The reason for which ε of its releases is withdrawn; None if it is not."""
        return reason_in(self.events)


def read_alone(path: Path, delta: float, relation: Relation) -> JournalAlone:
    """Read a journal and compute ε.

    Raises:
        JournalError: if it is missing or damaged, or a client's release files know of more.
    """
    known = [*progress_of_all(path)]
    ledger_id, runs = read_journal(path)
    check_nothing_is_missing(path, ledger_id, runs, known)
    accountant = PLDAccountant()
    history = history_of(runs)
    return JournalAlone(
        path=path,
        ledger_id=ledger_id,
        steps=steps_in(runs),
        epsilon=accountant.epsilon(history, delta, relation),
        parts={
            name: accountant.epsilon(history_of(part), delta, relation)
            for name, part in (federations_in(runs) or {k: {k: v} for k, v in runs.items()}).items()
        },
        events=runs,
    )


def find_journal(recorded: Path | None, folder: Path) -> Path | None:
    """Where a journal is now: where it was recorded, else by its name in or below a folder."""
    if recorded is None or recorded.exists():
        return recorded
    return next(iter(sorted(folder.rglob(recorded.name))), recorded)
