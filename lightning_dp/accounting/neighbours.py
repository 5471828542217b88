"""The other journals in a folder, read no further than a fit can wait for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG

from lightning_dp.accounting.charges import JournalError, Runs, longer_run
from lightning_dp.accounting.ids import is_ledger_id
from lightning_dp.accounting.journal_text import Written, read_text

__all__ = ["Neighbours", "neighbours", "union"]

_READ = 4_000_000  # bytes that are read record by record: a fifth of a second
_LOOKED_AT = 400_000_000  # bytes in which weights are looked for
_WEIGHTS = re.compile(rb'\n\[null,"weights",\[([^\]]*)\]')


@dataclass
class Neighbours:
    """Other journals in a folder, newest first.

    Args:
        written: those that were read.
        trained: those of them that know one of the weights.
        unread: the number of those that were too long to read now.
        damaged: files that cannot be read.
    """

    written: list[Written] = field(default_factory=list)
    trained: list[Written] = field(default_factory=list)
    unread: int = 0
    damaged: list[Path] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.written) + self.unread + len(self.damaged)


def neighbours(folder: Path, own_id: str, weights: AbstractSet[str]) -> Neighbours:
    """Read the other journals in a folder.

    Args:
        folder: where to look.
        own_id: of the ledger whose journal does not count.
        weights: fingerprints; a journal that knows one is read whatever its length is.
    """
    found = Neighbours()
    read = looked_at = 0
    for path, size in _journals(folder):
        looked_at += size
        if looked_at > _LOOKED_AT:
            found.unread += 1
            continue
        try:
            content = path.read_bytes()
            knows = not weights.isdisjoint(_weights_in(content))
            if not knows and read + size > _READ:
                found.unread += 1
                continue
            written = read_text(path, content)
        except (OSError, JournalError):
            found.damaged.append(path)
            continue
        if written.ledger_id == own_id:
            continue
        read += size
        found.written.append(written)
        if knows:
            found.trained.append(written)
    return found


def union(written: list[Written]) -> Runs:
    """All their charges; a run that several know of counts once.

    Raises:
        JournalError: if two contradict each other.
    """
    runs: Runs = {}
    for each in written:
        for name, charges in each.runs.items():
            # Federations have names that people gave; another data set may have one of the same name.
            run = name if is_ledger_id(name) else f"{each.ledger_id} {name}"
            runs[run] = longer_run(run, runs.get(run, []), charges)
    return runs


def _journals(folder: Path) -> Iterator[tuple[Path, int]]:
    """The journals and their sizes, newest first."""
    found = []
    for path in folder.glob("*.journal"):
        try:
            stat = path.stat()
        except OSError:
            continue  # gone by now
        if S_ISREG(stat.st_mode):
            found.append((stat.st_mtime, path, stat.st_size))
    for _, path, size in sorted(found, reverse=True):
        yield path, size


def _weights_in(content: bytes) -> Iterator[str]:
    for match in _WEIGHTS.finditer(content):
        yield from match[1].decode("ascii", "replace").replace('"', "").split(",")
