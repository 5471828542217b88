"""The state machines of a federation, its messages, and the records that a client answers for."""

from __future__ import annotations

import importlib
import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_dp._refusals import Refusal
from lightning_dp._validate import instance
from lightning_dp.boundary import BoundedSum, Query, State

__all__ = [
    "REFUSED",
    "AbstractClient",
    "AbstractServer",
    "Fact",
    "Message",
    "MessageError",
    "Records",
    "check_records",
    "check_start",
    "read_reply",
]

Fact: TypeAlias = str | int | float | bool

REFUSED = "refused"  # the reply of every protocol where a client has no budget left

_HEADER = "lightning_dp"
_LARGEST_NUMBER = 2**63
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


class Records(Protocol):
    """The data set of one client.

    :class:`lightning_dp.federated.local.LocalRecords` is one, made of a LightningModule and a
    data set. Records of your own may also have its ``check_point``, ``try_once``, ``has_products``
    and ``fingerprint``; what they lack is not checked.
    """

    @property
    def num_records(self) -> int:
        """N of this client."""

    @property
    def unit(self) -> str:
        """The unit whose part is clipped, each "record", or the "client" with its whole sum as one."""

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        """Return the sum of the query over these records, each clipped; sensitive until it is noised."""


class AbstractServer(ABC):
    """The server of a protocol, without an engine, a clock or a network.

    An engine does this, in any order and at any time::

        while not server.is_done:
            for client in those that no message is in flight to:
                if (request := server.request(client)) is not None:
                    send it
            for each reply that came:
                server.receive(client, reply)

    - At most one message is in flight to a client. A reply that does not come is no loss: the same
      request is made again, and the client answers with the same bytes.
    - A reply that comes twice, or too late, is not applied again.
    - :meth:`state_dict` may be taken between any two calls, and holds released values only. If
      the server may die, it must be saved before a request leaves that was made from a new state
      (:attr:`round` has changed), so that the server is never behind a client.
    """

    @property
    @abstractmethod
    def point(self) -> Tensor:
        """A copy of the global model, its trained parameters as one flat vector."""

    @property
    @abstractmethod
    def round(self) -> int:
        """The number of rounds that are over."""

    @property
    def is_done(self) -> bool:
        """True when nothing will be asked any more."""
        return bool(self.reason)

    @property
    @abstractmethod
    def reason(self) -> str:
        """The reason why it is done; empty while it is not."""

    @abstractmethod
    def request(self, client: int) -> bytes | None:
        """Return the message to send to a client now, asked again the same; None if it must wait."""

    @abstractmethod
    def receive(self, client: int, reply: bytes) -> bool:
        """Take a client's reply.

        Args:
            client: from whom.
            reply: from anybody: everything in it is checked before anything changes.

        Returns:
            True if it was applied; False for a reply that came twice or too late. An engine that
            hears nothing else for long gives up.

        Raises:
            MessageError: for any other bytes; nothing has changed then.
        """

    @abstractmethod
    def state_dict(self) -> State:
        """Return tensors, numbers, strings, lists and dicts, to be read with ``weights_only=True``."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """Go on from there. Raises ValueError if the configuration was another."""


class AbstractClient(ABC):
    """The client of a protocol: requests in, replies out, one at a time.

    What it has spent is in its ledger, on disk before a reply is made. A client may die at any
    moment: a new one, on the same ledger, answers the same request with the same bytes.
    """

    @abstractmethod
    def answer(self, request: bytes) -> bytes:
        """Return the reply to a request; if the budget does not allow it, :data:`REFUSED`, uncharged.

        Raises:
            MessageError: for bytes that are no request of this protocol, or too old a one.
            JournalError: if the ledger cannot be trusted, or another process uses it.
        """

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Public numbers about this client, among them ``epsilon``, spent so far."""


def check_records(records: object) -> None:
    """Raise TypeError unless these are the records of a client."""
    if not hasattr(records, "num_records"):
        raise TypeError(
            f"records={reprlib.repr(records)} must be records of a client, such as "
            "LocalRecords(module, data_set)."
        )


def check_start(start: object) -> None:
    """Raise unless this is a model that a server can begin with."""
    given = instance("start", start, Tensor)
    if given.dim() != 1 or not bool(torch.isfinite(given).all()):
        raise ValueError("start must be a vector of finite numbers.")


# -- messages ----------------------------------------------------------------------------------


class MessageError(Refusal, ValueError):
    """Bytes that are no message, or a message that does not keep to the protocol."""

    def __init__(self, text: str) -> None:
        super().__init__(text, topic="federated-messages")


@dataclass(frozen=True)
class Message:
    """A kind, some facts and some vectors.

    The bytes are those of safetensors: reading them runs no code of the sender's, and takes memory
    in proportion to their length. Server and clients must have one version of this package.

    Args:
        kind: what it means to the two machines that exchange it.
        facts: strings, whole numbers below 2**63, truth values and floating-point numbers.
        tensors: vectors of float64, float32, bfloat16, float16 or int64; detached, on the CPU when
            read.

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
        """Return a fact. Raises MessageError if it is missing."""
        if name not in self.facts:
            kind, there = reprlib.repr(self.kind), reprlib.repr([*self.facts])
            raise MessageError(f"A message {kind} has no {name!r}, only {there}.")
        return self.facts[name]

    def whole(self, name: str) -> int:
        """Return a fact that must be a whole number >= 0. Raises MessageError if it is not."""
        value = self[name]
        if type(value) is not int or not value >= 0:
            raise MessageError(f"{name}={reprlib.repr(value)} must be a whole number >= 0.")
        return value

    def tensor(self, name: str) -> Tensor:
        """Return a vector. Raises MessageError if it is missing."""
        if name not in self.tensors:
            raise MessageError(f"A message {reprlib.repr(self.kind)} has no tensor {name!r}.")
        return self.tensors[name]

    def reals(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return a vector in a protocol's dtype, in which it and its norm are finite.

        Raises:
            MessageError: for another size, or numbers that are too large for the dtype.
        """
        raw = self.tensor(name)
        if len(raw) != size:
            raise MessageError(f"{name} has {len(raw)} numbers and is not a vector of {size}.")
        if not raw.is_floating_point():
            raise MessageError(f"{name} is of {raw.dtype}, not of real numbers.")
        value = raw.to(torch.promote_types(dtype, torch.float32))
        if not bool(torch.isfinite(value.square().sum())):
            raise MessageError(f"{name} is not finite, or has no finite norm, as {value.dtype}.")
        return value

    def to_bytes(self) -> bytes:
        """Return the bytes, always the same for the same message."""
        for name, tensor in self.tensors.items():
            _check_tensor(name, tensor)
        content = {name: each.detach().cpu().clone() for name, each in self.tensors.items()}
        header = json.dumps([self.kind, dict(self.facts)], sort_keys=True)
        return bytes(_safetensors().save(content, {_HEADER: header}))

    @classmethod
    def from_bytes(cls, content: bytes) -> Message:
        """Read what :meth:`to_bytes` wrote. Raises MessageError for anything else."""
        library = _safetensors()
        try:
            tensors = library.load(content)
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            kind, facts = json.loads(header["__metadata__"][_HEADER])
        except Exception as error:  # the bytes may be anybody's
            raise MessageError(
                f"These bytes are no message of lightning-dp ({type(error).__name__})."
            ) from None
        if not isinstance(kind, str) or not isinstance(facts, dict):
            raise MessageError("A message has no kind or no facts.")
        for value in facts.values():
            is_large = isinstance(value, int) and not abs(value) < _LARGEST_NUMBER
            if is_large or not isinstance(value, str | int | float):
                raise MessageError("A fact is neither a string nor a number below 2**63.")
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
        return cls(kind, facts, tensors)


def _safetensors() -> ModuleType:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError:
        raise ImportError(
            "Messages need safetensors: pip install 'lightning-dp[federated]', or safetensors."
        ) from None


def _check_tensor(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _DTYPES or tensor.dim() != 1:
        shape = reprlib.repr(tuple(tensor.shape))
        raise MessageError(
            f"{reprlib.repr(name)} is of shape {shape} and {tensor.dtype}; a message has vectors of "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}."
        )


def read_reply(
    client: int,
    num_clients: int,
    content: bytes,
    numbers: tuple[str, ...],
    vectors: Mapping[str, tuple[str, ...]],
) -> Message:
    """Read a reply, and check its sender and its form; its place in the protocol is not checked yet.

    Args:
        client, num_clients: the sender, and the number of clients.
        content: the bytes.
        numbers: the facts of every reply, whole numbers >= 0.
        vectors: the tensors of a reply, by its kind; a refusal has none.

    Raises:
        MessageError: for a sender that is none of the clients, or bytes of another form.
    """
    if type(client) is not int or not 0 <= client < num_clients:
        raise MessageError(
            f"client={reprlib.repr(client)} is none of the clients 0, ..., {num_clients - 1}."
        )
    message = Message.from_bytes(content)
    tensors = {**vectors, REFUSED: ()}.get(message.kind)
    if tensors is None or {*message.facts} != {*numbers} or {*message.tensors} != {*tensors}:
        parts = (message.kind, [*message.facts], [*message.tensors])
        kind, facts, there = (reprlib.repr(part) for part in parts)
        raise MessageError(
            f"A reply of kind {kind} with the numbers {facts} and the tensors {there} belongs to "
            "another protocol."
        )
    for name in numbers:
        message.whole(name)
    return message
