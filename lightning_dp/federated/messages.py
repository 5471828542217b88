"""Messages as bytes that are safe to read, and replies, of which no byte is trusted."""

from __future__ import annotations

import json
import math
import reprlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_dp._refusals import Refusal

__all__ = [
    "LOST",
    "REFUSED",
    "Fact",
    "Form",
    "Message",
    "MessageError",
    "Reply",
    "check_client",
    "read_reply",
]


Fact: TypeAlias = str | int | float | bool

# Replies of every protocol: the client has lost the model, or has no budget left.
LOST, REFUSED = "lost", "refused"

_MAGIC = b"ldp1"
_LONGEST_HEADER = 2**20
_MOST_DIMENSIONS = 8
_LARGEST_NUMBER = 2**63
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
}


class MessageError(Refusal, ValueError):
    """Bytes that are no message, or a message that nobody here can answer."""

    def __init__(self, text: str) -> None:
        super().__init__(text, topic="federated-messages")


@dataclass(frozen=True)
class Message:
    """A kind, some facts and some tensors.

    The bytes hold a JSON header and raw little-endian numbers. Reading them runs no code of the
    sender's, and takes memory in proportion to their length.

    Args:
        kind: what it means to the two machines that exchange it.
        facts: strings, whole numbers below 2**63, truth values and floating-point numbers.
        tensors: float64, float32, bfloat16, float16 or int64; detached, on the CPU when read.

    Example:
        >>> message = Message("update", {"round": 3}, {"sum": torch.tensor([1.0, 2.0])})
        >>> again = Message.from_bytes(message.to_bytes())
        >>> again.kind, again["round"], again.tensors["sum"]
        ('update', 3, tensor([1., 2.]))
    """

    kind: str
    facts: Mapping[str, Fact] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return a fact. Raises MessageError if it is not there."""
        if name not in self.facts:
            there = reprlib.repr([*self.facts])
            raise MessageError(f"A message {self._kind} has no {name!r}, only {there}.")
        return self.facts[name]

    def whole(self, name: str) -> int:
        """Return a fact that must be a whole number >= 0. Raises MessageError if it is not."""
        value = self[name]
        if type(value) is not int or not value >= 0:
            raise MessageError(f"{name}={reprlib.repr(value)} must be a whole number >= 0.")
        return value

    def tensor(self, name: str, size: int | None = None) -> Tensor:
        """Return a vector, of ``size`` numbers if that is given. Raises MessageError without one."""
        value = self.tensors.get(name)
        if value is None:
            raise MessageError(f"A message {self._kind} has no tensor {name!r}.")
        if value.dim() != 1 or (size is not None and len(value) != size):
            wanted = "" if size is None else f" of {size} numbers"
            raise MessageError(f"{name} is of shape {tuple(value.shape)}, not a vector{wanted}.")
        return value

    @property
    def _kind(self) -> str:
        return reprlib.repr(self.kind)  # a peer's words are shown, but not without end

    def to_bytes(self) -> bytes:
        """Return the bytes, always the same for the same message."""
        parts, described = [], []
        for name, tensor in sorted(self.tensors.items()):
            flat = tensor.detach().cpu().contiguous()
            dtype = str(flat.dtype).removeprefix("torch.")
            if dtype not in _DTYPES:
                raise MessageError(f"{name} is of dtype {flat.dtype}; use one of {[*_DTYPES]}.")
            described.append([name, dtype, list(flat.shape)])
            parts.append(_raw(flat))
        header = json.dumps(
            [self.kind, dict(self.facts), described], separators=(",", ":"), sort_keys=True
        ).encode()
        return b"".join([_MAGIC, len(header).to_bytes(4, "little"), header, *parts])

    @classmethod
    def from_bytes(cls, content: bytes) -> Message:
        """Read what :meth:`to_bytes` wrote. Raises MessageError for anything else."""
        try:
            return cls(*_read_all(content))
        except (ValueError, TypeError, RecursionError) as error:
            reason = str(error) if type(error) is ValueError else "it is not what it says"
            raise MessageError(f"These bytes are no message of lightning-dp: {reason}.") from None


def _raw(flat: Tensor) -> bytes:
    if sys.byteorder != "little":
        raise MessageError("Messages are made on little-endian machines only.")
    return bytes(flat.reshape(-1).view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def _read_all(content: bytes) -> tuple[str, dict[str, Fact], dict[str, Tensor]]:
    if content[:4] != _MAGIC:
        raise ValueError("it begins differently")
    end = 8 + int.from_bytes(content[4:8], "little")
    if not end - 8 <= _LONGEST_HEADER:
        raise ValueError("its header is too long")
    kind, facts, described = json.loads(content[8:end], object_pairs_hook=_without_doubles)
    _check(kind, facts)
    tensors: dict[str, Tensor] = {}
    for name, dtype, shape in described:
        if not isinstance(name, str) or name in tensors:
            raise ValueError("its tensors have not each a name")
        tensors[name], end = _read(content, end, dtype, shape)
    if end != len(content):
        raise ValueError("it has another length than it says")
    return kind, facts, tensors


def _read(content: bytes, start: int, dtype: object, shape: object) -> tuple[Tensor, int]:
    """Return the tensor that begins there, and where it ends; allocate nothing for one that cannot be."""
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if found is None:
        raise ValueError("a dtype is none that messages have")
    if not isinstance(shape, list) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError("a shape is no short list")
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("a shape has other entries than whole numbers")
    # An empty tensor, too: its strides are those of a full one.
    if math.prod(max(n, 1) for n in shape) * found.itemsize > len(content):
        raise ValueError("it is cut off")
    count = math.prod(shape)
    end = start + count * found.itemsize
    if end > len(content):
        raise ValueError("it is cut off")
    if not count:
        return torch.zeros(shape, dtype=found), end
    return torch.frombuffer(bytearray(content[start:end]), dtype=found).reshape(shape), end


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _check(kind: object, facts: object) -> None:
    if not isinstance(kind, str) or not isinstance(facts, dict):
        raise ValueError("its kind or its facts are missing")
    for value in facts.values():
        if not isinstance(value, (str, int, float)):
            raise ValueError("a fact is neither a number nor a string")
        if isinstance(value, int) and not abs(value) < _LARGEST_NUMBER:
            raise ValueError("a whole number is too large")


# -- replies -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """The content of a reply of one kind, and nothing besides.

    Args:
        numbers: the names of its facts, all whole numbers >= 0.
        vector: the name of its only tensor; None for none.
    """

    numbers: tuple[str, ...]
    vector: str | None = None


@dataclass(frozen=True)
class Reply:
    """A reply that has the form of its kind. Its place in the protocol is not checked yet.

    Args:
        sender: its name, for error messages.
        kind: one of those that the protocol has.
        numbers: the facts of its form.
        raw: its tensor, as it came.
    """

    sender: str
    kind: str
    numbers: Mapping[str, int]
    raw: Tensor | None = None

    def vector(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return its tensor in a protocol's dtype, in which it and its norm are finite.

        Raises:
            MessageError: for another size, or numbers that are too large for the dtype.
        """
        raw = self.raw
        if raw is None or raw.dim() != 1 or len(raw) != size:
            shape = None if raw is None else tuple(raw.shape)
            raise MessageError(
                f"{self.sender} sent a tensor of shape {shape}, not a vector of {size} numbers."
            )
        if not raw.is_floating_point():
            raise MessageError(f"{self.sender} sent a tensor of {raw.dtype}, not of real numbers.")
        value = raw.to(torch.promote_types(dtype, torch.float32))
        if not bool(torch.isfinite(value.square().sum())):
            raise MessageError(
                f"{self.sender} sent values that are not finite, or have no finite norm, as "
                f"{value.dtype}."
            )
        return value


def read_reply(sender: str, content: bytes, forms: Mapping[str, Form]) -> Reply:
    """Parse the bytes of a reply.

    Args:
        sender: such as "Client 3".
        content: from anybody.
        forms: the replies that the protocol has, by kind.

    Raises:
        MessageError: for anything else, whatever it is.
    """
    message = Message.from_bytes(content)
    form = forms.get(message.kind)
    if form is None:
        raise MessageError(
            f"A reply of kind {reprlib.repr(message.kind)} belongs to another protocol."
        )
    numbers = {name: message.whole(name) for name in form.numbers}
    tensors = () if form.vector is None else (form.vector,)
    if set(message.facts) != set(numbers) or set(message.tensors) != set(tensors):
        raise MessageError(
            f"A reply of kind {message.kind!r} has the numbers {[*numbers]} and the tensors "
            f"{[*tensors]}, not {reprlib.repr([*message.facts])} and "
            f"{reprlib.repr([*message.tensors])}."
        )
    return Reply(sender, message.kind, numbers, message.tensors.get(form.vector or ""))


def check_client(client: int, num_clients: int) -> None:
    """Raise MessageError unless it is one of 0, ..., ``num_clients`` - 1."""
    if type(client) is not int or not 0 <= client < num_clients:
        raise MessageError(
            f"client={reprlib.repr(client)} is none of the clients 0, ..., {num_clients - 1}."
        )
