"""The ledger: an append-only record of privacy events, from which alone ε is computed."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_dp._refusals import RefusedRun
from lightning_dp.accounting.charges import Charges, JournalError
from lightning_dp.accounting.events import AbstractEvent, AbstractExternal, Voided, VoidedRunError
from lightning_dp.accounting.journal import Journal, is_ledger_id, new_id, read_journal

_FIELDS = {"id", "journal", "runs"}  # of a state; none of them has a default


class Ledger:
    """Every charge ever made against one training set, in memory and in a journal on disk.

    - It only grows. Loading a checkpoint rolls back the model, never the ledger.
    - A charge is on the disk before :meth:`charge` returns, and data is touched after that: after
      a crash the ledger is 0 or 1 steps ahead of the optimizer, never behind.
    - Each fit is a separate run; two ledgers merge to the union of their runs, so two fits that
      were resumed from one checkpoint both count.

    Only the lead process of a distributed job keeps the journal; the others mirror the record.

    Example:
        >>> from lightning_dp.accounting import Gaussian
        >>> ledger = Ledger()
        >>> ledger.begin("first fit")
        >>> for _ in range(3):
        ...     ledger.charge(Gaussian(2.0))
        >>> ledger.steps, ledger.history()
        (3, [(Gaussian(noise_multiplier=2.0), 3)])
    """

    def __init__(self) -> None:
        self.id = new_id()
        self.journal_path: Path | None = None
        self.weights: set[str] = set()  # fingerprints of weights that were released
        self.began: datetime | None = None  # at the first charge that this object saw
        self.latest: datetime | None = None  # and at the latest one
        self._charges = Charges()
        self._journal: Journal | None = None
        self._run = ""

    @property
    def steps(self) -> int:
        """Number of noised steps, over all runs."""
        return self._charges.steps

    @property
    def voided(self) -> str | None:
        """The reason for which ε of all that was released is withdrawn; None if it is not."""
        return self._charges.voided

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """All events with their counts; the order has no meaning for ε."""
        return self._charges.history()

    @property
    def runs(self) -> Charges:
        """The charges of each run, in their order."""
        return Charges(self._charges)

    def declare(self, release: AbstractExternal) -> None:
        """Book what was released elsewhere about the same records; once, however often it is said.

        The next run writes it into the journal as it begins.
        """
        self._charges.merge({release.key: [(release, 1)]})

    def begin(self, run: str, directory: Path | None = None) -> None:
        """Start a run. With a ``directory`` (lead process), open the journal there or where it was.

        Args:
            run: a name that no other run has, the same on all processes.
            directory: where a new journal goes.

        Raises:
            JournalError: if the journal is in use, damaged, or of another ledger.
            VoidedRunError: if a run of this ledger was voided.
        """
        self.end()
        self._refuse_voided()
        if directory is not None:
            path = self.journal_path or directory / f"{self.id}.journal"
            journal = Journal(path.absolute(), self.id)
            self.merge(journal.runs)
            self.weights |= journal.weights
            journal.extend(self._charges)
            self._journal, self.journal_path = journal, journal.path
        self._run = run

    def charge(self, event: AbstractEvent) -> None:
        """Book one event of the current run, durably, before the data it is about are touched."""
        self._refuse_voided()
        number = self._next_number("charge")
        if self._journal is not None:
            self._journal.append(self._run, number, event)
        self._charges.append(self._run, event)
        self.latest = datetime.now(timezone.utc)
        self.began = self.began or self.latest

    def void(self, reason: str) -> None:
        """Withdraw ε of all that was charged, for good and durably: nothing can be charged after it.

        Args:
            reason: module and kind of what was found in the records, and nothing else of them.
        """
        event, number = Voided(reason), self._next_number("void")
        self._charges.append(self._run, event)  # first: the disk may be full
        if self._journal is not None:
            self._journal.append(self._run, number, event)

    def _next_number(self, method: str) -> int:
        if not self._run:
            raise RefusedRun(
                f"Ledger.begin() must come before Ledger.{method}().", topic="out-of-order"
            )
        return self._charges.length(self._run)

    def _refuse_voided(self) -> None:
        if self.voided is not None:
            raise VoidedRunError(self.voided)

    def note_weights(self, fingerprints: Sequence[str]) -> None:
        """Remember that weights were released; where the journal has a fault, its next charge says so."""
        self.weights.update(fingerprints)
        if self._journal is not None:
            with contextlib.suppress(JournalError):
                self._journal.note_weights(fingerprints)

    def note_data(self, records: int, name: str | None) -> None:
        """Describe the data set of the run; where the journal has a fault, its next charge says so."""
        if self._journal is not None:
            with contextlib.suppress(JournalError):
                self._journal.note_data(records, name)

    def end(self) -> None:
        """End the run: close the journal and give up its lock."""
        journal, self._journal, self._run = self._journal, None, ""
        if journal is not None:
            journal.close()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the charges; the current run and its journal stay here."""
        return {**vars(self), "_journal": None, "_run": ""}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for a checkpoint."""
        return {
            "id": self.id,
            "journal": None if self.journal_path is None else str(self.journal_path),
            "runs": self._charges.to_dict(),
        }

    def restore(self, state: dict[str, Any], directory: Path) -> None:
        """Add what a checkpoint and its journal know (lead process).

        The journal is looked for where the checkpoint says, then under its name in ``directory``.

        Raises:
            JournalError: if it is missing, damaged, or knows less than the checkpoint.
            VoidedRunError: if a run of this ledger was voided.
        """
        ledger_id, recorded, runs = read_state(state)
        if recorded is not None:
            path = _find(recorded, directory)
            _check_complete(path, ledger_id, runs)
            self.merge(read_journal(path)[1])
            self.journal_path = path
        self.merge(runs)
        self.id = ledger_id
        self._refuse_voided()

    def mirror(self, state: dict[str, Any]) -> None:
        """Become a copy of the lead process's record (the other processes)."""
        self.id, _, runs = read_state(state)
        self._charges = runs

    def merge(self, runs: Charges) -> None:
        """Add what another record knows: the longer one of each run.

        Raises:
            JournalError: if two records of a run contradict each other.
        """
        self._charges.merge(runs)


def read_state(state: dict[str, Any]) -> tuple[str, Path | None, Charges]:
    """Read id, place of the journal and charges of a state, which somebody may have edited.

    Args:
        state: as :meth:`Ledger.state_dict` gives it.

    Raises:
        JournalError: if it is damaged, has a field of a later version, or would name a file that is
            no journal of this ledger.
    """
    if isinstance(state, dict) and (unknown := sorted(map(repr, {*state} - _FIELDS))):
        raise JournalError(
            f"The checkpoint's privacy ledger has an unknown field {unknown[0]}. A later version of "
            "lightning-dp may have written it, and it may change what was spent: use that version.",
            topic="other-version",
        )
    try:
        ledger_id, journal, runs = state["id"], state["journal"], Charges.from_dict(state["runs"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(f"{error!r}") from None
    if not is_ledger_id(ledger_id):
        raise _damaged(f"its id {reprlib.repr(ledger_id)} is not one of 16 hexadecimal digits")
    if journal is None:
        return ledger_id, None, runs
    is_path = isinstance(journal, str) and "\0" not in journal
    if not is_path or Path(journal).name != f"{ledger_id}.journal":
        named = reprlib.repr(journal)
        raise _damaged(f"{named} is not the place of its journal {ledger_id}.journal")
    return ledger_id, Path(journal), runs


def _damaged(how: str) -> JournalError:
    return JournalError(
        f"The checkpoint's privacy ledger is damaged: {how}.", topic="journal-damaged"
    )


def _find(recorded: Path, directory: Path) -> Path:
    for path in (recorded, directory.absolute() / recorded.name):
        if path.exists():
            return path
    raise JournalError(
        f"The checkpoint's privacy journal {recorded} is missing (also in {directory}). Without "
        "it, steps made after the checkpoint would be forgotten. Copy it back, or put it into the "
        "folder given as ledger_dir. If it is lost, bound the loss and write a new one with "
        "lightning_dp.accounting.recover_journal(checkpoint_path, directory, unrecorded_steps).",
        topic="journal-missing",
    )


def _check_complete(path: Path, ledger_id: str, runs: Charges) -> None:
    found, written = read_journal(path)
    if found != ledger_id:
        raise JournalError(
            f"The privacy journal {path} belongs to ledger {found}, not to {ledger_id}.",
            topic="journal-behind",
        )
    for run in runs:
        if runs.knows_more(run, written):
            raise JournalError(
                f"The privacy journal {path} knows less than the checkpoint: it was cut or replaced "
                "by an older copy. Put the right file back, or move it away and use "
                "lightning_dp.accounting.recover_journal().",
                topic="journal-behind",
            )
