"""The ledger: an append-only record of privacy events, from which alone ε is computed.

After it: the union of a sweep's ledgers, the other journals of a folder, and recovery of a lost one.
"""

from __future__ import annotations

import contextlib
import math
import os
import reprlib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from stat import S_ISREG
from typing import Any

from lightning_dp._files import file_of_checkpoint, local_folder
from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp._validate import listed, whole
from lightning_dp.accounting.events import (
    AbstractEvent,
    AbstractExternal,
    ApproximateDP,
    History,
    Voided,
    VoidedRunError,
    event_from_dict,
    sampled_gaussian,
)
from lightning_dp.accounting.journal import (
    BUDGET,
    END,
    PLAN,
    SAVED,
    WEIGHTS,
    Charges,
    Journal,
    JournalContent,
    JournalError,
    PlannedRun,
    is_ledger_id,
    new_id,
    read_alone,
    read_written,
)

_FIELDS = {"id", "journal", "runs", "order"}  # of a state; only the last has a default
_READ = 8_000_000  # bytes of other journals that are read: less than half a second
_MOST = 10_000_000  # lines


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
        self.latest_weights: tuple[str, ...] = ()
        self.budget: ApproximateDP | None = None  # of runs whose noise was chosen at run time
        self.order: float | None = None  # at which it is kept, where that is a Rényi order
        self.is_replanned = False  # the noise of a run was planned after steps of others
        self.crashed: PlannedRun | None = None  # that whose checkpoint was restored last
        self.began: datetime | None = None  # at the first charge that this object saw
        self.latest: datetime | None = None  # and at the latest one
        self._charges = Charges()
        self._journal: Journal | None = None
        self._run = ""
        self._is_planned = False  # the journal has the plan of the current run

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
            JournalError: if the journal is in use, missing, damaged, or of another ledger.
            VoidedRunError: if a run of this ledger was voided.
        """
        self.end()
        self._refuse_voided()
        if directory is not None:
            path = directory / f"{self.id}.journal"
            if self.journal_path is not None:  # a lost one is not to be replaced by what is known
                path = _find(self.journal_path, directory)[0]
            journal = Journal(path.absolute(), self.id)
            self.merge(journal.runs)
            self.weights |= journal.content.weights
            self._note_promises(journal.content)
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

    def note(self, kind: str, *content: Any) -> bool:
        """Write a note into the journal, and return whether it was; the next charge raises a fault.

        Args:
            kind: ``journal.DATA`` (number of records, name or None), or
                ``BUDGET`` (ε, δ, relation, and a Rényi order or nothing; noise is chosen at run time);
                others have their method.
            content: plain values.
        """
        if self._journal is None:
            return False
        try:
            self._journal.note(kind, *content)
        except JournalError:
            return False
        return True

    def note_weights(self, fingerprints: Sequence[str]) -> None:
        """Remember that weights were released."""
        if self.latest_weights != (found := tuple(fingerprints)):
            self.latest_weights = found
            self.weights.update(found)
            self.note(WEIGHTS, *found)

    def note_plan(self, target_epsilon: float, last_step: int, *, is_replanned: bool) -> None:
        """Note that the current run's noise was calibrated, for the run that resumes it after a crash."""
        self.is_replanned |= is_replanned
        self._is_planned |= self.note(PLAN, self._run, target_epsilon, last_step, is_replanned)

    def note_saved(self, ahead: int = 0) -> None:
        """Note that a checkpoint has the steps that are charged, except those that are not made yet."""
        if self._is_planned:
            self.note(SAVED, self._run, self._charges.steps_of(self._run) - ahead)

    def end(self) -> None:
        """End the run in order: close the journal and give up its lock."""
        try:
            if self._is_planned:
                self.note(END, self._run)
        finally:
            journal, self._journal, self._run, self._is_planned = self._journal, None, "", False
            if journal is not None:
                journal.close()

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the charges; the current run and its journal stay here."""
        return {**vars(self), "_journal": None, "_run": "", "_is_planned": False}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for a checkpoint."""
        return {
            "id": self.id,
            "journal": None if self.journal_path is None else str(self.journal_path),
            "runs": self._charges.to_dict(),
            **({} if self.order is None else {"order": self.order}),
        }

    def restore(self, state: dict[str, Any], directory: Path, ahead: int = 0) -> None:
        """Add the charges of a checkpoint and its journal (lead process).

        The journal is looked for where the checkpoint says, and under its name in ``directory``; of two
        that went apart (a copied folder, a recovered journal) all charges count.

        Args:
            state: as :meth:`state_dict` gives it.
            directory: where a journal may be.
            ahead: charged steps that the checkpoint had not made.

        Raises:
            JournalError: if it is missing, damaged, or knows less than the checkpoint.
            VoidedRunError: if a run of this ledger was voided.
        """
        ledger_id, recorded, runs = read_state(state)
        if recorded is not None:
            path, *copies = _find(recorded, directory)
            written = _read_complete(path, copies, ledger_id, runs)
            self.merge(written.runs)
            self.journal_path, self.crashed = path, crashed_plan(written, runs, ahead)
            self._note_promises(written)
        self.merge(runs)
        self.id, self.order = ledger_id, self.order or state.get("order")
        self._refuse_voided()

    def _note_promises(self, written: JournalContent) -> None:
        self.is_replanned |= any(plan.is_replanned for plan in written.plans.values())
        written.include_budget(self.budget)
        self.budget, self.order = written.budget, self.order or written.order

    def mirror(self, state: dict[str, Any]) -> None:
        """Become a copy of the lead process's record (the other processes)."""
        self.id, _, runs = read_state(state)
        self._charges = runs

    def merge(self, runs: Charges) -> None:
        """Add another record: the longer one of each run."""
        self._charges.merge(runs)


def crashed_plan(written: JournalContent, known: Charges, ahead: int = 0) -> PlannedRun | None:
    """Return the plan of the run that a checkpoint is of, if leaving it cannot have been a choice.

    That is: charged steps were lost, neither this run nor a later one of the journal ended in order,
    all of them had one plan, and no checkpoint was written after this one.

    Args:
        written: the journal.
        known: the charges that the checkpoint knows; the last ones are those of its run.
        ahead: steps that they cover and that the checkpoint had not made.
    """
    of_checkpoint = ["", *known][-1]
    later = [run for run in {**written.runs, **written.plans} if run not in known]
    plans = [written.plans[run] for run in (of_checkpoint, *later) if run in written.plans]
    if len(plans) <= len(later) or any(plan.is_ended for plan in plans):
        return None  # some run has none
    made = known.steps_of(of_checkpoint) - ahead
    goal = (plans[0].target_epsilon, plans[0].last_step)
    if sum(written.runs.steps_of(run) for run in (of_checkpoint, *later)) == made:
        return None  # nothing was lost
    is_latest = plans[0].saved <= made and not any(plan.saved for plan in plans[1:])
    is_one = all((plan.target_epsilon, plan.last_step) == goal for plan in plans)
    return plans[0] if is_latest and is_one else None


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
    order = state.get("order")
    if order is not None and not (isinstance(order, float) and 1 < order < math.inf):
        raise _damaged(f"its Rényi order {reprlib.repr(order)} is not above 1")
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


def _find(recorded: Path, directory: Path) -> list[Path]:
    paths = dict.fromkeys((recorded, directory.absolute() / recorded.name))
    if found := [path for path in paths if path.exists()]:
        return found
    raise JournalError(
        f"The privacy journal {recorded} is missing (also in {directory}). Without it, steps made "
        "after the checkpoint, or by others, would be forgotten. Copy it back, or put it into the "
        "folder given as ledger_dir. If it is lost, bound the loss and write a new one with "
        "lightning_dp.accounting.recover_journal(checkpoint_path, directory, unrecorded_steps).",
        topic="journal-missing",
    )


def _read_complete(
    path: Path, copies: Sequence[Path], ledger_id: str, runs: Charges
) -> JournalContent:
    """Read a journal with the charges of its copies, if they know those of the checkpoint."""
    written, *others = (read_written(each) for each in (path, *copies))
    for each in (written, *others):
        if each.ledger_id != ledger_id:
            raise JournalError(
                f"The privacy journal {each.path} belongs to ledger {each.ledger_id}, not to "
                f"{ledger_id}. Put the right file back.",
                topic="journal-behind",
            )
        written.runs.merge(each.runs)
        written.include_budget(each.budget)
        written.order = written.order or each.order
    for run in runs:
        if runs.is_ahead_of(run, written.runs):
            raise JournalError(
                f"The privacy journal {path} lacks charges of the checkpoint: it was cut or replaced "
                "by an older copy. Put the right file back, or move it away and use "
                "lightning_dp.accounting.recover_journal().",
                topic="journal-behind",
            )
    return written


# -- unions of ledgers, and recovery ------------------------------------------------------------


def sweep_history(paths: str | Path | Iterable[str | Path]) -> list[tuple[AbstractEvent, int]]:
    """All that was asked of one data set by several trainings, each run counted once.

    For a hyper-parameter sweep whose results are seen: by plain composition it costs the epsilon
    of this history. The trials may share a ledger, a folder, or neither; a run that several
    journals or checkpoints know of (resumed from one another) is counted once.

    The sum holds if number and plans of the trials were fixed before the first one, or depend
    on the results only within a total that was. A trial that a *result* ended early
    counts with its whole plan: add the rest, ``[*sweep_history(...), (event, steps_left)]``. It does
    not cover choosing by a score on private validation data. A ledger whose noise was chosen at run
    time counts with its whole budget, :class:`ApproximateDP` at its δ: ask for ε at a larger one.

    Args:
        paths: journals, checkpoints, or folders, of which all ``*.journal`` directly in it are
            read (``<default_root_dir>/privacy`` of a Trainer).

    Returns:
        ``[(event, count), ...]``, for :func:`epsilon` and accountants, or as ``spent`` of
        :func:`calibrate`.

    Raises:
        JournalError: if a file is missing, damaged or not a journal, a folder has no journal, or
            two contradict each other.
        ValueError: if no path is given, or a checkpoint is not one of a private run.

    Example:
        >>> import tempfile
        >>> from lightning_dp.accounting import Gaussian, epsilon
        >>> folder = tempfile.mkdtemp()
        >>> for trial in range(5):
        ...     ledger = Ledger()
        ...     ledger.begin(f"trial {trial}", Path(folder))
        ...     ledger.charge(Gaussian(10.0))
        ...     ledger.end()
        >>> sweep_history(folder)
        [(Gaussian(noise_multiplier=10.0), 5)]
        >>> round(epsilon(sweep_history(folder), delta=1e-5), 3)
        0.82
    """
    one = isinstance(paths, str | os.PathLike)
    listed_paths = [paths] if one else listed("paths", paths, "files and folders")
    given = [_path("paths", each) for each in listed_paths]
    if not given:
        raise ValueError("paths is empty; name the journals, checkpoints or folders of the trials.")
    together, budgets = Charges(), dict[str, JournalContent]()
    for written in (_written_in(file) for path in given for file in _files(path)):
        if written.budget is None or written.runs.voided is not None:
            together.merge(_apart(written))
        else:
            budgets.setdefault(written.ledger_id, written).include_budget(written.budget)
    whole = [(each.budget, 1) for each in budgets.values() if each.budget is not None]
    return [*together.history(), *whole]


def _written_in(file: Path) -> JournalContent:
    """Return the charges and the budget of a journal, or of a checkpoint with its journal."""
    if not zipfile.is_zipfile(file):
        return read_alone(file)
    if (state := privacy_record(file).get("ledger")) is None:
        raise RefusedSetting(
            f"{file} is not a checkpoint of a private run.", topic="checkpoint-without-ledger"
        )
    ledger = Ledger()
    ledger.restore(state, file.parent)
    return JournalContent(file, ledger.id, ledger.runs, budget=ledger.budget)


def _apart(written: JournalContent) -> dict[str, History]:
    """Return the charges of a ledger by names that no other ledger's have.

    Federations have names that people gave; another data set may have one of the same name.
    """
    return {
        name if is_ledger_id(name) else f"{written.ledger_id} {name}": charges
        for name, charges in written.runs.items()
    }


def _path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str):
        raise TypeError(f"{name}={reprlib.repr(value)} must be a str or a pathlib.Path.")
    return Path(text)


def _files(path: Path) -> list[Path]:
    """The file, or the journals in the folder."""
    if not path.is_dir():
        return [path]
    journals = sorted(path.glob("*.journal"))
    if not journals:
        raise JournalError(
            f"There is no privacy journal (*.journal) in the folder {path}.",
            topic="journal-missing",
        )
    return journals


@dataclass
class Neighbours:
    """Other journals with charges in a folder, newest first."""

    written: list[JournalContent] = field(default_factory=list)
    unread: int = 0  # number of those too long to be read now
    damaged: list[Path] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of them."""
        return len(self.written) + self.unread + len(self.damaged)


def neighbours(folder: Path, own_id: str) -> Neighbours:
    """Read the other journals in a folder, except the one of this ledger."""
    found, read = Neighbours(), 0
    for _, path, size in sorted(_journals(folder), reverse=True):  # newest first
        if path.stem == own_id:  # however long it is
            continue
        if read + size > _READ:
            found.unread += 1
            continue
        try:
            written = read_written(path)
        except JournalError:
            found.damaged.append(path)
            continue
        if written.ledger_id != own_id and written.runs:  # a fit that was refused leaves no charges
            read += size
            found.written.append(written)
    return found


def union(written: list[JournalContent]) -> Charges:
    """All their charges; a run that several know of counts once.

    Raises:
        JournalError: if two contradict each other, or one promises no more than a budget.
    """
    together = Charges()
    for each in written:
        if each.budget is not None:
            raise JournalError(f"add {each.budget.declared}.", topic="earlier-training")
        together.merge(_apart(each))
    return together


def _journals(folder: Path) -> Iterator[tuple[float, Path, int]]:
    """Yield the time, the path and the size of each journal."""
    for path in folder.glob("*.journal"):
        with contextlib.suppress(OSError):  # gone by now
            stat = path.stat()
            if S_ISREG(stat.st_mode):
                yield stat.st_mtime, path, stat.st_size


def recover_journal(
    checkpoint_path: str | Path,
    directory: str | Path,
    unrecorded_steps: int,
    costliest: AbstractEvent | None = None,
) -> Path:
    """Write a new journal from a checkpoint.

    A journal may know of steps that the checkpoint does not (those made after it was saved, also by
    other runs that were resumed from it or from an earlier one), and what is lost can only be
    bounded, not found out. So this asks for an upper bound and charges it: each of these
    steps as the costliest one of the run's plan. Then resume from the checkpoint with
    ``ledger_dir=directory``.

    Args:
        checkpoint_path: a checkpoint of a private run.
        directory: where to write the new journal. A damaged one must be moved away first.
        unrecorded_steps: an upper bound on the steps that any run of this ledger made and that the
            checkpoint does not contain, those that asked nothing of the data too.
        costliest: an event that none of these steps cost more than, where the checkpoint cannot
            tell: noise chosen at run time, a plan that went on for longer, or another fit of the
            same callback with other batches or another noise multiplier.

    Returns:
        the path of the new journal.

    Raises:
        ValueError: if ``unrecorded_steps`` is no number of steps, the checkpoint has no journal, or
            it cannot tell what a step costs at most and ``costliest`` is not given.
        JournalError: if the journal exists.

    Example:
        >>> recover_journal(  # doctest: +SKIP
        ...     "last.ckpt", "privacy", 500, costliest=PoissonGaussian(0.8, 0.01)
        ... )
    """
    lost = whole("unrecorded_steps", unrecorded_steps, 0, _MOST)
    is_event = isinstance(costliest, AbstractEvent)
    if costliest is not None and not (is_event and costliest.is_gaussian and costliest.num_steps):
        raise ValueError(
            f"costliest={costliest!r} must be an event of a step, such as PoissonGaussian(z, q)."
        )
    record = privacy_record(checkpoint_path)
    state = record.get("ledger")
    if not isinstance(state, dict) or state.get("journal") is None:
        raise RefusedSetting(
            f"{checkpoint_path} is not a checkpoint of a private run with a journal.",
            topic="checkpoint-without-ledger",
        )
    ledger_id, recorded, runs = read_state(state)
    assert recorded is not None
    path = local_folder("directory", directory) / recorded.name
    for existing in (path, recorded):
        if existing.exists():
            raise JournalError(
                f"{existing} exists. If it is damaged, move it away first.", topic="journal-exists"
            )
    if lost:
        event = costliest or _costliest(record, runs.history(), lost)
        runs.merge({new_id(): [(event, lost)]})
    journal = Journal(path, ledger_id)
    if (report := record.get("report") or {}).get("claims_budget"):
        epsilon, delta = float(report["target_epsilon"]), float(report["delta"])
        order = [] if state.get("order") is None else [state["order"]]
        journal.note(BUDGET, epsilon, delta, report["relation"], *order)
    journal.extend(runs)
    journal.close()
    return path


def privacy_record(checkpoint_path: str | Path) -> dict[str, Any]:
    """Return the privacy record of a checkpoint; empty if it has none.

    Raises:
        ValueError: if it cannot be read without running code that is in it.
    """
    import torch  # only a checkpoint needs it, accounting does not

    path = file_of_checkpoint(_path("checkpoint_path", checkpoint_path))
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise RefusedSetting(
            f"The checkpoint {path} does not exist. Give one of the run.",
            topic="unreadable-checkpoint",
        ) from None
    except Exception as error:  # of a file that may be anybody's
        reason = str(error).strip().splitlines()
        raise RefusedSetting(
            f"{path} cannot be read as a checkpoint of plain types and tensors (nothing else is "
            "loaded, since that could run code): check the run's report file, or the journal. "
            f"torch says: {reason[0] if reason else error!r}",
            topic="unreadable-checkpoint",
        ) from None
    record = checkpoint.get("lightning_dp", {}) if isinstance(checkpoint, dict) else {}
    return record if isinstance(record, dict) else {}


def _costliest(
    record: dict[str, Any], known: list[tuple[AbstractEvent, int]], lost: int
) -> AbstractEvent:
    """An event that no step costs more than, of any run that the ledger can have had."""
    bounds = record.get("costliest")
    if bounds is None:
        raise RefusedSetting(
            "The checkpoint does not bound the cost of a lost step (noise chosen at run time, nothing "
            f"trained yet, or an older version). Give costliest=, an event that costs at least as much "
            f"as each of the unrecorded_steps={lost}, such as costliest=PoissonGaussian(z, q).",
            topic="journal-missing",
        )
    # How far a run can have come in its plan: steps that asked nothing were not charged.
    silent = sum(int(count) for _, count in (record.get("mechanism") or {}).get("unasked", ()))
    before, until = sum(count for _, count in known) + silent, bounds["until"]
    if until is not None and before + lost > until:
        raise RefusedSetting(
            f"unrecorded_steps={lost} after {before} is more than the {until} steps whose cost "
            "the checkpoint bounds. Give a smaller number, or costliest=, an event that costs at least "
            "as much as each of them.",
            topic="journal-missing",
        )
    event = event_from_dict(bounds["events"][-1][1])  # 0.2 wrote others, of earlier steps
    # It also covers steps like those already made, of other plans.
    others = [each for each, _ in known if each.is_gaussian]
    pairs = [event.pair, *(each.pair for each in others)]
    noise, rate = min(z for z, _ in pairs), max(q for _, q in pairs)
    # One that costs less than its pair bounds no other with the same pair.
    is_worst = event.is_pair or all(each == event for each in others)
    return event if is_worst and event.pair == (noise, rate) else sampled_gaussian(noise, rate)
