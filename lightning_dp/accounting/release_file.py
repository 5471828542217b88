"""The progress of a run at one client and its releases: one file for each run, whole at any moment."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote

from lightning_dp._files import replaced
from lightning_dp.accounting.charges import Charges, JournalError
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.journal import checked_line, read_line

_FORMAT = "lightning-dp-releases-1"
_LONGEST_HEADER = 1 << 20
_LONGEST_NAME = 1000
_KEY = re.compile(r"(?P<run>.*)#(?P<number>[0-9]+)", re.DOTALL)
_CURE = "Put the right one back, of the same moment as the journal next to it."

Kept = dict[tuple[int, int], bytes]


@dataclass(frozen=True)
class Progress:
    """The progress of a run: round ``begun`` goes on, or is over after ``parts`` releases.

    ``limit`` was found when other runs had made ``others`` charges. When this was written, the
    journal of data set ``dataset`` held ``charged`` charges of the run (None: an older version of
    this package did not write it down).
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

    @classmethod
    def read(cls, path: Path, state: dict[str, Any]) -> Progress:
        """Read it field by field: one that is absent has its default.

        Raises:
            JournalError: naming fields that are unknown, since they may change what was spent.
        """
        if unknown := sorted(state.keys() - {each.name for each in fields(cls)}):
            raise JournalError(
                f"{path} has unknown fields: {unknown}. Read it with the version of lightning-dp that "
                "wrote it.",
                topic="other-version",
            )
        return cls(**state)


# -- names -------------------------------------------------------------------------------------


def check_name(argument_name: str, name: str, meaning: str) -> None:
    """Raise ValueError for what cannot be written into a journal and be a part of a file's name."""
    is_name = isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME
    if not is_name or name.encode("utf-8", "replace").decode() != name:
        raise ValueError(
            f"{argument_name}={str(name)[:50]!r} must be {meaning}: text of 1 to {_LONGEST_NAME} "
            "letters."
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
        found = _KEY.fullmatch(key)
        return None if found is None else cls(found["run"], int(found["number"]))


def rounds_in(runs: Charges, run: str) -> dict[int, Sequence[tuple[AbstractEvent, int]]]:
    """Return the charges of a federation's rounds, by their numbers."""
    named = ((Round.read(key), charges) for key, charges in runs.items())
    return {at.number: charges for at, charges in named if at is not None and at.run == run}


def charges_of(runs: Charges, run: str, but: int | None = None) -> int:
    """Return the number of charges that a federation has made, over all its rounds ``but`` one."""
    rounds = rounds_in(runs, run).items()
    return sum(n for number, charges in rounds if number != but for _, n in charges)


def federations_in(runs: Charges) -> dict[str, Charges]:
    """Return the charges of a client's journal by federation; empty if it is not a client's."""
    found: dict[str, Charges] = {}
    for key, charges in runs.items():
        if (at := Round.read(key)) is not None:
            found.setdefault(at.run, Charges()).merge({key: charges})
    return found


# -- reading and writing -----------------------------------------------------------------------


def write_release_file(path: Path, progress: Progress, kept: Kept, note: bytes) -> None:
    """Replace the file, durably: it is the old one or the new one at any moment."""
    content = b"".join([*kept.values(), note])
    places = [[round_, part, len(sent)] for (round_, part), sent in kept.items()]
    header = [_FORMAT, vars(progress), places, zlib.crc32(content)]
    line = checked_line(header, (", ", ": "))  # as earlier versions wrote it
    with replaced(path) as file:
        file.write(line + content)


def read_release_file(path: Path) -> tuple[Progress, Kept, bytes]:
    """The progress, the releases that may be asked for again, and the note of the latest one.

    Raises:
        JournalError: if it is damaged.
    """
    line, _, content = path.read_bytes().partition(b"\n")
    progress, places, check = _header(path, line)
    if check != zlib.crc32(content):
        raise _damaged(path)
    kept, start = {}, 0
    for round_, part, length in places:
        kept[round_, part] = content[start : start + length]
        start += length
    return progress, kept, content[start:]


def _header(path: Path, line: bytes) -> tuple[Progress, list[list[int]], int]:
    try:
        name, state, places, check = cast("list[Any]", read_line(line.rstrip(b"\n")))
        if name == _FORMAT:
            return Progress.read(path, state), places, check
    except (ValueError, TypeError):
        pass
    raise _damaged(path)


def _damaged(path: Path) -> JournalError:
    return JournalError(
        f"{path} is damaged: its checksum is wrong. {_CURE}", topic="journal-damaged"
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
                yield path, _header(path, file.readline(_LONGEST_HEADER))[0]


def check_nothing_is_missing(
    journal_path: Path, dataset_id: str, runs: Charges, known: Sequence[tuple[Path, Progress]]
) -> None:
    """Refuse a journal that knows of fewer charges than were made, by the release files next to it.

    Args:
        journal_path, dataset_id: of the journal.
        runs: what is in it.
        known: of :func:`progress_of_all`, read before it.

    Raises:
        JournalError: naming both files and the cure.
    """
    for path, progress in known:
        if progress.dataset not in (None, dataset_id):
            raise JournalError(
                f"{path} is of data set {progress.dataset!r}, and the journal {journal_path} of "
                f"{dataset_id!r}. Put each file back where it was.",
                topic="journal-behind",
            )
        here = charges_of(runs, progress.run)
        if here < (progress.charged or 0):
            raise JournalError(
                f"The journal {journal_path} has {here} charges of run {progress.run!r}, and {path} "
                f"knows of {progress.charged}: the journal was lost, cut, or replaced by an old copy. "
                "Put the right journal back: without it, what was spent would be forgotten. If it is "
                "lost for good, move both files away, and add what they had spent to whatever is "
                "spent on this data from now on.",
                topic="journal-behind",
            )
