"""An append-only file of privacy charges that survives a crash at any moment."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import filelock

from lightning_dp._files import FILE_MODE, make_folder, replaced
from lightning_dp.accounting._journal_text import (
    Written,
    charge_line,
    data_line,
    header_line,
    read_text,
    weights_line,
)
from lightning_dp.accounting.charges import Charges, JournalError
from lightning_dp.accounting.events import AbstractEvent

__all__ = [
    "Journal",
    "JournalDiskError",
    "JournalError",
    "is_journal_name",
    "is_ledger_id",
    "new_id",
    "read_journal",
    "read_written",
]

_LINES_AT_ONCE = 4096


class JournalDiskError(JournalError, OSError):
    """The disk does not take the record of what was spent: training must not go on."""


class Journal:
    """One file, one line per charge: ``[run, number, event] crc32``, fsynced before it returns.

    ``event`` is null where it equals the run's previous one. The first line names the ledger; lines
    without a run hold fingerprints of released weights, and descriptions of the data. A lock next to
    the file keeps a second process from charging the same ledger at the same time. Only its owner
    can read a new file.

    Args:
        path: the file; it is made when it does not exist, with its folder.
        ledger_id: the ledger it must belong to.

    Raises:
        JournalError: if another process holds it, it belongs to another ledger, or is damaged.
        JournalDiskError: if the disk does not take it.
    """

    def __init__(self, path: Path, ledger_id: str) -> None:
        self.path = path
        self._is_torn, self._process = False, os.getpid()
        self._lock = filelock.FileLock(f"{path}.lock", mode=FILE_MODE)
        with self._disk("opened"):
            make_folder(path.parent)
            self._lock_now()
        try:
            with self._disk("opened"):
                self._open(ledger_id)
        except BaseException:
            self._lock.release()
            raise

    def _lock_now(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise JournalError(
                f"The privacy journal {self.path} is in use by another run. Two runs cannot spend "
                "from one ledger at the same time: wait for the other one to end.",
                topic="journal-in-use",
            ) from None

    def _open(self, ledger_id: str) -> None:
        if not self.path.exists():
            self._create(ledger_id)
        written = read_written(self.path)
        if written.ledger_id != ledger_id:
            raise JournalError(
                f"The privacy journal {self.path} belongs to ledger {written.ledger_id}, not to "
                f"{ledger_id}.",
                topic="journal-behind",
            )
        self.runs = written.runs
        self._last = {run: charges[-1][0] for run, charges in written.runs.items()}
        self.weights, self.data = written.weights, written.data
        self._size = written.size
        self._file: IO[bytes] = open(self.path, "ab", buffering=0)  # noqa: SIM115 (until close())
        try:
            self._file.truncate(written.size)
            if not written.is_ended:
                self._put(b"\n")
        except BaseException:
            self._file.close()
            raise

    def _create(self, ledger_id: str) -> None:
        """Make the file with its first line, at once: a crash leaves all of it, or none."""
        with replaced(self.path) as file:
            file.write(header_line(ledger_id))

    # -- writing ---------------------------------------------------------------------------

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

    def note_weights(self, fingerprints: Sequence[str]) -> None:
        """Write that weights with these fingerprints were released, if it is not known."""
        if new := [each for each in fingerprints if each not in self.weights]:
            self._check_untouched()
            self._append([weights_line(new)])
            self.weights.update(new)

    def note_data(self, records: int, name: str | None) -> None:
        """Write the number of records of a data set and the user's name for it, if they are new."""
        if (records, name) not in self.data:
            self._check_untouched()
            self._append([data_line(records, name)])
            self.data.add((records, name))

    def _line(self, run: str, number: int, event: AbstractEvent) -> bytes:
        return charge_line(run, number, None if self._last.get(run) == event else event)

    def _append(self, lines: Sequence[bytes], *, wait: bool = True) -> None:
        if os.getpid() != self._process:
            raise JournalError(
                f"The privacy journal {self.path} is that of the process from which this one was forked. "
                "Let the child leave training to its parent.",
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
        """Write all of it, or take back what was written."""
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
        """Refuse to go on in a file that nobody will find, or that others write to."""
        here = os.fstat(self._file.fileno())
        try:
            there = os.stat(self.path)
        except OSError as error:
            raise JournalError(
                self._touched(f"is gone ({error.strerror})"), topic="journal-behind"
            ) from error
        if not os.path.samestat(here, there):
            raise JournalError(self._touched("was replaced"), topic="journal-behind")
        if here.st_size != self._size:
            raise JournalError(
                self._touched("was cut or written to by somebody else"), topic="journal-behind"
            )

    def _touched(self, how: str) -> str:
        return (
            f"The privacy journal {self.path} {how} while this run charges it. Nothing was "
            "charged for this step and its data were not touched. Put the file back as it was and "
            "resume; if it is lost, write a new one from a checkpoint with "
            "lightning_dp.accounting.recover_journal(). Nothing may change the files in ledger_dir "
            "during a run."
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


def read_journal(path: Path) -> tuple[str, Charges]:
    """The ledger id and all charges in a journal; see :func:`read_written`."""
    written = read_written(path)
    return written.ledger_id, written.runs


def read_written(path: Path) -> Written:
    """Everything in a journal.

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
    return read_text(path, content)


_ID = re.compile(r"[0-9a-f]{16}")


def new_id() -> str:
    """Return the name of a new ledger or run, unlike any other."""
    return secrets.token_hex(8)


def is_ledger_id(value: object) -> bool:
    """True for a name that :func:`new_id` gives: no path, no pattern, nothing else.

    Example:
        >>> is_ledger_id(new_id()), is_ledger_id("../../evil")
        (True, False)
    """
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def is_journal_name(name: str) -> bool:
    """True if a file of this name can be the journal of a ledger."""
    return name.endswith(".journal") and is_ledger_id(name.removesuffix(".journal"))
