"""What goes over the wire: named numbers and tensors, as bytes that are safe to read."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Fact", "Message", "MessageError"]

Fact: TypeAlias = str | int | float | bool

_MAGIC = b"ldp1"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)
}


class MessageError(ValueError):
    """Bytes that are no message, or a message that nobody here can answer."""


@dataclass(frozen=True)
class Message:
    """A kind, some facts and some tensors.

    The bytes hold a JSON header and raw little-endian numbers. Reading them runs no code of the
    sender's, and takes memory in proportion to their length.

    Args:
        kind: what it means to the two machines that exchange it.
        facts: strings, whole numbers, truth values and finite or infinite numbers.
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
        """A fact. Raises MessageError if it is not there."""
        if name not in self.facts:
            raise MessageError(f"A message {self.kind!r} has no {name!r}, only {[*self.facts]}.")
        return self.facts[name]

    def whole(self, name: str) -> int:
        """A fact that must be a whole number >= 0. Raises MessageError if it is not."""
        value = self[name]
        if type(value) is not int or not value >= 0:
            raise MessageError(f"{name}={value!r} must be a whole number >= 0.")
        return value

    def tensor(self, name: str, size: int | None = None) -> Tensor:
        """A vector, of ``size`` numbers if that is given. Raises MessageError if it is not there."""
        value = self.tensors.get(name)
        if value is None:
            raise MessageError(f"A message {self.kind!r} has no tensor {name!r}.")
        if value.dim() != 1 or (size is not None and len(value) != size):
            wanted = "" if size is None else f" of {size} numbers"
            raise MessageError(f"{name} is of shape {tuple(value.shape)}, not a vector{wanted}.")
        return value

    def to_bytes(self) -> bytes:
        """The same message always gives the same bytes."""
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
        """The inverse of :meth:`to_bytes`. Raises MessageError for anything else."""
        try:
            if content[:4] != _MAGIC:
                raise ValueError("it begins differently")
            end = 8 + int.from_bytes(content[4:8], "little")
            kind, facts, described = json.loads(content[8:end])
            tensors = {}
            for name, dtype, shape in described:
                tensors[name], end = _read(content, end, _DTYPES[dtype], shape)
            if end != len(content):
                raise ValueError("it has another length than it says")
            _check(kind, facts)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise MessageError(f"These bytes are no message of lightning-dp: {error}.") from None
        return cls(kind, facts, tensors)


def _raw(flat: Tensor) -> bytes:
    if sys.byteorder != "little":
        raise MessageError("Messages are made on little-endian machines only.")
    return bytes(flat.reshape(-1).view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


def _read(content: bytes, start: int, dtype: torch.dtype, shape: list[int]) -> tuple[Tensor, int]:
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"a shape is {shape}")
    count = math.prod(shape)
    end = start + count * dtype.itemsize
    if end > len(content):
        raise ValueError("it is cut off")
    if not count:
        return torch.zeros(shape, dtype=dtype), end
    return torch.frombuffer(bytearray(content[start:end]), dtype=dtype).reshape(shape), end


def _check(kind: object, facts: object) -> None:
    if not isinstance(kind, str) or not isinstance(facts, dict):
        raise ValueError("its kind or its facts are missing")
    for name, value in facts.items():
        if not isinstance(value, (str, int, float)):
            raise ValueError(f"{name} is neither a number nor a string")
