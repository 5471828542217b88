"""A federation in one process, with a bad network: for unit tests of Flower apps."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

# As in Flower: what a server reads in place of a reply.
_RAISED, _NO_MESSAGE, _NO_REPLY, _NO_NODE = 2, 3, 4, 5
_RUN = _SERVER = 1


@dataclass(frozen=True)
class Faults:
    """The faults of a network. Each number is a probability, per message, in [0, 1].

    Args:
        late: the reply is held back for one to six pulls, so that others overtake it.
        lost: the client does its work, and the server reads an error in place of the reply.
        undelivered: the message never reaches the client, and the server reads an error.
        duplicated: the client gets the message twice, and the server the reply twice.
        restarted: the node dies after its work, before it replies, and comes back under a new
            node id with an empty ``Context.state``.
    """

    late: float = 0.0
    lost: float = 0.0
    undelivered: float = 0.0
    duplicated: float = 0.0
    restarted: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value <= 1:
                raise ValueError(f"Faults({name}={value}) must be in [0, 1].")


class _Flight(NamedTuple):
    node: int
    ready_at: int  # the pull that finds the replies
    replies: list[Message]


@dataclass
class LoopbackGrid(Grid):
    """Flower's ``Grid`` with the ClientApp called in this process: milliseconds per message.

    The ServerApp and ClientApp objects are those of a simulation or a deployment. Replies come in
    any order. An exception in the ClientApp becomes an error reply, as in Flower. A second message
    to a node that still owes a reply raises ``RuntimeError``: simulations run both at the same time
    on one ``Context``, and one of them is lost.

    Args:
        client_app: what every node runs.
        num_clients: how many nodes there are, with ``partition-id`` 0, 1, ... in their
            ``node_config``.
        faults: what goes wrong with messages of the kind "train"; others always arrive.
        run_config: what apps read in ``context.run_config``.
        seed: of the faults and the order.

    Example::

        LoopbackGrid(client, num_clients=3, faults=Faults(late=0.3, lost=0.1)).start(server)
    """

    client_app: ClientApp
    num_clients: int
    faults: Faults = field(default_factory=Faults)
    run_config: dict[str, bool | float | int | str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._flights: dict[str, _Flight] = {}
        self._pulls = 0
        numbers = range(self.num_clients)
        self._nodes = {100 + each: self._context(100 + each, each) for each in numbers}
        # Message() asks for the identity that Flower gives to each of its processes.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, _RUN, _SERVER

    def _context(self, node: int, partition: int | None) -> Context:
        numbers = {"partition-id": partition, "num-partitions": self.num_clients}
        config = {} if partition is None else numbers
        return Context(_RUN, node, config, RecordDict(), dict(self.run_config))  # type: ignore[arg-type]

    def start(self, server_app: ServerApp) -> Context:
        """Run a ServerApp on this grid to its end; returns the server's context."""
        context = self._context(_SERVER, None)
        server_app(grid=self, context=context)
        return context

    def restart(self, node: int) -> int:
        """Let a node die and come back, with an empty state, under the new id that is returned."""
        partition = int(self._nodes.pop(node).node_config["partition-id"])
        new = max(node, *self._nodes, 100 + self.num_clients - 1) + 1
        self._nodes[new] = self._context(new, partition)
        return new

    def set_run(self, run: Run) -> None:
        """Do nothing: there is one run, made with the grid."""

    @property
    def run(self) -> Run:
        return Run.create_empty(_RUN)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._pulls += 1
        flights = self._flights
        ready = [name for name in message_ids if name in flights]
        ready = [name for name in ready if flights[name].ready_at <= self._pulls]
        self._random.shuffle(ready)
        return [reply for name in ready for reply in flights.pop(name).replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        waiting, replies = set(self.push_messages(messages)), list[Message]()
        while waiting:
            found = list(self.pull_messages(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in found}
            replies += found
        return replies

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        if any(flight.node == node for flight in self._flights.values()):
            raise RuntimeError(
                f"Two messages are in flight to node {node}: wait for the first one's reply, or for "
                "its error."
            )
        is_training = message.metadata.message_type.startswith("train")
        faults = self.faults if is_training else Faults()
        name = str(uuid4())
        vars(message.metadata)["_message_id"] = name  # as Flower's own grids do
        pulls = self._random.randint(1, 6) if self._happens(faults.late) else 0
        replies = self._deliver(message, node, faults)
        self._flights[name] = _Flight(node, self._pulls + 1 + pulls, replies)
        return name

    def _deliver(self, message: Message, node: int, faults: Faults) -> list[Message]:
        """Return what the server will read of a message."""

        def failed(code: int, reason: str = "") -> list[Message]:
            return [Message(Error(code, reason), reply_to=message)]

        if node not in self._nodes:
            return failed(_NO_NODE)
        if self._happens(faults.undelivered):
            return failed(_NO_MESSAGE)
        replies: list[Message] = []
        for _ in range(2 if self._happens(faults.duplicated) else 1):
            try:
                replies.append(self.client_app(message, self._nodes[node]))
            except Exception as error:
                replies = failed(_RAISED, f"{type(error)}:<'{error}'>")
        if self._happens(faults.lost):
            replies = failed(_NO_REPLY)
        if self._happens(faults.restarted):
            self.restart(node)
            replies = failed(_NO_NODE)
        return replies

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability
