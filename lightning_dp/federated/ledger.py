"""A client's ledger: its charges and releases are on disk before anything leaves it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_dp._files import local_folder
from lightning_dp._noise import random_generator
from lightning_dp._refusals import text_of
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.charges import Charges, JournalError
from lightning_dp.accounting.events import AbstractEvent, VoidedRunError
from lightning_dp.accounting.journal import read_journal
from lightning_dp.accounting.release_file import (
    Progress,
    check_name,
    check_nothing_is_missing,
    file_name,
    progress_of_all,
)
from lightning_dp.federated.open_run import OpenRun
from lightning_dp.federated.spending import Spending
from lightning_dp.gradients import UnsupportedModelError

__all__ = ["Make", "ReleaseLedger"]


Make = Callable[[np.random.Generator], bytes]


class ReleaseLedger:
    """One client's ledger: each release is charged once, before data is touched, and kept.

    For release ``part`` of round i of a run, in this order, each on disk before the next: that the
    round has begun, with the seed of its batch; its charge, all of it, in a journal; the bytes
    that leave. So, whenever the process is killed,

    - nothing has left that was not charged;
    - a round is charged once, and only one release of it ever leaves: asked again, the ledger
      gives the same bytes, and no noise is drawn;
    - a round that had not left is made again under its charge, on the same batch.

    The whole plan of a run is declared in advance (:class:`Spending`); how many of its rounds fit
    into the budget, next to what other runs have spent, is found before its first one, so stopping
    there is a stop fixed in advance. A further round is refused, and charges nothing. Runs that take
    turns share what is left, round by round, by rules that hold for any order of theirs.

    The journal and the runs' files must be of one moment. If one of them was lost, or replaced by
    an old copy, the others tell, and nothing goes on; if all are old copies of one moment, nothing
    can tell.

    A lock keeps other processes out while a release is made. The folder belongs to the client:
    batch seeds in it are as private as its data.

    Args:
        directory: where the files are, the same for all runs over the data set. A relative path is
            one from the working directory of this moment.
        dataset_id: names the data set: two data sets must never share a name, nor one data set have
            two (its ε would start again at 0).

    Raises:
        ValueError: for an empty ``dataset_id``, or a ``directory`` that is not on a local disk.

    Example:
        >>> import tempfile
        >>> from lightning_dp.accounting import Gaussian
        >>> ledger = ReleaseLedger(tempfile.mkdtemp(), "hospital A, 2026")
        >>> spending = Spending("trial", 3, lambda i: [Gaussian(10.0)], 1.0, 1e-5)
        >>> ledger.release(spending, 0, 0, lambda rng: b"noised")
        b'noised'
        >>> ledger.release(spending, 0, 0, lambda rng: b"other noise")
        b'noised'
        >>> ledger.history()
        [(Gaussian(noise_multiplier=10.0), 1)]
        >>> round(ledger.epsilon(1e-5), 2)
        0.34
    """

    def __init__(self, directory: str | Path, dataset_id: str) -> None:
        check_name("dataset_id", dataset_id, "the name of the data set, unlike any other one")
        self.dataset_id = dataset_id
        self._directory = local_folder("directory", directory)
        self.journal_path = self._directory / f"{file_name(dataset_id)}.journal"

    def _open(self, spending: Spending) -> OpenRun:
        return OpenRun(self.journal_path, self.dataset_id, spending)

    # -- what was spent ----------------------------------------------------------------------

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """Return everything charged for this data set, over all runs.

        Raises:
            JournalError: if the journal is damaged or another data set's, or knows of fewer charges
                than the runs' release files do.
        """
        known: list[tuple[Path, Progress]] = [*progress_of_all(self.journal_path)]
        runs = Charges()
        if self.journal_path.exists():
            found, runs = read_journal(self.journal_path)
            if found != self.dataset_id:
                raise JournalError(
                    f"{self.journal_path} is of data set {found!r}.", topic="journal-behind"
                )
        check_nothing_is_missing(self.journal_path, self.dataset_id, runs, known)
        return runs.history()

    def epsilon(self, delta: float, relation: Relation = "add_remove") -> float:
        """Return ε at ``delta`` of everything charged so far."""
        return PLDAccountant().epsilon(self.history(), delta, relation)

    # -- releases ----------------------------------------------------------------------------

    def facts(self, spending: Spending) -> dict[str, float | str]:
        """Return ε of this data set and its δ and relation, for a client to tell."""
        delta, relation = spending.target_delta, spending.relation
        return {"epsilon": self.epsilon(delta, relation), "delta": delta, "relation": relation}

    def release(
        self,
        spending: Spending,
        round_: int,
        part: int,
        make: Make,
        *,
        keep: bool = True,
        note: bytes = b"",
    ) -> bytes:
        """Return the bytes of a release: those that left before, or newly charged and made ones.

        Args:
            spending: the run, the same at each call.
            round_: rounds are asked for in increasing order; some may be left out.
            part: releases of one round on one batch are asked for as 0, 1, ....
            make: touches the data and draws the noise. Called once the charge is on disk, with the
                generator of the round's batch, which is the same for all its parts.
            keep: False for what must not be written to disk (a sum that a trusted server will
                noise); it is then made again, from the same batch.
            note: what a new process must know to go on; public. Kept with the latest release.

        Raises:
            BudgetExhausted: if the round does not fit into the budget or the plan.
            MessageError: for a round or part that is over, or comes too early.
            JournalError: if files are missing or damaged, or another process has them.
            VoidedRunError: if real records failed a check, now or in any run over the data set.
        """
        with self._open(spending) as files:
            if (sent := files.kept.get((round_, part))) is not None:
                return sent
            before = files.progress
            again = not keep and (round_, part) == (before.begun, before.parts - 1)
            now = before if again else files.begin(round_, part, spending)
            try:
                content = make(np.random.Generator(np.random.PCG64DXSM(int(now.seed, 16))))
            except (VoidedRunError, UnsupportedModelError) as error:
                files.void(round_, spending, getattr(error, "reason", text_of(error)))
                raise
            # On disk before it leaves: from now on this round has this release and no other.
            oldest = round_ - spending.retain + 1
            kept = {place: sent for place, sent in files.kept.items() if place[0] >= oldest}
            if keep:
                kept[round_, part] = content
            files.write(replace(now, parts=part + 1), kept, note)
            return content

    def find(self, spending: Spending, round_: int, part: int) -> bytes | None:
        """Return the bytes of a release; None if it was not made, or is no longer kept."""
        with self._open(spending) as files:
            return files.kept.get((round_, part))

    def latest(self, spending: Spending) -> tuple[bytes, bytes] | None:
        """Return the note and the bytes of the latest release; None if there is none, or no note."""
        with self._open(spending) as files:
            if not files.note or not files.kept:
                return None
            return files.note, [*files.kept.values()][-1]

    def has_begun(self, spending: Spending) -> bool:
        """Tell whether a round of the run was charged, or began to be."""
        with self._open(spending) as files:
            return files.progress.begun >= 0

    def rounds_left(self, spending: Spending) -> int:
        """Return the number of rounds of the plan, from the latest one on, that the budget affords."""
        with self._open(spending) as files:
            return files.progress.limit - files.progress.begun - 1


class NoLedger:
    """In place of a ledger where nothing is private: nothing is charged, and ε is infinite.

    The latest release is kept in this process, to be sent again.
    """

    def __init__(self) -> None:
        self._place = (-1, 0)
        self._content, self._note = b"", b""

    def epsilon(self, delta: float, relation: Relation = "add_remove") -> float:
        """Return inf."""
        return math.inf

    def facts(self, spending: Spending) -> dict[str, float | str]:
        """Return nothing: nothing was booked."""
        return {}

    def release(
        self,
        spending: Spending,
        round_: int,
        part: int,
        make: Make,
        *,
        keep: bool = True,
        note: bytes = b"",
    ) -> bytes:
        """Return the bytes of a release: those that left before, or newly made ones."""
        if self._place != (round_, part):
            content = make(random_generator(None))
            self._place, self._content, self._note = (round_, part), content, note
        return self._content

    def find(self, spending: Spending, round_: int, part: int) -> bytes | None:
        """Return the bytes of the latest release, if it is this one."""
        return self._content if self._place == (round_, part) else None

    def latest(self, spending: Spending) -> tuple[bytes, bytes] | None:
        """Return the note and the bytes of the latest release; None if there is none, or no note."""
        return (self._note, self._content) if self._note else None

    def has_begun(self, spending: Spending) -> bool:
        """Return True: no charge is to come, before which a model should be tried."""
        return True
