"""Answers of clients, read by a server that trusts no byte of them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_dp.federated.messages import Message, MessageError

__all__ = ["Form", "Reply", "check_client", "read_reply"]


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
        sender: who sent it, for error messages.
        kind: one of those that the protocol has.
        numbers: the facts of its form.
        raw: its tensor, as it came.
    """

    sender: str
    kind: str
    numbers: Mapping[str, int]
    raw: Tensor | None = None

    def vector(self, size: int, dtype: torch.dtype) -> Tensor:
        """Its tensor in a protocol's own dtype, in which it and its norm are finite.

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
