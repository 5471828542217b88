"""Messages between the server and its clients over a Flower grid: one at a time to each client."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from lightning_dp._refusals import text_of
from lightning_dp.federated.protocol import Fact, MessageError

__all__ = ["Exchange", "Reply", "facts_of", "pack", "payload_of"]

_LONGEST_PAUSE = 30.0
_LARGEST_SHOWN = 10**9
# Flower's codes, in our words: the reason that comes with one may be anybody's text.
_NO_NODE = 5
_CAUSES = {
    1: "its app could not be loaded",
    2: "it failed, and its log has the cause",
    3: "the message did not reach it",
    4: "its reply did not come",
    _NO_NODE: "its node is gone",
    8: "its app crashed",
}

_PAYLOAD, _BYTES, _FACTS = "payload", "bytes", "facts"
_LONGEST_NAME, _LONGEST_TEXT, _MOST_FACTS = 100, 1000, 100
_LARGEST_NUMBER = 2**63
_NOT_NEGATIVE = ("epsilon", "delta")

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord)


@dataclass(frozen=True)
class Reply:
    """A reply of a client, with its public numbers."""

    node: int
    client: int
    payload: bytes | None  # None if it has come, or come back, at a new node
    facts: Mapping[str, Fact]


class Problem(NamedTuple):
    """A message that is lost or cannot be used, and True if its client is asked again."""

    sender: str  # the client, or a node that is nobody's yet, at the beginning of a sentence
    client: int | None
    text: str
    again: bool


@dataclass(frozen=True)
class _Flight:
    node: int
    client: int | None  # None: the node is asked for its number
    deadline: float


class Exchange:
    """Finds the clients' nodes, sends, and collects what comes back, in any order.

    - Never two messages are in flight to one node.
    - A lost, expired, failed or unreadable message is noted. The next message to that node waits,
      longer and longer, until a reply is applied.
    - A reply that nobody waits for (a duplicate, or one that comes after its time) is dropped.
    - A client's number belongs to the first node that names it, until Flower no longer lists that
      node. Another one that names it is asked again later: a node that was killed and started
      again has a new id, and takes its place when the old one is gone.

    The name of the ``run`` and the fingerprint of the server's ``module`` go with every message.
    """

    def __init__(
        self,
        grid: Grid,
        num_clients: int,
        run: str,
        module: str,
        ttl: float,
        poll_interval: float,
    ) -> None:
        self._grid, self._num_clients = grid, num_clients
        self._facts = {"run": run, "module": module}
        self._ttl, self.poll_interval = ttl, poll_interval
        self._problems: list[Problem] = []
        self._flights: dict[str, _Flight] = {}
        self._nodes: dict[int, int] = {}  # of each client
        self._is_freed = False  # whether a number is, since the last look
        self._next_look = 0.0
        self._failures: dict[int, int] = {}  # of each node, since it was last of use
        self._not_before: dict[int, float] = {}

    @property
    def idle(self) -> list[int]:
        """The clients that may be sent a message now."""
        busy, now = self._busy, time.monotonic()
        return [
            client
            for client, node in sorted(self._nodes.items())
            if node not in busy and self._not_before.get(node, 0.0) <= now
        ]

    def take_problems(self) -> list[Problem]:
        """Return the problems since the last call."""
        found, self._problems = self._problems, []
        return found

    @property
    def missing(self) -> list[int]:
        """The clients without a node."""
        return [client for client in range(self._num_clients) if client not in self._nodes]

    @property
    def _busy(self) -> set[int]:
        return {flight.node for flight in self._flights.values()}

    def send(self, client: int, payload: bytes) -> None:
        """Send to a client that is idle."""
        self._push("train", self._nodes[client], client, payload)

    def collect(self) -> list[Reply]:
        """Look for new nodes and for replies."""
        self._look_for_nodes()
        found = []
        for flight, message in self._arrived():
            try:
                found.append(self._read(flight, message))
            except MessageError as error:
                self._failed(flight, text_of(error))
        for name in [n for n, each in self._flights.items() if each.deadline < time.monotonic()]:
            self._failed(self._flights.pop(name), f"no reply within {self._ttl} s")
        return found

    def settle(self, reply: Reply, *, problem: str = "", applied: bool = True) -> None:
        """Note whether the protocol applied a reply: a node whose replies are of no use must wait."""
        if applied:
            self._failures.pop(reply.node, None)
        else:
            self._postpone(reply.node)
        if problem:
            self._note(reply.client, reply.node, problem)

    def _note(self, client: int | None, node: int, problem: str, again: bool = True) -> None:
        sender = f"Node {node}" if client is None else f"Client {client}"
        self._problems.append(Problem(sender, client, problem, again))

    # -- replies -----------------------------------------------------------------------------

    def _arrived(self) -> Iterator[tuple[_Flight, Message | None]]:
        """Return the replies that have come, each with its flight; None for one Flower cannot read."""
        for name, message in self._pulled(list(self._flights)):
            flight = self._flights.get(name)
            if flight is None:
                continue
            if message and message.has_content() and message.metadata.src_node_id != flight.node:
                continue  # another node's answer in this one's name
            yield self._flights.pop(name), message

    def _pulled(self, names: list[str]) -> Iterator[tuple[str, Message | None]]:
        try:
            messages = list(self._grid.pull_messages(names)) if names else []
        except Exception:  # Flower fails as a whole where it cannot read one message
            if len(names) == 1:
                yield names[0], None
            else:
                for name in names:
                    yield from self._pulled([name])
            return
        yield from ((message.metadata.reply_to_message_id, message) for message in messages)

    def _read(self, flight: _Flight, message: Message | None) -> Reply:
        if message is None:
            raise MessageError("Flower cannot read its reply")
        if message.has_error():
            code = message.error.code
            if code == _NO_NODE:
                self._free(flight)  # it is asked again if it was only away
            raise MessageError(f"error {code}: {_CAUSES.get(code, 'of an unknown cause')}")
        client, payload = flight.client, None
        if client is None:
            client = self._introduce(flight.node, message)
        else:
            payload = payload_of(message)
        facts, is_all = _public_facts(message)
        named = facts.get("client")
        if type(named) is int and named != client:
            self._free(flight)
            raise MessageError("its reply is another client's")
        if not is_all:
            self._note(client, flight.node, "some of its facts cannot be kept", again=False)
        return Reply(flight.node, client, payload, facts)

    # -- nodes -------------------------------------------------------------------------------

    def _look_for_nodes(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self.poll_interval
        listed = set(self._grid.get_node_ids())
        present = {client: node for client, node in self._nodes.items() if node in listed}
        strangers = listed - set(present.values())
        if self._is_freed or len(present) < len(self._nodes):
            for node in strangers:  # one of them may have waited for the number
                self._not_before.pop(node, None)
        self._nodes, self._is_freed = present, False
        for node in strangers - self._busy:
            if self._not_before.get(node, 0.0) <= now:
                self._push("query", node, None, b"")

    def _introduce(self, node: int, message: Message) -> int:
        """Give a node the client's number that it names."""
        client = facts_of(message).get("client")
        if type(client) is not int or not 0 <= client < self._num_clients:
            is_number = type(client) is int and abs(client) < _LARGEST_SHOWN
            named = f"client {client}" if is_number else "no client"
            raise MessageError(
                f"it names itself {named}, but this run has num_clients={self._num_clients}. Give "
                f"every SuperNode --node-config 'partition-id=I num-partitions={self._num_clients}'"
            )
        if self._nodes.get(client, node) != node:
            raise MessageError(
                f"it names itself client {client}, which another node is until it leaves. Give "
                "every SuperNode its own partition-id"
            )
        self._nodes[client] = node
        self._failures.pop(node, None)
        self._not_before.pop(node, None)
        return client

    def _failed(self, flight: _Flight, problem: str) -> None:
        self._postpone(flight.node)
        self._note(flight.client, flight.node, problem)

    def _free(self, flight: _Flight) -> None:
        """Take a client's number from its node."""
        if flight.client is not None and self._nodes.get(flight.client) == flight.node:
            del self._nodes[flight.client]
            self._is_freed = True

    def _postpone(self, node: int) -> None:
        failures = self._failures[node] = self._failures.get(node, 0) + 1
        pause = min(_LONGEST_PAUSE, self.poll_interval * 2.0 ** min(failures, 32))
        self._not_before[node] = time.monotonic() + pause

    # -- messages ----------------------------------------------------------------------------

    def _push(self, kind: str, node: int, client: int | None, payload: bytes) -> None:
        message = Message(pack(payload, self._facts), node, kind, ttl=self._ttl)
        flight = _Flight(node, client, time.monotonic() + self._ttl)
        names = list(self._grid.push_messages([message]))
        if names and names[0]:
            self._flights[names[0]] = flight
        else:
            self._free(flight)
            self._failed(flight, "Flower did not take the message")


# -- the content of a message ------------------------------------------------------------------


def pack(payload: bytes, facts: Mapping[str, Fact]) -> RecordDict:
    """Return the content of a message: bytes for the protocol, and numbers for the engine."""
    array = Array("uint8", (len(payload),), "bytes", payload)
    return RecordDict({_PAYLOAD: ArrayRecord({_BYTES: array}), _FACTS: ConfigRecord({**facts})})


def payload_of(message: Message) -> bytes:
    """Return the bytes that :func:`pack` was given. Raises MessageError for other messages."""
    record = _record(message, _PAYLOAD, ArrayRecord)
    data = record[_BYTES].data if set(record) == {_BYTES} else None
    if not isinstance(data, bytes):
        raise MessageError(f"Its record {_PAYLOAD!r} does not hold one array {_BYTES!r}.")
    return data


def facts_of(message: Message) -> dict[str, Any]:
    """Return the numbers that :func:`pack` was given. Raises MessageError if there are none."""
    return dict(_record(message, _FACTS, ConfigRecord))


def _public_facts(message: Message) -> tuple[dict[str, Fact], bool]:
    """Return the facts of a client that can be kept, and True if those are all.

    Facts are for people to read, so an answer is not lost for the sake of them: those that are no
    numbers, truth values or short strings, or no possible ε or δ, are left out.
    """
    try:
        facts = facts_of(message)
    except MessageError:
        return {}, False
    good = {name: value for name, value in facts.items() if _can_be_kept(name, value)}
    first = dict(list(good.items())[:_MOST_FACTS])
    return first, len(first) == len(facts)


def _can_be_kept(name: object, value: object) -> bool:
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        least = 0 if name in _NOT_NEGATIVE else -math.inf
        return value >= least and not (isinstance(value, int) and abs(value) >= _LARGEST_NUMBER)
    is_short = isinstance(value, bool) or (isinstance(value, str) and len(value) <= _LONGEST_TEXT)
    return is_short and name not in _NOT_NEGATIVE


def _record(message: Message, name: str, kind: type[_Record]) -> _Record:
    if not message.has_content() or set(message.content) - {_PAYLOAD, _FACTS}:
        raise MessageError(f"It does not hold the records {_PAYLOAD!r} and {_FACTS!r} alone.")
    found = message.content.get(name)
    if not isinstance(found, kind):
        raise MessageError(f"It has no {kind.__name__} {name!r}.")
    return found
