"""A client's ledger: plan, charges and releases are on disk before anything leaves it."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np

from lightning_dp._files import local_folder, sync_folder
from lightning_dp._refusals import RefusedSetting, text_of
from lightning_dp._validate import normalise, number, probability, whole
from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.accounting.calibration import affordable_steps
from lightning_dp.accounting.events import AbstractEvent, History, Voided, VoidedRunError, counted
from lightning_dp.accounting.guards import GDPGuard
from lightning_dp.accounting.journal import (
    Charges,
    Journal,
    JournalContent,
    JournalError,
    Kept,
    Progress,
    Round,
    append_progress,
    check_name,
    check_nothing_is_missing,
    file_name,
    progress_of_all,
    read_release_file,
    read_written,
    release_path,
    write_release_file,
)
from lightning_dp.accounting.pld import epsilon_curve
from lightning_dp.accounting.rdp import OneOrderAccountant, order_of_budget
from lightning_dp.federated.protocol import MessageError
from lightning_dp.gradients import UnsupportedModelError
from lightning_dp.mechanism import BudgetExhausted

__all__ = ["Budget", "Claims", "ReleaseLedger", "Spending", "check_budget"]

Budget: TypeAlias = tuple[float, float, Relation]  # ε, δ and the neighbouring relation
_Events: TypeAlias = Callable[[int], Sequence[AbstractEvent]]
_Make: TypeAlias = Callable[[np.random.Generator], bytes]

_MOST_AHEAD = 32  # rounds
_WAIT = 60.0  # seconds for another run over the data set to make its release


# -- the plan and the budget -------------------------------------------------------------------


@dataclass(frozen=True)
class Spending:
    """The queries of a run to one client and the budget, declared before its first round.

    Args:
        run: a name that no other federation over the same data has.
        rounds: how many rounds the run has at most.
        events: what round i asks of this client's records: one event, or several that are charged
            together. A round that is not asked is not charged.
        target_epsilon: the budget of the data set, over all its runs; ``math.inf`` for none.
        target_delta: in (0, 1); the δ of the budget and of the ε that is reported.
        relation: the neighbouring relation of both.
        retain: for how many rounds, the latest one included, releases are kept to be sent again. A
            server is never behind its requests, so it asks for the latest one only.
        unit: what ε is about, the same for all runs over the data set: "record", "user" or "client".

    Raises:
        ValueError: naming the argument that is out of its range.
    """

    run: str
    rounds: int
    events: _Events = field(repr=False)
    target_epsilon: float
    target_delta: float
    relation: Relation = "add_remove"
    retain: int = 1
    unit: str = "record"

    def __post_init__(self) -> None:
        normalise(self, whole, "retain", "rounds")
        check_name("run", self.run, "a name that no other federation has")
        check_budget(self.target_epsilon, self.target_delta, self.relation)
        normalise(self, number, "target_epsilon", "target_delta")

    @cached_property
    def fingerprint(self) -> str:
        """A text that is the same for the same plan and budget, and for no other."""
        plan = [[event.to_dict() for event in self.events(i)] for i in range(self.rounds)]
        budget = [self.run, str(self.target_epsilon), self.target_delta, self.relation, plan]
        return hashlib.sha256(json.dumps(budget, sort_keys=True).encode()).hexdigest()

    def affordable_rounds(self, spent: History) -> int:
        """Return the number of rounds that fit if no other run spends meanwhile."""
        if math.isinf(self.target_epsilon):
            return self.rounds
        budget = (self.target_epsilon, self.target_delta, self.relation)
        plan = [self.events(i) for i in range(self.rounds)]
        charges = [event for each in plan for event in each]
        fitting = affordable_steps(lambda n: charges[n], len(charges), *budget, spent=spent)
        return sum(end <= fitting for end in itertools.accumulate(len(each) for each in plan))

    def fits(self, charges: Sequence[AbstractEvent], spent: History) -> bool:
        """Return True if charges fit where several runs take turns, in an undeclared order.

        The order may depend on what was released, so a plan's ε would not hold for it. A number of
        like charges, Σ 1/z² of full batches and one Rényi order do; the last costs some percent.
        """
        epsilon, delta, relation = self.target_epsilon, self.target_delta, self.relation
        if math.isinf(epsilon) or not charges:
            return True
        whole = counted([*spent, *((event, 1) for event in charges)])
        if len(whole) == 1:  # whoever asks next, it is the same event again
            return PLDAccountant().epsilon(whole, delta, relation) <= epsilon
        if all(event.pair[1] == 1 for event, _ in whole):
            *others, last = charges
            before = [*spent, *((event, 1) for event in others)]
            return GDPGuard(epsilon, delta, relation, before).fits(lambda: last)
        # Divergences of one order add up over adaptive rounds. The order is fixed by the budget:
        # one chosen afterwards would depend on what was released.
        accountant = OneOrderAccountant(order_of_budget(epsilon, delta))
        return accountant.epsilon(whole, delta, relation) <= epsilon


def check_budget(target_epsilon: float, target_delta: float, relation: Relation) -> None:
    """Raise ValueError for a budget out of range; an infinite ε must be chosen in so many words."""
    if target_epsilon is None or not number("target_epsilon", target_epsilon) > 0:
        raise ValueError(
            f"target_epsilon={target_epsilon} must be greater than 0: the most that may ever be "
            "spent on the data set, by all runs; math.inf for no limit."
        )
    probability("target_delta", target_delta)
    check_relation(relation)


@lru_cache(8)  # clients of one process may be charged the same
def _epsilons(
    spent: tuple[tuple[AbstractEvent, int], ...],
    plan: tuple[tuple[AbstractEvent, ...], ...],
    delta: float,
    relation: Relation,
) -> tuple[float, ...]:
    """Return ε of a history and, where a plan of further rounds has events, after each of these."""
    coming, ends = [event for each in plan for event in each], [0]
    if not coming:
        return (PLDAccountant().epsilon(spent, delta, relation),)
    ends += itertools.accumulate(len(each) for each in plan)
    return (*epsilon_curve(lambda n: coming[n], ends, delta, relation, spent=spent).tolist(),)


# -- the ledger --------------------------------------------------------------------------------


class ReleaseLedger:
    """One client's ledger: each release is charged once, before data is touched, and kept.

    For release ``part`` of round i of a run, in this order, each on disk before the next: that the
    round has begun, with the seed of its batch; its charge, all of it, in a journal; the bytes
    that leave. So, whenever the process is killed,

    - nothing has left that was not charged;
    - a round is charged once, and only one release of it ever leaves: asked again, the ledger
      gives the same bytes, and no noise is drawn;
    - a round that had not left is made again under its charge, on the same batch.

    How many rounds of a run fit into the budget is found before its first one; runs that take turns
    share what is left. A further round is refused, and charges nothing.

    A file that was lost, or replaced by an old copy, is noticed, and nothing goes on; if all are old
    copies of one moment, nothing can show it. The batch seeds in the folder are as private as the data.

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
        folder = local_folder("directory", directory)
        self.journal_path = folder / f"{file_name(dataset_id)}.journal"
        self._known: JournalContent | None = None  # what the latest release found in it

    def charges(self) -> Charges:
        """Return everything charged for this data set, by the rounds of all runs.

        Raises:
            JournalError: if the journal is damaged, another data set's, or behind release files.
        """
        known = [*progress_of_all(self.journal_path)]
        runs = Charges()
        if self.journal_path.exists():
            written = read_written(self.journal_path, self._known)  # the caller's, to add to
            found, runs = written.ledger_id, written.runs
            if found != self.dataset_id:
                raise JournalError(
                    f"{self.journal_path} is of data set {found!r}.", topic="journal-behind"
                )
        check_nothing_is_missing(self.journal_path, self.dataset_id, runs, known)
        return runs

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """Return everything charged for this data set, over all runs; raises as :meth:`charges`."""
        return self.charges().history()

    def epsilon(self, delta: float, relation: Relation = "add_remove") -> float:
        """Return ε at ``delta`` of everything charged so far."""
        return _epsilons(tuple(self.history()), (), delta, relation)[0]

    def release(
        self,
        spending: Spending,
        round_: int,
        part: int,
        make: _Make,
        *,
        keep: bool = True,
        try_first: Callable[[], object] | None = None,
        request: bytes = b"",
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
            try_first: called before the run's first charge: what it raises costs nothing.
            request: what was asked. Whether ``make`` fails may tell of records, and a sum without
                noise is noised once for each server that has it: after either, no other request
                gets an answer under the same charge.

        Raises:
            BudgetExhausted: if the round does not fit into the budget or the plan.
            MessageError: for a round or part that is over, or comes too early.
            JournalError: if files are missing or damaged, or another process has them.
            VoidedRunError: if real records failed a check, now or in any run over the data set.
        """
        with _OpenRun(self, spending) as run:
            before = run.progress
            is_over = (round_, part) < (before.begun, before.parts)
            if is_over and (sent := run.kept.get((round_, part))) is not None:
                return sent
            asked = hashlib.sha256(request).hexdigest() if before.only or not keep else ""
            again = not keep and (round_, part) == (before.begun, before.parts - 1)
            is_next = (round_, part) == (before.begun, before.parts)
            if before.only not in ("", asked) and (again or is_next):
                raise MessageError(
                    f"Round {round_} of run {spending.run!r} failed at this client, or left without "
                    "noise, and is made for no other request than that one. Ask the same again, or "
                    "the next round; another server needs another name of the run."
                )
            if before.begun < 0 and try_first is not None:
                try_first()
            now = before if again else run.begin(round_, part)
            try:
                content = make(np.random.Generator(np.random.PCG64DXSM(int(now.seed, 16))))
            except Exception as error:
                if isinstance(error, VoidedRunError | UnsupportedModelError):
                    run.void(round_, getattr(error, "reason", text_of(error)))
                asked = hashlib.sha256(request).hexdigest()
                run.write(replace(run.progress, only=asked), run.retained)
                raise
            # On disk before it leaves: from now on this round has this release and no other.
            kept = {**run.retained, (round_, part): content} if keep else run.retained
            run.write(replace(now, parts=part + 1, only="" if keep else asked), kept)
            return content


class Claims:
    """ε of a ledger after each round of a run, found for several rounds at a time.

    Histories that are close share most of the work: ε of rounds to come, by the plan, is found next to
    that of the present one; of none at first, and of more as long as they come. A value counts for
    exactly the history that it was found for. It is an upper bound, as that of
    :meth:`ReleaseLedger.epsilon`, from which it differs by some 0.1 % at most, and does not fall.
    """

    def __init__(self, ledger: ReleaseLedger, spending: Spending) -> None:
        self._ledger, self._spending, self._largest, self._ahead = ledger, spending, 0.0, 0
        self._history, self._value = dict[AbstractEvent, int](), 0.0
        self._coming: list[tuple[Sequence[AbstractEvent], float]] = []  # by round, and ε after it

    def epsilon(self) -> float:
        """Return ε of everything charged so far, at the δ and the relation of the run."""
        charges, own = self._ledger.charges(), self._spending
        history, ahead = dict(charges.history()), 0 if self._coming else self._ahead
        while self._coming and self._history != history:
            events, self._value = self._coming.pop(0)
            for event in events:
                self._history[event] = self._history.get(event, 0) + 1
        if self._history != history:
            rounds = range(charges.of_federation(own.run)[1] + 1, own.rounds)[:ahead]
            plan, at = tuple((*own.events(i),) for i in rounds), (own.target_delta, own.relation)
            self._value, *values = _epsilons((*history.items(),), plan, *at)  # or nothing changes
            self._history, self._coming = history, [*zip(plan, values, strict=False)]
            self._ahead = min(2 * ahead + 2, _MOST_AHEAD)
        self._largest = max(self._largest, self._value)
        return self._largest


class _OpenRun:
    """The journal of a data set and the release file of one run, under their lock."""

    def __init__(self, ledger: ReleaseLedger, spending: Spending) -> None:
        journal_path, dataset_id = ledger.journal_path, ledger.dataset_id
        self._dataset, self._spending = dataset_id, spending
        self._path = release_path(journal_path, spending.run)
        if not journal_path.exists():  # a lost one is not to be replaced by an empty one
            known = [*progress_of_all(journal_path)]
            if not journal_path.exists():  # nor has another process begun one meanwhile
                check_nothing_is_missing(journal_path, dataset_id, Charges(), known)
        self._journal = Journal(journal_path, dataset_id, _WAIT, ledger._known)
        try:
            if (reason := self._journal.runs.voided) is not None:
                raise VoidedRunError(reason)
            self.progress = self._read()
            if ledger._known is None:  # a process that was killed may not have waited for names
                sync_folder(journal_path.parent)
        except BaseException:
            self._journal.close()
            raise
        ledger._known = self._journal.content

    def __enter__(self) -> _OpenRun:
        return self

    def __exit__(self, *unused: object) -> None:
        self._journal.close()

    @cached_property
    def kept(self) -> Kept:
        """The releases that are on the disk, by round and part."""
        return read_release_file(self._path)[1]

    @property
    def retained(self) -> Kept:
        """Those of them that may be asked for again next to the latest round's; a new one needs none."""
        oldest = self.progress.begun - self._spending.retain + 1
        is_first = self.progress.parts == 0 and self._spending.retain == 1
        return {} if is_first else {at: sent for at, sent in self.kept.items() if at[0] >= oldest}

    def _read(self) -> Progress:
        runs, journal, spending = self._journal.runs, self._journal.path, self._spending
        known = [*progress_of_all(journal)]
        check_nothing_is_missing(journal, self._dataset, runs, known)
        # A sum of clipped records bounds no whole client, and a clipped sum no single record.
        for _, other in known:
            if other.unit not in (None, spending.unit):
                raise RefusedSetting(
                    f"unit={spending.unit!r}: run {other.run!r} over data set {self._dataset!r} has "
                    f"unit={other.unit!r}, and no ε would be about both. Use that unit.",
                    topic="other-settings",
                )
        charged, latest = runs.of_federation(spending.run)
        if (own := dict(known).get(self._path)) is not None:
            self._check(own, latest)
            return own
        if charged:
            raise JournalError(
                f"{self._path} is missing, but rounds of run {spending.run!r} were charged in "
                f"{journal}: what has left is unknown. Put it back, or take another name for the "
                "run.",
                topic="journal-missing",
            )
        limit, name = spending.affordable_rounds(runs.history()), spending.fingerprint
        others = self._charges_of_others()
        progress = Progress(
            *(spending.run, name, limit, others),
            dataset=self._dataset,
            charged=0,
            unit=spending.unit,
        )
        self.write(progress, {})
        return progress

    def _check(self, progress: Progress, latest: int) -> None:
        """Check the file: the journal may be ahead by the charge of the round begun, no more."""
        run = self._spending.run
        here = self._charges(but=progress.begun if progress.parts == 0 else None)
        known = here if progress.charged is None else progress.charged
        if progress.run != run or latest > progress.begun or here != known:
            raise JournalError(
                f"{self._path} is of another run, or an old copy: it names {known} charges of run "
                f"{progress.run!r}, and the journal {self._journal.path} has {here} of run "
                f"{run!r}. Put the right one back: what has left is in it.",
                topic="journal-behind",
            )
        if progress.fingerprint != self._spending.fingerprint:
            raise RefusedSetting(
                f"run={run!r} was begun with another plan or budget. Use those, or take "
                "another name for the run.",
                topic="other-settings",
            )

    def _charges(self, but: int | None = None) -> int:
        """Count the charges of this run, over all its rounds except one."""
        runs, run = self._journal.runs, self._spending.run
        total, _ = runs.of_federation(run)
        return total - (0 if but is None else runs.length(Round(run, but).key))

    def _charges_of_others(self) -> int:
        """Count the charges that other runs over this data set have made."""
        return self._journal.runs.total - self._charges()

    def _check_fits(self, round_: int) -> None:
        """Raise BudgetExhausted unless the budget affords what of a round is not charged yet.

        A run that has the data set to itself makes as many rounds as were found to fit before its
        first one; where another run has charged since, the two share what is left.
        """
        spending, limit = self._spending, self.progress.limit
        alone = self.progress.others == self._charges_of_others()
        if alone or not round_ < spending.rounds:
            fits, why, other = round_ < min(limit, spending.rounds), f": {limit} rounds do", ""
        else:
            written = self._journal.runs.length(Round(spending.run, round_).key)
            fits = spending.fits(spending.events(round_)[written:], self._journal.runs.history())
            why = (
                " on top of what this and other runs have spent on the data set, whose turns may follow "
                "from releases, so that they cost more than one after the other"
            )
            other = ", or with fewer rounds when others have ended"
        if not fits:
            raise BudgetExhausted(
                f"Round {round_} of run {spending.run!r} does not fit{why} "
                f"(target_epsilon={spending.target_epsilon}, rounds={spending.rounds}). Begin a run of "
                f"another name with a larger target_epsilon{other}."
            )

    def begin(self, round_: int, part: int) -> Progress:
        """Begin the next part of the current round, or a new round: it is charged on return."""
        now, run = self.progress, self._spending.run
        if (round_, part) < (now.begun, now.parts):
            raise MessageError(
                f"Part {part} of round {round_} is over; this client is at part {now.parts} of round "
                f"{now.begun} of run {run!r}. A new federation needs a new name."
            )
        if part != (now.parts if round_ == now.begun else 0):
            raise MessageError(
                f"Part {part} of round {round_} comes too early: {now.parts} are done."
            )
        self._check_fits(round_)
        if is_new := round_ > now.begun:
            seed, charged = secrets.token_hex(16), self._charges()
            now = replace(now, begun=round_, parts=0, seed=seed, charged=charged, only="")
            now = replace(now, dataset=self._dataset, unit=self._spending.unit)
            self.progress = now
        # Behind a round that was left out; or what was read, which may never have reached the disk.
        if now.parts == 0 and not (is_new and append_progress(self._path, now)):
            self.write(now, self.retained)
        # The seed is on disk, and now the charge: a process that dies between makes the same batch,
        # and finds in the journal whatever of the round's events was written already.
        events = self._spending.events(round_)
        self._journal.extend({Round(run, round_).key: [(event, 1) for event in events]})
        if now.parts == 0:
            now = replace(now, charged=self._charges(but=round_) + len(events))
        return now

    def void(self, round_: int, reason: str) -> None:
        """Withdraw ε of all that has left, if anything has, durably; no run goes on after it."""
        if self.progress.parts or self._charges(but=round_):
            key = Round(self._spending.run, round_).key
            self._journal.append(key, len(self._spending.events(round_)), Voided(reason))

    def write(self, progress: Progress, kept: Kept) -> None:
        """Replace the release file, durably."""
        write_release_file(self._path, progress, kept)
        self.progress, self.kept = progress, kept
