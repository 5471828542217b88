"""What one client has spent and sent: on disk before anything leaves it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import numpy as np

from lightning_dp.accounting import AbstractEvent, PLDAccountant, Relation, affordable_steps
from lightning_dp.accounting.base import check_delta, check_relation
from lightning_dp.accounting.journal import (
    Journal,
    JournalError,
    Runs,
    history_of,
    read_journal,
    sync_folder,
)
from lightning_dp.federated.messages import MessageError
from lightning_dp.folders import local_folder
from lightning_dp.mechanism import BudgetExhausted

__all__ = ["ReleaseLedger", "Spending", "check_budget", "federations_in"]

_FORMAT = "lightning-dp-releases-1"

Make = Callable[[np.random.Generator], bytes]
Kept = dict[tuple[int, int], bytes]


@dataclass(frozen=True)
class Spending:
    """What a run may ask of one client, declared before its first round.

    Args:
        run: a name that no other federation over the same data has.
        rounds: how many rounds the run has at most.
        events: what round i asks of this client's records: one event, or several that are charged
            together. A round that is not asked is not charged.
        target_epsilon: the budget of the data set, over all its runs; ``math.inf`` for none.
        target_delta: in (0, 1); the δ of the budget and of the ε that is reported.
        relation: the neighbouring relation of both.
        retain: for how many rounds, the latest one included, releases are kept to be sent again.

    Raises:
        ValueError: naming the argument that is out of its range.
    """

    run: str
    rounds: int
    events: Callable[[int], Sequence[AbstractEvent]] = field(repr=False)
    target_epsilon: float
    target_delta: float
    relation: Relation = "add_remove"
    retain: int = 1

    def __post_init__(self) -> None:
        if not self.retain >= 1:
            raise ValueError(f"retain={self.retain} must be at least 1.")
        if not self.run:
            raise ValueError("run='' must be a name that no other federation has.")
        if not self.rounds >= 1:
            raise ValueError(f"rounds={self.rounds} must be at least 1.")
        check_budget(self.target_epsilon, self.target_delta, self.relation)

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same plan and budget."""
        plan = [[event.to_dict() for event in self.events(i)] for i in range(self.rounds)]
        budget = [self.run, str(self.target_epsilon), self.target_delta, self.relation, plan]
        return hashlib.sha256(json.dumps(budget, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _Progress:
    """How far a run is: round ``begun`` is under way, or over after ``parts`` releases.

    ``limit`` was found when other runs had made ``others`` charges.
    """

    run: str
    fingerprint: str
    limit: int
    others: int
    begun: int = -1
    parts: int = 0
    seed: str = ""


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
    into the budget, beside what other runs have spent, is found before its first one, so stopping
    there is a stop fixed in advance. A further round is refused, and charges nothing.

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
        if not dataset_id:
            raise ValueError("dataset_id='' must name the data set, unlike any other one.")
        self.dataset_id = dataset_id
        self._directory = local_folder("directory", directory)
        self.journal_path = self._directory / f"{_file_name(dataset_id)}.journal"

    # -- what was spent ----------------------------------------------------------------------

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """Everything charged for this data set, over all runs."""
        if not self.journal_path.exists():
            return []
        found, runs = read_journal(self.journal_path)
        if found != self.dataset_id:
            raise JournalError(f"{self.journal_path} is of data set {found!r}.")
        return history_of(runs)

    def epsilon(self, delta: float, relation: Relation = "add_remove") -> float:
        """ε at ``delta`` of everything charged so far."""
        return PLDAccountant().epsilon(self.history(), delta, relation)

    # -- releases ----------------------------------------------------------------------------

    def facts(self, spending: Spending) -> dict[str, float | str]:
        """What was spent on this data set, as a client may tell it."""
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
        """The bytes of a release: those that left before, or newly charged and made ones.

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
        """
        with _Files(self, spending) as files:
            if (sent := files.kept.get((round_, part))) is not None:
                return sent
            before = files.progress
            again = not keep and (round_, part) == (before.begun, before.parts - 1)
            now = before if again else files.begin(round_, part, spending)
            content = make(np.random.Generator(np.random.PCG64DXSM(int(now.seed, 16))))
            oldest = round_ - spending.retain + 1
            kept = {place: sent for place, sent in files.kept.items() if place[0] >= oldest}
            if keep:
                kept[round_, part] = content
            files.write(replace(now, parts=part + 1), kept, note)
            return content

    def find(self, spending: Spending, round_: int, part: int) -> bytes | None:
        """The bytes of a release that was made; None if it was not, or is no longer kept."""
        with _Files(self, spending) as files:
            return files.kept.get((round_, part))

    def note(self, spending: Spending) -> bytes:
        """The note of the latest release; empty if there is none."""
        with _Files(self, spending) as files:
            return files.note

    def rounds_left(self, spending: Spending) -> int:
        """How many rounds of the plan, from the latest one on, the budget affords."""
        with _Files(self, spending) as files:
            return files.progress.limit - files.progress.begun - 1


class _Files:
    """The journal of a data set and the progress of one run, under their lock."""

    def __init__(self, ledger: ReleaseLedger, spending: Spending) -> None:
        self._run = spending.run
        self._path = ledger.journal_path.with_suffix(f".{_file_name(spending.run)}.release")
        self._journal = Journal(ledger.journal_path, ledger.dataset_id)
        self.kept: Kept = {}
        """The releases that may be asked for again, by round and part."""
        self.note = b""
        try:
            self.progress = self._read(spending)
        except BaseException:
            self._journal.close()
            raise

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *unused: object) -> None:
        self._journal.close()

    def _read(self, spending: Spending) -> _Progress:
        charged = [_round_of(key) for key in self._journal.runs if _run_of(key) == self._run]
        if not self._path.exists():
            if charged:
                raise JournalError(
                    f"{self._path} is missing, but rounds of run {self._run!r} were charged: what has "
                    "left is unknown. Put it back, or take another name for the run."
                )
            limit = _affordable(spending, history_of(self._journal.runs))
            progress = _Progress(self._run, spending.fingerprint, limit, self._others())
            self.write(progress, {})
            return progress
        progress, self.kept, self.note = _parse(self._path)
        if progress.run != self._run or max(charged, default=-1) > progress.begun:
            raise JournalError(
                f"{self._path} is of another run, or an old copy. Put the right one back."
            )
        if progress.fingerprint != spending.fingerprint:
            raise ValueError(
                f"run={self._run!r} was begun with another plan or budget. Use those, or take "
                "another name for the run."
            )
        if not math.isinf(spending.target_epsilon) and progress.others != self._others():
            raise JournalError(
                f"Another run over the data set has charged since run {self._run!r} began, so what fits "
                "into the budget has changed. Go on with the other one, or begin a new run."
            )
        return progress

    def _others(self) -> int:
        """How many charges the other runs over this data set have made."""
        runs = self._journal.runs.items()
        return sum(n for key, of in runs if _run_of(key) != self._run for _, n in of)

    def begin(self, round_: int, part: int, spending: Spending) -> _Progress:
        """The next part of the round under way, or a new round: charged when this returns."""
        begun, parts = self.progress.begun, self.progress.parts
        if round_ < begun or (round_ == begun and part < parts):
            raise MessageError(
                f"Part {part} of round {round_} is over; this client is at part {parts} of round "
                f"{begun} of run {self._run!r}. A new federation needs a new name."
            )
        if part != (parts if round_ == begun else 0):
            raise MessageError(f"Part {part} of round {round_} comes too early: {parts} are done.")
        if not round_ < self.progress.limit:
            raise BudgetExhausted(
                f"Round {round_} of run {self._run!r} does not fit: {self.progress.limit} rounds do "
                f"(target_epsilon={spending.target_epsilon}, rounds={spending.rounds})."
            )
        now = self.progress
        if round_ > begun:
            now = replace(now, begun=round_, parts=0, seed=secrets.token_hex(16))
            self.write(now, self.kept, self.note)
        self._charge(round_, spending.events(round_))
        return now

    def _charge(self, round_: int, events: Sequence[AbstractEvent]) -> None:
        """Write what of the round's events is not in the journal yet."""
        self._journal.extend({_key(self._run, round_): [(event, 1) for event in events]})

    def write(self, progress: _Progress, kept: Kept, note: bytes = b"") -> None:
        """Replace the file, durably: it is the old one or the new one at any moment."""
        content = b"".join([*kept.values(), note])
        places = [[round_, part, len(sent)] for (round_, part), sent in kept.items()]
        header = json.dumps([_FORMAT, vars(progress), places, zlib.crc32(content)]).encode()
        line = header + f" {zlib.crc32(header):08x}\n".encode()
        partial = self._path.with_name(f"{self._path.name}.partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(line + content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._path)
        sync_folder(self._path.parent)
        self.progress, self.kept, self.note = progress, kept, note


def _parse(path: Path) -> tuple[_Progress, Kept, bytes]:
    line, _, content = path.read_bytes().partition(b"\n")
    header, _, checksum = line.rpartition(b" ")
    try:
        if f"{zlib.crc32(header):08x}".encode() != checksum:
            raise ValueError
        name, state, places, check = json.loads(header)
        if name != _FORMAT or check != zlib.crc32(content):
            raise ValueError
    except ValueError:
        raise JournalError(f"{path} is damaged: it does not check.") from None
    kept, start = {}, 0
    for round_, part, length in places:
        kept[round_, part] = content[start : start + length]
        start += length
    return _Progress(**state), kept, content[start:]


def _affordable(spending: Spending, spent: list[tuple[AbstractEvent, int]]) -> int:
    """How many rounds of the plan fit into the budget."""
    if math.isinf(spending.target_epsilon):
        return spending.rounds
    rounds = [spending.events(i) for i in range(spending.rounds)]
    events = [event for each in rounds for event in each]
    budget = (spending.target_epsilon, spending.target_delta, spending.relation)
    whole = history_of({"": [*spent, *((event, 1) for event in events)]})
    if PLDAccountant().epsilon(whole, *budget[1:]) <= spending.target_epsilon:
        return spending.rounds
    fitting = affordable_steps(lambda n: events[n], len(events), *budget, spent=spent)
    count = 0
    for number, each in enumerate(rounds):
        count += len(each)
        if count > fitting:
            return number
    return spending.rounds


def check_budget(target_epsilon: float, target_delta: float, relation: Relation) -> None:
    """Raise ValueError for a budget out of range; an infinite ε is one that somebody chose."""
    if target_epsilon is None or not target_epsilon > 0:
        raise ValueError(
            f"target_epsilon={target_epsilon} must be greater than 0: the most that may ever be "
            "spent on the data set, by all runs; math.inf for no limit."
        )
    check_delta(target_delta)
    check_relation(relation)


def federations_in(runs: Runs) -> dict[str, Runs]:
    """The charges of a client's journal by federation; empty if it is not a client's."""
    found: dict[str, Runs] = {}
    for key, charges in runs.items():
        if "#" in key:
            found.setdefault(_run_of(key), {})[key] = charges
    return found


def _key(run: str, round_: int) -> str:
    return f"{run}#{round_}"


def _run_of(key: str) -> str:
    return key.rpartition("#")[0]


def _round_of(key: str) -> int:
    return int(key.rpartition("#")[2])


def _file_name(name: str) -> str:
    """A name as part of a file name, different for different names, also without case."""
    readable = quote(name, safe=" ")[:80]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
