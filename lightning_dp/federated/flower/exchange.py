"""Messages between the server and its clients over a Flower grid: one at a time to each client."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

__all__ = ["Exchange", "Reply", "facts_of", "pack", "payload_of"]

_NO_NODE = 5  # Flower's code for a node that is gone
_LONGEST_PAUSE = 30.0


def pack(payload: bytes, facts: Mapping[str, int | float | str | bool]) -> RecordDict:
    """The content of a message: bytes that the protocol reads, and numbers that the engine does."""
    array = Array(np.frombuffer(payload, np.uint8))
    return RecordDict({"payload": ArrayRecord({"bytes": array}), "facts": ConfigRecord({**facts})})


def payload_of(message: Message) -> bytes:
    """The bytes that :func:`pack` was given."""
    return bytes(message.content["payload"]["bytes"].numpy())  # type: ignore[union-attr]


def facts_of(message: Message) -> dict[str, Any]:
    """The numbers that :func:`pack` was given."""
    return dict(message.content["facts"])


@dataclass(frozen=True)
class Reply:
    """What became of a message to a client.

    Args:
        client: to whom it went.
        payload: what the client sent back; None if nothing came, whatever the cause.
        facts: what the client says of itself.
        problem: why nothing came.
        is_introduction: nothing was sent; the client has come, or come back, at a new node.
    """

    client: int
    payload: bytes | None
    facts: Mapping[str, Any]
    problem: str = ""
    is_introduction: bool = False


@dataclass(frozen=True)
class _Flight:
    node: int
    client: int | None  # None: the node is asked who it is
    deadline: float


class Exchange:
    """Finds the clients' nodes, sends, and collects what comes back, in any order.

    - Never two messages are in flight to one node.
    - A lost, expired or failed message becomes a :class:`Reply` without a payload; what to do
      about it is the protocol's business. The next message to that client waits, longer and longer.
    - A reply that nobody waits for (a duplicate, or one that comes after its time) is dropped.
    - A node that died and came back has a new id. It is asked who it is, and takes its place.

    Args:
        grid: Flower's.
        num_clients: clients are 0, ..., num_clients - 1.
        run: the name of the run, which goes with every message.
        ttl: seconds until a message and its reply expire.
        poll_interval: seconds between two looks at the list of nodes.
    """

    def __init__(
        self, grid: Grid, num_clients: int, *, run: str, ttl: float, poll_interval: float
    ) -> None:
        self._grid = grid
        self._run = run
        self._num_clients = num_clients
        self._ttl = ttl
        self._poll_interval = poll_interval
        self._flights: dict[str, _Flight] = {}
        self._refused: list[Reply] = []
        self._nodes: dict[int, int] = {}
        self._known: set[int] = set()
        self._next_look = 0.0
        self._failures: dict[int, int] = {}
        self._not_before: dict[int, float] = {}

    @property
    def idle(self) -> list[int]:
        """The clients that may be sent a message now."""
        busy, now = {flight.node for flight in self._flights.values()}, time.monotonic()
        return [
            client
            for client, node in sorted(self._nodes.items())
            if node not in busy and self._not_before.get(client, 0.0) <= now
        ]

    @property
    def missing(self) -> list[int]:
        """The clients without a node."""
        return [client for client in range(self._num_clients) if client not in self._nodes]

    def send(self, client: int, payload: bytes) -> None:
        """Send to a client that is idle."""
        self._push("train", self._nodes[client], client, payload)

    def collect(self) -> list[Reply]:
        """Look for new nodes and for replies."""
        self._look_for_nodes()
        found, self._refused = self._refused, []
        for message in self._grid.pull_messages(list(self._flights)) if self._flights else ():
            flight = self._flights.pop(message.metadata.reply_to_message_id, None)
            if flight is None:
                continue
            if message.has_error():
                problem = f"error {message.error.code}: {message.error.reason}"
                found += self._failed(flight, problem, gone=message.error.code == _NO_NODE)
            elif flight.client is None:
                found += self._introduce(flight.node, facts_of(message))
            else:
                self._failures.pop(flight.client, None)
                found.append(Reply(flight.client, payload_of(message), facts_of(message)))
        return found + self._expire()

    # -- nodes -------------------------------------------------------------------------------

    def _look_for_nodes(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self._poll_interval
        for node in set(self._grid.get_node_ids()) - self._known:
            self._known.add(node)
            self._push("query", node, None, b"")

    def _introduce(self, node: int, facts: Mapping[str, Any]) -> list[Reply]:
        """A node has said whose it is."""
        client = int(facts["client"])
        if not 0 <= client < self._num_clients:
            raise ValueError(
                f"A node says that it is client {client} of {facts['num_clients']}, but this run has "
                f"num_clients={self._num_clients}. Give every SuperNode --node-config "
                f"'partition-id=I num-partitions={self._num_clients}'."
            )
        self._nodes[client] = node
        self._failures.pop(client, None)
        self._not_before.pop(client, None)
        return [Reply(client, None, facts, is_introduction=True)]

    def _failed(self, flight: _Flight, problem: str, *, gone: bool) -> list[Reply]:
        if flight.client is None:  # ask again who it is, when it is still there
            self._known.discard(flight.node)
            return []
        failures = self._failures[flight.client] = self._failures.get(flight.client, 0) + 1
        pause = min(_LONGEST_PAUSE, self._poll_interval * 2.0**failures)
        self._not_before[flight.client] = time.monotonic() + pause
        if gone and self._nodes.get(flight.client) == flight.node:
            del self._nodes[flight.client]
            self._known.discard(flight.node)  # it is asked again if it was only away
        return [Reply(flight.client, None, {}, problem)]

    # -- messages ----------------------------------------------------------------------------

    def _push(self, kind: str, node: int, client: int | None, payload: bytes) -> None:
        message = Message(pack(payload, {"run": self._run}), node, kind, ttl=self._ttl)
        flight = _Flight(node, client, time.monotonic() + self._ttl)
        names = list(self._grid.push_messages([message]))
        if names and names[0]:
            self._flights[names[0]] = flight
        else:
            self._refused += self._failed(flight, "Flower did not take the message", gone=True)

    def _expire(self) -> list[Reply]:
        now, found = time.monotonic(), []
        for name in [n for n, flight in self._flights.items() if flight.deadline < now]:
            problem = f"no reply within {self._ttl} s"
            found += self._failed(self._flights.pop(name), problem, gone=False)
        return found
