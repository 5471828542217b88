"""The files of one run of a client, open under their lock: which round is next, and is it charged?"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from lightning_dp._refusals import RefusedSetting
from lightning_dp.accounting.charges import Charges, JournalError
from lightning_dp.accounting.events import Voided, VoidedRunError
from lightning_dp.accounting.journal import Journal
from lightning_dp.accounting.release_file import (
    Kept,
    Progress,
    Round,
    charges_of,
    check_nothing_is_missing,
    progress_of_all,
    read_release_file,
    release_path,
    rounds_in,
    write_release_file,
)
from lightning_dp.federated.messages import MessageError
from lightning_dp.federated.spending import Spending, affordable_rounds, fits_beside
from lightning_dp.mechanism import BudgetExhausted

__all__ = ["OpenRun"]


class OpenRun:
    """The journal of a data set and the release file of one run, under their lock.

    Args:
        journal_path: where the journal is, or will be.
        dataset_id: of the data set.
        spending: the run, the same each time.

    Raises:
        JournalError: if files are missing or damaged, or another process has them.
        VoidedRunError: if real records failed a check in any run over the data set.
        ValueError: if the run was begun with another plan or budget.
    """

    def __init__(self, journal_path: Path, dataset_id: str, spending: Spending) -> None:
        self._run, self._dataset = spending.run, dataset_id
        self._budget = (spending.target_epsilon, spending.target_delta, spending.relation)
        self._path = release_path(journal_path, spending.run)
        if not journal_path.exists():  # a lost one is not to be replaced by an empty one
            known = [*progress_of_all(journal_path)]
            if not journal_path.exists():  # nor has another process begun one meanwhile
                check_nothing_is_missing(journal_path, dataset_id, Charges(), known)
        self._journal = Journal(journal_path, dataset_id)
        self.kept: Kept = {}
        """The releases that may be asked for again, by round and part."""
        self.note = b""
        try:
            if (reason := self._journal.runs.voided) is not None:
                raise VoidedRunError(reason)
            self.progress = self._read(spending)
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> OpenRun:
        return self

    def __exit__(self, *unused: object) -> None:
        self._journal.close()

    def _read(self, spending: Spending) -> Progress:
        runs, journal = self._journal.runs, self._journal.path
        check_nothing_is_missing(journal, self._dataset, runs, [*progress_of_all(journal)])
        charged = rounds_in(runs, self._run)
        if not self._path.exists():
            if charged:
                raise JournalError(
                    f"{self._path} is missing, but rounds of run {self._run!r} were charged in "
                    f"{journal}: what has left is unknown. Put it back, or take another name for the "
                    "run.",
                    topic="journal-missing",
                )
            limit = affordable_rounds(
                spending.events, spending.rounds, self._budget, runs.history()
            )
            progress = Progress(
                self._run,
                spending.fingerprint,
                limit,
                self._others(),
                dataset=self._dataset,
                charged=0,
            )
            self.write(progress, {})
            return progress
        progress, self.kept, self.note = read_release_file(self._path)
        self._check_own(progress, max(charged, default=-1), spending)
        return progress

    def _check_own(self, progress: Progress, latest: int, spending: Spending) -> None:
        """Check the file: the journal may be ahead by the charge of the round begun, no more."""
        under_way = progress.begun if progress.parts == 0 else None
        here = charges_of(self._journal.runs, self._run, but=under_way)
        known = here if progress.charged is None else progress.charged
        if progress.run != self._run or latest > progress.begun or here != known:
            raise JournalError(
                f"{self._path} is of another run, or an old copy: it knows of {known} charges of run "
                f"{progress.run!r}, and the journal {self._journal.path} has {here} of run "
                f"{self._run!r}. Put the right one back: what has left is in it.",
                topic="journal-behind",
            )
        if progress.fingerprint != spending.fingerprint:
            raise RefusedSetting(
                f"run={self._run!r} was begun with another plan or budget. Use those, or take "
                "another name for the run.",
                topic="other-settings",
            )

    def _others(self) -> int:
        """Return the number of charges that other runs over this data set have made."""
        return self._journal.runs.total - charges_of(self._journal.runs, self._run)

    def fits(self, round_: int, spending: Spending) -> bool:
        """Tell whether the budget affords what of a round is not charged yet.

        A run that has the data set to itself makes as many rounds as were found to fit before its
        first one; where another run has charged since, the two share what is left.
        """
        if not round_ < spending.rounds:
            return False
        if self.progress.others == self._others():
            return round_ < self.progress.limit
        written = self._journal.runs.length(Round(self._run, round_).key)
        rest = spending.events(round_)[written:]
        return fits_beside(rest, self._budget, self._journal.runs.history())

    def begin(self, round_: int, part: int, spending: Spending) -> Progress:
        """Begin the next part of the current round, or a new round: it is charged on return."""
        begun, parts = self.progress.begun, self.progress.parts
        if round_ < begun or (round_ == begun and part < parts):
            raise MessageError(
                f"Part {part} of round {round_} is over; this client is at part {parts} of round "
                f"{begun} of run {self._run!r}. A new federation needs a new name."
            )
        if part != (parts if round_ == begun else 0):
            raise MessageError(f"Part {part} of round {round_} comes too early: {parts} are done.")
        if not self.fits(round_, spending):
            raise BudgetExhausted(self._why_not(round_, spending))
        now = self.progress
        if round_ > begun:
            charged = charges_of(self._journal.runs, self._run)
            seed = secrets.token_hex(16)
            now = replace(
                now, begun=round_, parts=0, seed=seed, dataset=self._dataset, charged=charged
            )
            self.write(now, self.kept, self.note)
        # The seed is on disk, and now the charge: a process that dies between makes the same batch,
        # and finds in the journal whatever of the round's events was written already.
        events = spending.events(round_)
        self._journal.extend({Round(self._run, round_).key: [(event, 1) for event in events]})
        if now.parts == 0:
            before = charges_of(self._journal.runs, self._run, but=round_)
            now = replace(now, charged=before + len(events))
        return now

    def _why_not(self, round_: int, spending: Spending) -> str:
        budget = f"(target_epsilon={spending.target_epsilon}, rounds={spending.rounds})."
        if self.progress.others == self._others() or not round_ < spending.rounds:
            return (
                f"Round {round_} of run {self._run!r} does not fit: {self.progress.limit} rounds do "
                f"{budget}"
            )
        return (
            f"Round {round_} of run {self._run!r} does not fit on top of what this and other runs have "
            f"spent on the data set {budget}"
        )

    def void(self, round_: int, spending: Spending, reason: str) -> None:
        """Withdraw ε of all that has left, if anything has, durably; no run goes on after it."""
        if self.progress.parts or charges_of(self._journal.runs, self._run, but=round_):
            key = Round(self._run, round_).key
            self._journal.append(key, len(spending.events(round_)), Voided(reason))

    def write(self, progress: Progress, kept: Kept, note: bytes = b"") -> None:
        """Replace the release file, durably."""
        write_release_file(self._path, progress, kept, note)
        self.progress, self.kept, self.note = progress, kept, note
