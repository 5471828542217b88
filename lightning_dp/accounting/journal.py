"""Charges and the files that keep them: the journal of a ledger, and a federated client's releases.

Both files have lines of JSON with a checksum, and survive a crash at any moment.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, cast
from urllib.parse import quote

import filelock

from lightning_dp._files import FILE_MODE, make_folder, replaced
from lightning_dp._refusals import Refusal, RefusedSetting, text_of
from lightning_dp._validate import whole
from lightning_dp.accounting.events import (
    AbstractEvent,
    AbstractExternal,
    ApproximateDP,
    History,
    event_from_dict,
)

_FORMAT = "lightning-dp-journal-2"
_FORMATS = ("lightning-dp-journal-1", _FORMAT)  # the first one has charges only
WEIGHTS, DATA, BUDGET = "weights", "data", "budget"  # kinds of notes
PLAN, SAVED, END = "plan", "saved", "end"
_LINES_AT_ONCE = 4096
_ID = re.compile(r"[0-9a-f]{16}")
_CURE = (
    "Put the right file back, or move it away and write a new one from a checkpoint with "
    "lightning_dp.accounting.recover_journal(checkpoint_path, directory, unrecorded_steps)."
)

_RELEASE_FORMAT = "lightning-dp-releases-1"
_RELEASE_CURE = "Put the right one back, of the same moment as the journal next to it."
_LONGEST_HEADER = 1 << 20
_LONGEST_NAME = 1000
_ROUND = re.compile(r"(?P<run>.*)#(?P<number>[0-9]+)", re.DOTALL)

Kept = dict[tuple[int, int], bytes]  # releases by round and part

# The beginning of one line that a crash has cut: with strings left out, no blank except before the
# checksum. A whole line inside it would have its checksum.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?$)')
_CUT = re.compile(r"\[[^ ]*(?:(?<=\]) [0-9a-f]{0,7})?")
_WHOLE = re.compile(r"\] [0-9a-f]{8}")
_PLACE = re.compile(r'\[("(?:[^"\\]|\\.)*"),([^,]*),')


class JournalError(Refusal, RuntimeError):
    """The journal is missing, damaged or in use: training must not go on."""


class JournalDiskError(JournalError, OSError):
    """The journal cannot be written: training must not go on."""


# -- charges -----------------------------------------------------------------------------------


class Charges(Mapping[str, History]):
    """The events that each run was charged, in their order; equal neighbours are counted together.

    A run is one fit in one process, or one round of a federated client. Charges are only ever added.
    ``steps`` is the number of noised steps, over all runs; what others released is none. ``voided``
    is the reason for which ε of all of them is withdrawn; None if it is not.

    Example:
        >>> from lightning_dp.accounting import Gaussian
        >>> charges = Charges({"a run": [(Gaussian(2.0), 3)]})
        >>> charges.append("another", Gaussian(2.0))
        >>> charges.steps, charges.length("another"), charges.history()
        (4, 1, [(Gaussian(noise_multiplier=2.0), 4)])
    """

    def __init__(self, runs: Mapping[str, History] | None = None) -> None:
        self._runs: dict[str, list[tuple[AbstractEvent, int]]] = {}
        self._lengths: dict[str, int] = {}
        self._counts: dict[AbstractEvent, int] = {}
        self._federations: dict[str, tuple[int, int]] = {}
        self.steps = 0
        self.voided: str | None = None
        self.merge({} if runs is None else runs)

    def __getitem__(self, run: str) -> History:
        return self._runs[run]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._runs})"

    @property
    def total(self) -> int:
        """Number of charges, over all runs, also of those that are no steps."""
        return sum(self._lengths.values())

    @property
    def external(self) -> list[tuple[AbstractExternal, int]]:
        """Releases of others about the same records, as they were declared."""
        return [
            (event, count) for event, count in self.history() if isinstance(event, AbstractExternal)
        ]

    def length(self, run: str) -> int:
        """Return the number of charges of a run; 0 for one that has none."""
        return self._lengths.get(run, 0)

    def of_federation(self, run: str) -> tuple[int, int]:
        """Return the number of charges over a federation's rounds, and the latest one; else -1."""
        return self._federations.get(run, (0, -1))

    def steps_of(self, run: str) -> int:
        """Return the number of noised steps that the charges of a run cover."""
        return sum(event.num_steps * count for event, count in self.get(run, ()))

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """Return all events with their counts; the order has no meaning for ε."""
        return list(self._counts.items())

    def append(self, run: str, event: AbstractEvent) -> None:
        """Add the next charge of a run."""
        charges = self._runs.setdefault(run, [])
        if charges and charges[-1][0] == event:
            charges[-1] = (event, charges[-1][1] + 1)
        else:
            charges.append((event, 1))
        self._lengths[run] = self.length(run) + 1
        self._count(run, event, 1)

    def merge(self, other: Mapping[str, History]) -> None:
        """Add another record: the longer one of each run.

        Raises:
            JournalError: if two records of a run contradict each other; nothing is added.
        """
        longer = {run: _longer(run, self.get(run, ()), charges) for run, charges in other.items()}
        for run, charges in longer.items():
            self._runs[run] = list(charges)
            self._lengths[run] = _length(charges)
        self.steps, self.voided, self._counts, self._federations = 0, None, {}, {}
        for run, charges in self._runs.items():
            for event, count in charges:
                self._count(run, event, count)

    def copy(self) -> Charges:
        """Return the same charges, to which others can be added."""
        same = copy.copy(self)
        same._runs = {run: list(charges) for run, charges in self._runs.items()}
        same._lengths, same._counts = dict(self._lengths), dict(self._counts)
        same._federations = dict(self._federations)
        return same

    def is_ahead_of(self, run: str, other: Charges) -> bool:
        """Return whether this record of a run is longer than the other's."""
        _longer(run, self.get(run, ()), other.get(run, ()))
        return self.length(run) > other.length(run)

    def _count(self, run: str, event: AbstractEvent, count: int) -> None:
        if (at := Round.read(run)) is not None:
            charges, latest = self.of_federation(at.run)
            self._federations[at.run] = charges + count, max(latest, at.number)
        self._counts[event] = self._counts.get(event, 0) + count
        self.steps += count * event.num_steps
        if self.voided is None:
            self.voided = event.withdrawn

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, for checkpoints and reports."""
        return {
            run: [[event.to_dict(), count] for event, count in charges]
            for run, charges in self.items()
        }

    @classmethod
    def from_dict(cls, runs: Mapping[str, Any]) -> Charges:
        """Read what :meth:`to_dict` wrote; else raise ValueError, TypeError or AttributeError."""
        return cls(
            {
                run: [(event_from_dict(event), whole("count", count)) for event, count in charges]
                for run, charges in runs.items()
            }
        )


def _length(charges: History) -> int:
    return sum(count for _, count in charges)


def _longer(run: str, a: History, b: History) -> History:
    """Return the longer one of two records of a run, if the other is a beginning of it."""
    short, long = sorted((a, b), key=_length)
    # All entries agree, except that the shorter record may end within its last one.
    begins = all(
        ours[0] == theirs[0]
        and (ours[1] == theirs[1] or (i == len(short) - 1 and ours[1] < theirs[1]))
        for i, (ours, theirs) in enumerate(zip(short, long, strict=False))
    )
    if not begins or len(short) > len(long):
        raise JournalError(
            f"Two records of run {run} contradict each other; neither can be trusted.",
            topic="journal-behind",
        )
    return long


# -- lines -------------------------------------------------------------------------------------


def checked_line(record: Sequence[object], separators: tuple[str, str] = (",", ":")) -> bytes:
    """Return a record as one line of JSON with its checksum: ``[...] crc32``."""
    text = json.dumps(record, separators=separators).encode()
    return text + _checksum(text) + b"\n"


def read_line(line: bytes) -> object:
    """Return the record of a line without its newline."""
    if not _is_whole(line):
        raise ValueError("fails its checksum")
    try:
        record: object = json.loads(line[:-9])
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    return record


def _checksum(text: bytes) -> bytes:
    return f" {zlib.crc32(text):08x}".encode()


def _is_whole(line: bytes) -> bool:
    return _checksum(line[:-9]) == line[-9:]


# -- reading -----------------------------------------------------------------------------------


@dataclass
class PlannedRun:
    """A run whose noise was calibrated, and how far its journal followed it."""

    target_epsilon: float  # for which the noise was calibrated
    last_step: int  # of the plan, at which it ends
    is_replanned: bool  # the noise was calibrated again, after a crash or another fit
    saved: int = 0  # charged steps that its latest checkpoint has made
    is_ended: bool = False  # in order; else it crashed, or still runs


@dataclass
class JournalContent:
    """The content of a journal.

    ``budget`` is the promise of runs whose noise was chosen at run time: the events that came out do not
    bound what could have. After the whole records, ``text``, comes at most the beginning of one more.
    """

    path: Path
    ledger_id: str = ""
    runs: Charges = field(default_factory=Charges)
    weights: set[str] = field(default_factory=set)  # fingerprints of those that its runs released
    data: set[tuple[int, str | None]] = field(default_factory=set)  # numbers of records, and names
    plans: dict[str, PlannedRun] = field(default_factory=dict)
    budget: ApproximateDP | None = None
    order: float | None = None  # of Rényi, by which all its runs keep to it
    lines: int = 0  # whole records
    text: bytes = field(default=b"", repr=False)
    is_ended: bool = True  # the last whole record has its newline

    def copy(self) -> JournalContent:
        """Return the same content, to which lines can be added."""
        plans = {run: replace(plan) for run, plan in self.plans.items()}
        runs, weights, data = self.runs.copy(), set(self.weights), set(self.data)
        return replace(self, runs=runs, weights=weights, data=data, plans=plans)

    def add(self, line: bytes) -> None:
        """Add the record of the next line: the ledger's name, a charge, or a note."""
        self.lines = position = self.lines + 1
        try:
            record = read_line(line)
        except ValueError as error:
            raise self._damaged(f"line {position} {error}") from None
        if position == 1:
            self._begin(record)
        elif not isinstance(record, list) or len(record) != 3:
            raise self._damaged(f"line {position} is no record")
        elif record[0] is None:
            self.add_note(record[1], record[2])
        else:
            self._add_charge(record, position)

    def _begin(self, record: object) -> None:
        if not isinstance(record, list) or len(record) != 2 or record[0] not in _FORMATS:
            raise JournalError(
                f"{self.path} is not a privacy journal of this version ({_FORMAT}).",
                topic="other-version",
            )
        if not isinstance(record[1], str):
            raise self._damaged("line 1 names no ledger")
        self.ledger_id = record[1]

    def _add_charge(self, record: list[Any], position: int) -> None:
        run, number, content = record
        if not self._is_next(run, number) or (content is None and run not in self.runs):
            raise JournalError(
                f"The privacy journal {self.path} is damaged before line {position}. {_CURE}",
                topic="journal-damaged",
            )
        try:
            event = self.runs[run][-1][0] if content is None else event_from_dict(content)
        except RefusedSetting as error:  # of another version, not damaged
            raise JournalError(
                f"The privacy journal {self.path} is of another version; line {position}: {error.text}",
                topic=error.topic,
            ) from None
        except (ValueError, TypeError, OverflowError) as error:
            how = f"line {position} has no event that can be read: {text_of(error)}"
            raise self._damaged(how) from None
        self.runs.append(run, event)

    def add_note(self, kind: object, content: object) -> None:
        """Add what is no charge; kinds of a later version may change what is spent."""
        line = f"line {self.lines}"
        if kind not in (WEIGHTS, DATA, BUDGET, PLAN, SAVED, END):
            raise self._damaged(f"{line} is of the kind {kind!r}, which this version cannot read")
        items: list[Any] = content if isinstance(content, list) else [None]
        types = [type(each) for each in items]
        if kind == DATA and types in ([int, str], [int, type(None)]):
            self.data.add((items[0], items[1]))
        elif kind == BUDGET and types in ([float, float, str], [float, float, str, float]):
            self.order = self.order or (items[3] if len(items) > 3 else None)
            try:
                self._add_budget(*items[:3])
            except ValueError as error:
                raise self._damaged(f"{line}: {text_of(error)}") from None
        elif kind == WEIGHTS and set(types) <= {str}:
            self.weights.update(items)
        elif kind == PLAN and types == [str, float, int, bool]:
            self.plans[items[0]] = PlannedRun(*items[1:])
        elif kind == SAVED and types == [str, int] and items[0] in self.plans:
            self.plans[items[0]].saved = items[1]
        elif kind == END and types == [str] and items[0] in self.plans:
            self.plans[items[0]].is_ended = True
        else:
            raise self._damaged(f"{line} has no {kind}")

    def _add_budget(self, epsilon: float, delta: float, relation: Any) -> None:
        what = f"noise chosen at run time, ledger {self.ledger_id}"
        self.include_budget(ApproximateDP(epsilon, delta, relation, what))

    def include_budget(self, other: ApproximateDP | None) -> None:
        """Add a budget of the whole ledger, if there is one; the largest counts."""
        if other is not None and (own := self.budget) is not None:
            epsilon, delta = max(own.epsilon, other.epsilon), max(own.delta, other.delta)
            other = replace(other, epsilon=epsilon, delta=delta)
        self.budget = other or self.budget

    def _is_next(self, run: object, number: object) -> bool:
        return isinstance(run, str) and type(number) is int and number == self.runs.length(run)

    def is_followed_by(self, tail: bytes) -> bool:
        """True if these bytes are the beginning of exactly one record, the next one, and not all of it.

        A crash leaves this of the line that was being written. Whatever else stands there may have
        been whole records once.
        """
        if not re.fullmatch(rb"[ -~]*", tail):
            return False  # zeros, say, for which a file system has made place
        text = tail.decode()
        if _WHOLE.search(text) or not _CUT.fullmatch(_STRING.sub("", text)):
            return False
        place = _PLACE.match(text)
        try:
            return place is None or self._is_next(*json.loads(f"[{place[1]},{place[2]}]"))
        except ValueError:
            return False

    def _damaged(self, how: str) -> JournalError:
        return JournalError(
            f"The privacy journal {self.path} is damaged: {how}. {_CURE}", topic="journal-damaged"
        )


def read_text(path: Path, content: bytes, known: JournalContent | None = None) -> JournalContent:
    """Read a journal; of one that begins as it is ``known``, what has been added.

    A last line that a crash left unfinished is a charge that was being written when the process died:
    its data was never touched, and it is left out. A whole last record that lacks its newline
    counts. Anything else that fails its checksum is damage.

    Raises:
        JournalError: if the text is damaged, or that of another file or version.
    """
    written = JournalContent(path)
    if known is not None and known.is_ended and content.startswith(known.text):
        written = known.copy()
    *lines, tail = content[len(written.text) :].split(b"\n")
    if not (lines or written.lines):
        raise JournalError(
            f"The privacy journal {path} is empty or not a journal. {_CURE}",
            topic="journal-damaged",
        )
    for line in lines:
        written.add(line)
    written.text = content.removesuffix(tail)
    if tail and _is_whole(tail):
        written.add(tail)
        written.text, written.is_ended = content, False
    elif tail and not written.is_followed_by(tail):
        raise JournalError(
            f"The privacy journal {path} is damaged: what follows line {written.lines} is not the "
            f"beginning of one record, so whole ones may be lost. {_CURE}",
            topic="journal-damaged",
        )
    return written


def read_written(path: Path, known: JournalContent | None = None) -> JournalContent:
    """Everything in a journal, of which some may be known.

    Raises:
        JournalError: if the file is missing or damaged.
        JournalDiskError: if it cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise JournalError(
            f"The privacy journal {path} does not exist.", topic="journal-missing"
        ) from None
    except OSError as error:
        raise JournalDiskError(
            f"The privacy journal {path} cannot be read: {error}. Grant access to it, or put the right "
            "file back.",
            topic="journal-disk",
        ) from error
    return read_text(path, content, known)


def read_journal(path: Path) -> tuple[str, Charges]:
    """The ledger id and all charges in a journal; see :func:`read_written`."""
    written = read_written(path)
    return written.ledger_id, written.runs


# -- writing -----------------------------------------------------------------------------------


class Journal:
    """One file, one line per charge: ``[run, number, event] crc32``, fsynced before it returns.

    ``event`` is null where it equals the run's previous one. The first line names the ledger; lines
    without a run hold fingerprints of released weights, and descriptions of the data. A lock next to
    the file keeps a second process from charging the same ledger at the same time. Only its owner
    can read a new file.

    Args:
        path: the file; it is made when it does not exist, with its folder.
        ledger_id: the ledger it must belong to.
        wait: seconds for another process that holds it to end.
        known: what was read of it before.

    Raises:
        JournalError: if another process holds it, it belongs to another ledger, or is damaged.
        JournalDiskError: if the disk does not take it.
    """

    def __init__(
        self, path: Path, ledger_id: str, wait: float = 0.0, known: JournalContent | None = None
    ) -> None:
        self.path = path
        self._is_torn, self._process = False, os.getpid()
        self._lock = filelock.FileLock(f"{path}.lock", mode=FILE_MODE)
        with self._disk("opened"):
            make_folder(path.parent)
            try:
                self._lock.acquire(timeout=wait)
            except filelock.Timeout:
                raise JournalError(
                    f"The privacy journal {path} is in use by another run. Two runs cannot spend "
                    "from one ledger at the same time: wait for the other one to end.",
                    topic="journal-in-use",
                ) from None
            try:
                self._open(ledger_id, known)
            except BaseException:
                self._lock.release()
                raise

    def _open(self, ledger_id: str, known: JournalContent | None) -> None:
        if not self.path.exists():  # at once: a crash leaves all of the first line, or none
            with replaced(self.path) as file:
                file.write(checked_line([_FORMAT, ledger_id]))
        self.content = written = read_written(self.path, known)
        if written.ledger_id != ledger_id:
            raise JournalError(
                f"The privacy journal {self.path} belongs to ledger {written.ledger_id}, not to "
                f"{ledger_id}. Put the right file back.",
                topic="journal-behind",
            )
        self.runs = written.runs
        self._last: dict[str, AbstractEvent] = {}  # of what is written from now on
        self._size = len(written.text)
        self._file: IO[bytes] = open(self.path, "ab", buffering=0)  # noqa: SIM115 (until close())
        try:
            self._file.truncate(self._size)
            if not written.is_ended:
                self._put(b"\n")
        except BaseException:
            self._file.close()
            raise

    def append(self, run: str, number: int, event: AbstractEvent) -> None:
        """Write one charge and wait until it is on the disk.

        Raises:
            JournalError: if the file is not what this process wrote; nothing is written.
            JournalDiskError: if the disk does not take it.
        """
        self._check_untouched()
        self._append([self._line(run, number, event)])
        self._last[run] = event

    def extend(self, runs: Mapping[str, Sequence[tuple[AbstractEvent, int]]]) -> None:
        """Write whatever of ``runs`` is not in the file yet, with one wait at the end."""
        self._check_untouched()
        for run, charges in runs.items():
            written = self.runs.length(run)
            events = [event for event, count in charges for _ in range(count)]
            for start in range(written, len(events), _LINES_AT_ONCE):
                lines = []
                for number, event in enumerate(events[start : start + _LINES_AT_ONCE], start):
                    lines.append(self._line(run, number, event))
                    self._last[run] = event
                self._append(lines, wait=False)
        self._append([])

    def note(self, kind: str, *content: Any) -> None:
        """Write what is no charge, as :meth:`JournalContent.add` reads it; nothing if it is known."""
        known = self.content
        if kind == WEIGHTS:
            content = tuple(each for each in content if each not in known.weights)
        if (kind == WEIGHTS and not content) or (kind == DATA and content in known.data):
            return
        self._check_untouched()
        self._append([checked_line([None, kind, content])])
        if kind in (WEIGHTS, DATA):
            known.add_note(kind, [*content])

    def _line(self, run: str, number: int, event: AbstractEvent) -> bytes:
        before = self.runs.get(run)
        last = self._last.get(run, before[-1][0] if before else None)
        content = None if last == event else event.to_dict()
        return checked_line([run, number, content])

    def _append(self, lines: Sequence[bytes], *, wait: bool = True) -> None:
        if os.getpid() != self._process:
            raise JournalError(
                f"The privacy journal {self.path} belongs to the process from which this one was forked. "
                "Train in the parent process only.",
                topic="batches-and-steps",
            )
        if self._is_torn:
            raise JournalError(
                f"The privacy journal {self.path} could not be written before; begin a new fit.",
                topic="journal-disk",
            )
        with self._disk("written"):
            try:
                self._put(b"".join(lines))
                if wait:
                    os.fsync(self._file.fileno())
            except BaseException:
                self._is_torn = True  # what is on the disk is unknown until it is read again
                raise

    def _put(self, content: bytes) -> None:
        """Write all of it, or nothing."""
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise
        self._size += len(content)

    def _check_untouched(self) -> None:
        """Refuse to go on in a file that was moved, or that others write to."""
        here = os.fstat(self._file.fileno())
        try:
            there = os.stat(self.path)
        except OSError as error:
            raise self._touched(f"is gone ({error.strerror})") from error
        if not os.path.samestat(here, there):
            raise self._touched("was replaced")
        if here.st_size != self._size:
            raise self._touched("was cut or written to by another process")

    def _touched(self, how: str) -> JournalError:
        return JournalError(
            f"The privacy journal {self.path} {how} while this run charges it. Nothing was "
            "charged for this step and its data were not touched. Put the file back as it was and "
            "resume; if it is lost, write a new one from a checkpoint with "
            "lightning_dp.accounting.recover_journal(). Nothing may change the files in ledger_dir "
            "during a run.",
            topic="journal-behind",
        )

    @contextlib.contextmanager
    def _disk(self, done: str) -> Iterator[None]:
        try:
            yield
        except JournalError:
            raise
        except OSError as error:
            raise JournalDiskError(
                f"The privacy journal {self.path} cannot be {done}: {error}. Nothing was asked of "
                "the data without a record. Make room or grant access in its folder (ledger_dir, by "
                "default <default_root_dir>/privacy) or move the file to another one, give that as "
                "ledger_dir, and resume.",
                topic="journal-disk",
            ) from error

    def close(self) -> None:
        """Close the file and let others have it."""
        try:
            self._file.close()
        finally:  # also when the disk is full
            self._lock.release()


# -- names -------------------------------------------------------------------------------------


def new_id() -> str:
    """Return the name of a new ledger or run, unlike any other."""
    return secrets.token_hex(8)


def is_ledger_id(value: object) -> bool:
    """True for a name that :func:`new_id` gives: no path, no pattern, nothing else."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def is_journal_name(name: str) -> bool:
    """True if a file of this name can be the journal of a ledger."""
    return name.endswith(".journal") and is_ledger_id(name.removesuffix(".journal"))


# -- a client's releases ------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """The progress of a run: round ``begun`` goes on, or is over after ``parts`` releases.

    ``limit`` was found when other runs had made ``others`` charges. When this was written, the
    journal of data set ``dataset`` held ``charged`` charges of the run, whose ε is about the ``unit``
    (None: an older version of this package did not write it down). ``only`` is the hash of the one
    request that the latest part is made for again: it failed, or left without noise.
    """

    run: str
    fingerprint: str
    limit: int
    others: int
    begun: int = -1
    parts: int = 0
    seed: str = ""
    dataset: str | None = None
    charged: int | None = None
    unit: str | None = None
    only: str = ""

    @classmethod
    def read(cls, path: Path, state: dict[str, Any]) -> Progress:
        """Read it field by field: one that is absent has its default, an unknown one is refused."""
        if unknown := sorted(state.keys() - {each.name for each in fields(cls)}):
            raise JournalError(
                f"{path} has unknown fields: {unknown}. Read it with the version of lightning-dp that "
                "wrote it.",
                topic="other-version",
            )
        return cls(**state)


# -- names of releases -------------------------------------------------------------------------


def check_name(argument_name: str, name: str, meaning: str) -> None:
    """Raise ValueError unless it fits into a journal and a file's name."""
    is_name = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME
    if not is_name or name.encode("utf-8", "replace").decode() != name:
        raise ValueError(
            f"{argument_name}={str(name)[:50]!r} must be {meaning}: text of 1 to {_LONGEST_NAME} "
            "characters."
        )


def file_name(name: str) -> str:
    """Return a name as part of a file name, different for different names, also without case."""
    readable = quote(name, safe=" ")[:80]
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def release_path(journal_path: Path, run: str) -> Path:
    """Return where the progress of a run over a journal's data set is."""
    return journal_path.with_suffix(f".{file_name(run)}.release")


class Round(NamedTuple):
    """A round of a federation, as a client's journal knows it: its charges are one run there."""

    run: str
    number: int

    @property
    def key(self) -> str:
        """The name of that run; :meth:`read` is the inverse."""
        return f"{self.run}#{self.number}"

    @classmethod
    def read(cls, key: str) -> Round | None:
        """Return the round of that name; None if it names no round, but the run of a training."""
        found = _ROUND.fullmatch(key)
        return None if found is None else cls(found["run"], int(found["number"]))


def federations_in(runs: Charges) -> dict[str, Charges]:
    """Return the charges of a client's journal by federation; empty if it is not a client's."""
    found: dict[str, dict[str, History]] = {}
    for key, charges in runs.items():
        if (at := Round.read(key)) is not None:
            found.setdefault(at.run, {})[key] = charges
    return {run: Charges(charges) for run, charges in found.items()}


# -- release files -----------------------------------------------------------------------------


def write_release_file(path: Path, progress: Progress, kept: Kept) -> None:
    """Replace the file, durably: it is the old one or the new one at any moment."""
    with _release_disk(path), replaced(path) as file:
        file.writelines([_line_of(progress, kept), *kept.values()])


@contextlib.contextmanager
def _release_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise JournalDiskError(
            f"The release file {path} cannot be written: {error}. Nothing leaves without it. Make room "
            "or grant access in its folder, and answer the request again.",
            topic="journal-disk",
        ) from error


def _line_of(progress: Progress, kept: Kept) -> bytes:
    places = [[round_, part, len(sent)] for (round_, part), sent in kept.items()]
    line = [_RELEASE_FORMAT, vars(progress), places, _crc_of(kept.values())]
    return checked_line(line, (", ", ": "))  # as earlier versions wrote it


def _crc_of(contents: Iterable[bytes]) -> int:
    return functools.reduce(lambda check, content: zlib.crc32(content, check), contents, 0)


def append_progress(path: Path, progress: Progress) -> bool:
    """Write that a round begins behind the releases, durably; False, and nothing, where more is there.

    The line counts instead of the first one. What a crash left of it does not: until all of it is on
    the disk, the journal has no charge of that round, and a journal that has one is refused.
    """
    with _release_disk(path), open(path, "r+b") as file:
        _, places, _ = _header(path, file.readline())
        end = file.tell() + sum(length for *_, length in places)
        if file.seek(0, os.SEEK_END) != end:
            return False
        file.write(_line_of(progress, {}))
        file.flush()
        os.fsync(file.fileno())
    return True


def read_release_file(path: Path) -> tuple[Progress, Kept]:
    """Return the progress, and the releases that may be asked for again.

    Raises:
        JournalError: if it is damaged.
    """
    with open(path, "rb") as file:
        progress, places, check = _header(path, file.readline())
        kept = {(round_, part): file.read(length) for round_, part, length in places}
        rest = file.read()  # the next round, or what earlier versions noted
    if check not in (_crc_of(kept.values()), _crc_of([*kept.values(), rest])):
        raise _release_damaged(path)
    return _begun(path, rest) or progress, kept


def _begun(path: Path, line: bytes) -> Progress | None:
    """Return what :func:`append_progress` wrote; None for another thing, or the beginning of it."""
    is_whole = line.endswith(b"\n") and _is_whole(line[:-1])
    return _header(path, line)[0] if is_whole else None


def _header(path: Path, line: bytes) -> tuple[Progress, list[list[int]], int]:
    try:
        name, state, places, check = cast("list[Any]", read_line(line.rstrip(b"\n")))
        if name == _RELEASE_FORMAT:
            return Progress.read(path, state), places, check
    except (ValueError, TypeError):
        pass
    raise _release_damaged(path)


def _release_damaged(path: Path) -> JournalError:
    return JournalError(
        f"{path} is damaged: its checksum is wrong. {_RELEASE_CURE}", topic="journal-damaged"
    )


# -- against the journal -----------------------------------------------------------------------


def progress_of_all(journal_path: Path) -> Iterator[tuple[Path, Progress]]:
    """Yield the progress of each run over the journal's data set, by the files next to it."""
    if not journal_path.parent.is_dir():
        return
    start = f"{journal_path.stem}."
    for path in sorted(journal_path.parent.iterdir()):
        if path.name.startswith(start) and path.suffix == ".release":
            with open(path, "rb") as file:
                progress, places, _ = _header(path, file.readline(_LONGEST_HEADER))
                file.seek(sum(length for *_, length in places), os.SEEK_CUR)
                yield path, _begun(path, file.readline(_LONGEST_HEADER)) or progress


def check_nothing_is_missing(
    journal_path: Path, dataset_id: str, runs: Charges, known: Sequence[tuple[Path, Progress]]
) -> None:
    """Refuse a journal that knows of fewer charges than were made, by the release files next to it.

    Args:
        journal_path, dataset_id: of the journal.
        runs: its charges.
        known: of :func:`progress_of_all`, read before it.
    """
    for path, progress in known:
        if progress.dataset not in (None, dataset_id):
            raise JournalError(
                f"{path} is of data set {progress.dataset!r}, and the journal {journal_path} of "
                f"{dataset_id!r}. Put each file back where it was.",
                topic="journal-behind",
            )
        here, _ = runs.of_federation(progress.run)
        if here < (progress.charged or 0):
            raise JournalError(
                f"The journal {journal_path} has {here} charges of run {progress.run!r}, and {path} "
                f"records {progress.charged}: the journal was lost, cut, or replaced by an old copy. "
                "Put the right journal back: without it, what was spent would be forgotten. If it is "
                "lost for good, move both files away, and add what they had spent to whatever is "
                "spent on this data from now on.",
                topic="journal-behind",
            )


def read_alone(journal: Path) -> JournalContent:
    """Read a journal by itself; refuse one that holds less than a client's release files."""
    progress = [*progress_of_all(journal)]  # first: a client charges its journal first
    written = read_written(journal)
    check_nothing_is_missing(journal, written.ledger_id, written.runs, progress)
    return written
