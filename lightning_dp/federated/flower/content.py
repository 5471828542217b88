"""The content of a federation's Flower message, read as if anybody may have made it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from lightning_dp.federated.messages import Fact, MessageError

__all__ = ["facts_of", "pack", "payload_of", "told_by"]

_PAYLOAD, _BYTES, _FACTS = "payload", "bytes", "facts"
# How NumPy begins a file of bytes: matched, not evaluated. Groups: the header's length, theirs.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '\|u1', 'fortran_order': False, 'shape': \((\d{1,18}),\), \} *\n",
    re.DOTALL,
)
_HEADER_BEGINS = 10
_LONGEST_NAME, _LONGEST_TEXT, _MOST_FACTS = 100, 1000, 100
_LARGEST_NUMBER = 2**63
_NUMBERS = ("epsilon", "delta")

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord)


def pack(payload: bytes, facts: Mapping[str, int | float | str | bool]) -> RecordDict:
    """The content of a message: bytes that the protocol reads, and numbers that the engine does."""
    array = Array(np.frombuffer(payload, np.uint8))
    return RecordDict({_PAYLOAD: ArrayRecord({_BYTES: array}), _FACTS: ConfigRecord({**facts})})


def payload_of(message: Message) -> bytes:
    """The bytes that :func:`pack` was given. Raises MessageError if that did not make the message."""
    record = _record(message, _PAYLOAD, ArrayRecord)
    if set(record) != {_BYTES}:
        raise MessageError(f"Its record {_PAYLOAD!r} does not hold one array {_BYTES!r}.")
    data = record[_BYTES].data
    header = _HEADER.match(data) if isinstance(data, bytes) else None
    if header is None or header.end() - _HEADER_BEGINS != int.from_bytes(header[1], "little"):
        raise MessageError(f"Its array {_BYTES!r} is not a vector of bytes.")
    if len(data) - header.end() != int(header[2]):
        raise MessageError(f"Its array {_BYTES!r} has another length than it says.")
    return data[header.end() :]


def facts_of(message: Message) -> dict[str, Any]:
    """The numbers that :func:`pack` was given. Raises MessageError if there are none."""
    return dict(_record(message, _FACTS, ConfigRecord))


def told_by(message: Message) -> tuple[dict[str, Fact], bool]:
    """Return what a client tells of itself, as far as it can be kept, and whether that is all of it.

    Facts are for people to read, so an answer is not lost for the sake of them: those that are no
    numbers, truth values or short strings, or no possible ε or δ, are left out.
    """
    try:
        facts = facts_of(message)
    except MessageError:
        return {}, False
    kept = {name: value for name, value in facts.items() if _can_be_kept(name, value)}
    first = dict(list(kept.items())[:_MOST_FACTS])
    return first, len(first) == len(facts)


def _can_be_kept(name: object, value: object) -> bool:
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        return False
    if isinstance(value, str):
        return len(value) <= _LONGEST_TEXT and name not in _NUMBERS
    if isinstance(value, bool):
        return name not in _NUMBERS
    if isinstance(value, int):
        return abs(value) < _LARGEST_NUMBER and not (name in _NUMBERS and value < 0)
    return isinstance(value, float) and value >= (0 if name in _NUMBERS else -math.inf)


def _record(message: Message, name: str, kind: type[_Record]) -> _Record:
    if not message.has_content() or set(message.content) - {_PAYLOAD, _FACTS}:
        raise MessageError(f"It does not hold the records {_PAYLOAD!r} and {_FACTS!r} alone.")
    found = message.content.get(name)
    if not isinstance(found, kind):
        raise MessageError(f"It has no {kind.__name__} {name!r}.")
    return found
