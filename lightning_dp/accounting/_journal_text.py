"""The text of a journal: a checked line for each record, and what a crash may leave of the last."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dp._refusals import RefusedSetting, text_of
from lightning_dp.accounting.charges import Charges, JournalError
from lightning_dp.accounting.events import AbstractEvent, event_from_dict

__all__ = ["Written", "charge_line", "data_line", "header_line", "read_text", "weights_line"]

_FORMAT = "lightning-dp-journal-2"
_FORMATS = ("lightning-dp-journal-1", _FORMAT)  # the first one has charges only
_WEIGHTS = "weights"
_DATA = "data"
_WAY_OUT = (
    "Put the right file back, or move it away and write a new one from a checkpoint with "
    "lightning_dp.accounting.recover_journal(checkpoint_path, directory, unrecorded_steps)."
)


@dataclass
class Written:
    """The content of a journal.

    Args:
        path: the file.
        ledger_id: of its first line.
        runs: all charges.
        weights: fingerprints of weights that its runs released.
        data: the number of records and the user's name of each data set, as far as they were noted.
        size: the bytes of its whole records; anything after them is the beginning of one more.
        is_ended: whether the last whole record has its newline.
    """

    path: Path
    ledger_id: str
    runs: Charges = field(default_factory=Charges)
    weights: set[str] = field(default_factory=set)
    data: set[tuple[int, str | None]] = field(default_factory=set)
    size: int = 0
    is_ended: bool = True

    def add(self, record: object, position: int) -> None:
        """Add the record of a line."""
        if not isinstance(record, list) or len(record) != 3:
            raise self._damaged(position, "is no record")
        run, number, content = record
        if run is None:
            self._add_note(number, content, position)
            return
        charges = self.runs.get(run, ()) if isinstance(run, str) else []
        if not self._is_next(run, number) or (content is None and not charges):
            raise JournalError(
                f"The privacy journal {self.path} is damaged before line {position}. {_WAY_OUT}",
                topic="journal-damaged",
            )
        try:
            event = charges[-1][0] if content is None else event_from_dict(content)
        except RefusedSetting as error:  # of another version, not damaged
            raise JournalError(
                f"The privacy journal {self.path} is of another version; line {position}: {error.text}",
                topic=error.topic,
            ) from None
        except (ValueError, TypeError, OverflowError) as error:
            raise self._damaged(
                position, f"has no event that can be read: {text_of(error)}"
            ) from None
        self.runs.append(run, event)

    def _is_next(self, run: object, number: object) -> bool:
        return isinstance(run, str) and type(number) is int and number == self.runs.length(run)

    def _add_note(self, kind: object, content: object, position: int) -> None:
        """A line that is no charge; kinds of a later version may change what is spent."""
        if kind not in (_WEIGHTS, _DATA):
            raise self._damaged(
                position, f"is of the kind {kind!r}, which this version cannot read"
            )
        items: list[Any] = content if isinstance(content, list) else [None]
        types = [type(each) for each in items]
        if kind == _DATA and types in ([int, str], [int, type(None)]):
            self.data.add((items[0], items[1]))
        elif kind == _WEIGHTS and set(types) <= {str}:
            self.weights.update(items)
        else:
            raise self._damaged(position, f"has no {kind}")

    def _damaged(self, position: int, how: str) -> JournalError:
        return JournalError(
            f"The privacy journal {self.path} is damaged: line {position} {how}. {_WAY_OUT}",
            topic="journal-damaged",
        )

    def may_go_on_with(self, tail: bytes) -> bool:
        """True if these bytes are the beginning of exactly one record, the next one, and not all of it.

        A crash leaves this of the line that was being written. Whatever else stands there may have
        been whole records once.
        """
        if not re.fullmatch(rb"[ -~]*", tail):
            return False  # zeros, say, for which a file system has made place
        text = tail.decode()
        try:
            record, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return any(self._may_be_next(record) for record in _completed(text))
        except RecursionError:
            return False
        return self._may_be_next(record) and _checksum(tail[:end]).startswith(tail[end:])

    def _may_be_next(self, record: object) -> bool:
        if not isinstance(record, list) or not len(record) <= 3:
            return False
        if len(record) < 3 or record[0] is None:  # its number may be cut
            return not record or record[0] is None or isinstance(record[0], str)
        return self._is_next(record[0], record[1])


def read_text(path: Path, content: bytes) -> Written:
    """Read a journal.

    A last line that a crash left unfinished is a charge that was being written when the process died:
    its data was never touched, and it is left out. A whole last record that lacks its newline
    counts. Anything else that fails its checksum is damage.

    Raises:
        JournalError: if the text is damaged, or that of another file or version.
    """
    *lines, tail = content.split(b"\n")
    if not lines:
        raise JournalError(
            f"The privacy journal {path} is empty or not a journal. {_WAY_OUT}",
            topic="journal-damaged",
        )
    written = _begin(path, lines[0])
    for position, line in enumerate(lines[1:], start=2):
        written.add(_parse(path, position, line), position)
    written.size = len(content) - len(tail)
    if not tail:
        return written
    if _is_whole(tail):
        written.add(_parse(path, len(lines) + 1, tail), len(lines) + 1)
        written.size, written.is_ended = len(content), False
    elif not written.may_go_on_with(tail):
        raise JournalError(
            f"The privacy journal {path} is damaged: what follows line {len(lines)} is not the "
            f"beginning of one record, so whole ones may be lost. {_WAY_OUT}",
            topic="journal-damaged",
        )
    return written


def header_line(ledger_id: str) -> bytes:
    """The first line, which names the ledger."""
    return _line([_FORMAT, ledger_id])


def charge_line(run: str, number: int, event: AbstractEvent | None) -> bytes:
    """The line of a run's charge; no event for the one of its charge before."""
    return _line([run, number, None if event is None else event.to_dict()])


def weights_line(fingerprints: Sequence[str]) -> bytes:
    """The line that says which weights were released."""
    return _line([None, _WEIGHTS, list(fingerprints)])


def data_line(records: int, name: str | None) -> bytes:
    """The line that describes a data set."""
    return _line([None, _DATA, [records, name]])


def _begin(path: Path, line: bytes) -> Written:
    header = _parse(path, 1, line)
    if not isinstance(header, list) or len(header) != 2 or header[0] not in _FORMATS:
        raise JournalError(
            f"{path} is not a privacy journal of this version ({_FORMAT}).", topic="other-version"
        )
    if not isinstance(header[1], str):
        raise JournalError(
            f"The privacy journal {path} is damaged: line 1 names no ledger.",
            topic="journal-damaged",
        )
    return Written(path, header[1])


def _line(record: list[Any]) -> bytes:
    text = json.dumps(record, separators=(",", ":")).encode()
    return text + _checksum(text) + b"\n"


def _checksum(text: bytes) -> bytes:
    return f" {zlib.crc32(text):08x}".encode()


def _is_whole(line: bytes) -> bool:
    return _checksum(line[:-9]) == line[-9:]


def _parse(path: Path, position: int, line: bytes) -> object:
    if not _is_whole(line):
        raise JournalError(
            f"The privacy journal {path} is damaged: line {position} fails its checksum. {_WAY_OUT}",
            topic="journal-damaged",
        )
    try:
        record: object = json.loads(line[:-9])
    except (ValueError, RecursionError):
        raise JournalError(
            f"The privacy journal {path} is damaged: line {position} is not JSON. {_WAY_OUT}",
            topic="journal-damaged",
        ) from None
    return record


# What may follow where a record was cut: in a string, a key, an escape, a number, a name.
_ENDS = ("", '"', '":0', ":0", "0", '"":0', "ull", "ll", "l", *('u0000"'[i:] for i in range(5)))


def _completed(text: str) -> Iterator[object]:
    """Records of which this text may be a beginning, each with as little as possible added."""
    closing = _closing(text)
    if closing is None:
        return
    for end in _ENDS:
        try:
            yield json.loads(text + end + closing)
        except (ValueError, RecursionError):
            continue


def _closing(text: str) -> str | None:
    """The brackets that end a record cut here; None if this is no beginning of one record."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)  # without its whole strings
    bare, _, cut = bare.partition('"')
    # A string that is cut and holds the end of a line has swallowed it.
    if not bare.startswith("[") or " " in bare or re.search(r"\] [0-9a-f]{8}", cut):
        return None
    brackets = re.sub(r"[^][{}]", "", bare)
    while (fewer := brackets.replace("[]", "").replace("{}", "")) != brackets:
        brackets = fewer
    if re.search(r"[]}]", brackets):
        return None
    return brackets[::-1].translate(str.maketrans("[{", "]}"))
