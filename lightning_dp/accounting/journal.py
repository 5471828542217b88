"""An append-only file of privacy charges that survives a crash at any moment."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import IO, Any, TypeAlias

import filelock

from lightning_dp.accounting.event_reader import event_from_dict
from lightning_dp.accounting.events import AbstractEvent

__all__ = [
    "Journal",
    "JournalError",
    "Runs",
    "add_charge",
    "history_of",
    "longer_run",
    "read_journal",
    "sync_folder",
]

# Per run (one fit in one process): its charges in order, equal neighbours counted together.
Runs: TypeAlias = dict[str, list[tuple[AbstractEvent, int]]]

_FORMAT = "lightning-dp-journal-1"


class JournalError(RuntimeError):
    """The record of what was spent is missing, damaged or in use: training must not go on."""


class Journal:
    """One file, one line per charge: ``[run, number, event] crc32``, fsynced before it returns.

    ``event`` is null where it equals the run's previous one. The first line names the ledger. A
    lock beside the file keeps a second process from charging the same ledger at the same time.

    Args:
        path: the file; it is made when it does not exist, with its folder.
        ledger_id: the ledger it must belong to.

    Raises:
        JournalError: if another process holds it, it belongs to another ledger, or is damaged.
    """

    def __init__(self, path: Path, ledger_id: str) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(f"{path}.lock")
        self._lock_now()
        try:
            self._last: dict[str, AbstractEvent] = {}
            self.runs = self._read(ledger_id)
            self._file = self._open(ledger_id)
        except BaseException:
            self._lock.release()
            raise

    def _lock_now(self) -> None:
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            raise JournalError(
                f"The privacy journal {self.path} is in use by another run. Two runs cannot spend "
                "from one ledger at the same time: wait for the other one to end."
            ) from None

    def _read(self, ledger_id: str) -> Runs:
        if not self.path.exists():
            return {}
        found, runs = read_journal(self.path)
        if found != ledger_id:
            raise JournalError(
                f"The privacy journal {self.path} belongs to ledger {found}, not to {ledger_id}."
            )
        self._last = {run: charges[-1][0] for run, charges in runs.items() if charges}
        return runs

    def _open(self, ledger_id: str) -> IO[bytes]:
        is_new = not self.path.exists()
        file = open(self.path, "ab")  # noqa: SIM115 (stays open until close())
        if is_new:
            file.write(_line([_FORMAT, ledger_id]))
            _sync(file)
            sync_folder(self.path.parent)
        else:
            file.truncate(_whole_lines(self.path.read_bytes()))
        return file

    def append(self, run: str, number: int, event: AbstractEvent) -> None:
        """Write one charge and wait until it is on the disk."""
        self._write(run, number, event)
        _sync(self._file)

    def extend(self, runs: Runs) -> None:
        """Write whatever of ``runs`` is not in the file yet, with one wait at the end."""
        for run, charges in runs.items():
            written = sum(count for _, count in self.runs.get(run, []))
            events = [event for event, count in charges for _ in range(count)]
            for number in range(written, len(events)):
                self._write(run, number, events[number])
        _sync(self._file)

    def _write(self, run: str, number: int, event: AbstractEvent) -> None:
        same = self._last.get(run) == event
        self._file.write(_line([run, number, None if same else event.to_dict()]))
        self._last[run] = event

    def close(self) -> None:
        """Close the file and let others have it."""
        try:
            self._file.close()
        finally:  # also when the disk is full
            self._lock.release()


def read_journal(path: Path) -> tuple[str, Runs]:
    """The ledger id and all charges in a journal.

    A last line without its newline is a charge that was being written when the process died: its
    data was never touched, and it is left out. Anything else that does not check is damage.

    Raises:
        JournalError: if the file is missing or damaged.
    """
    if not path.exists():
        raise JournalError(f"The privacy journal {path} does not exist.")
    content = path.read_bytes()
    lines = content[: _whole_lines(content)].splitlines()
    if not lines:
        raise JournalError(f"The privacy journal {path} is empty or not a journal.")
    header = _parse(path, 1, lines[0])
    if len(header) != 2 or header[0] != _FORMAT:
        raise JournalError(f"{path} is not a privacy journal of this version ({_FORMAT}).")
    runs: Runs = {}
    lengths: dict[str, int] = {}
    for position, line in enumerate(lines[1:], start=2):
        run, number, description = _parse(path, position, line)
        charges = runs.setdefault(run, [])
        if number != lengths.get(run, 0) or (description is None and not charges):
            raise JournalError(f"The privacy journal {path} is damaged before line {position}.")
        add_charge(charges, charges[-1][0] if description is None else event_from_dict(description))
        lengths[run] = number + 1
    return str(header[1]), runs


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


def _line(record: list[Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":"))
    return f"{text} {zlib.crc32(text.encode()):08x}\n".encode()


def _parse(path: Path, position: int, line: bytes) -> list[Any]:
    text, _, checksum = line.rpartition(b" ")
    if f"{zlib.crc32(text):08x}".encode() != checksum:
        raise JournalError(
            f"The privacy journal {path} is damaged: line {position} does not check."
        )
    record: list[Any] = json.loads(text)
    return record


def _whole_lines(content: bytes) -> int:
    """How many bytes of the file are complete lines."""
    return content.rfind(b"\n") + 1


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the new file's name durable too (POSIX; other systems have no such call)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
