"""A federation in one process, with a bad network: for unit tests of Flower apps."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from lightning_dp._refusals import RefusedRun
from lightning_dp._validate import between, normalise, whole

__all__ = ["Faults", "LoopbackGrid"]


# As in Flower: what a server reads in place of a reply.
_RAISED, _NO_MESSAGE, _NO_REPLY, _NO_NODE = 2, 3, 4, 5
_RUN = 1
_SERVER = 1


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

    Raises:
        ValueError: for a number that is not a probability.
    """

    late: float = 0.0
    lost: float = 0.0
    undelivered: float = 0.0
    duplicated: float = 0.0
    restarted: float = 0.0

    def __post_init__(self) -> None:
        normalise(self, between("[0, 1]"), *(each.name for each in fields(self)), of="Faults")


@dataclass
class _Held:
    """A message in flight, and the replies to it that wait to be pulled."""

    message: Message
    pulls_left: int
    replies: list[Message] = field(default_factory=list)

    @property
    def node(self) -> int:
        return self.message.metadata.dst_node_id

    def fail(self, code: int, reason: str = "") -> None:
        """Let the server read an error, and nothing else."""
        self.replies = [Message(Error(code, reason), reply_to=self.message)]


@dataclass
class LoopbackGrid(Grid):
    """Flower's ``Grid`` with the ClientApp called in this process: milliseconds per message.

    The ServerApp and ClientApp objects are those of a simulation or a deployment. Replies come in
    any order. An exception in the ClientApp becomes an error reply, as in Flower.

    - A second message to a node that still owes a reply raises ``RuntimeError``: simulations run
      both at the same time on one ``Context``, and one of them is lost.

    Args:
        client_app: what every node runs.
        num_clients: how many nodes there are, with ``partition-id`` 0, 1, ... in their
            ``node_config``.
        faults: what goes wrong with messages of the kind "train"; others always arrive.
        run_config: what apps read in ``context.run_config``.
        seed: of the faults and the order.

    Example:
        >>> from flwr.app import ConfigRecord
        >>> app = ClientApp()
        >>> @app.query()
        ... def who(message, context):
        ...     name = ConfigRecord({"name": context.node_config["partition-id"]})
        ...     return Message(RecordDict({"it": name}), reply_to=message)
        >>> grid = LoopbackGrid(app, num_clients=3)
        >>> asked = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
        >>> sorted(reply.content["it"]["name"] for reply in grid.send_and_receive(asked))
        [0, 1, 2]
    """

    client_app: ClientApp
    num_clients: int
    faults: Faults = field(default_factory=Faults)
    run_config: dict[str, bool | float | int | str] = field(default_factory=dict)
    seed: int = 0
    calls: int = 0
    """The number of calls of the ClientApp."""

    def __post_init__(self) -> None:
        normalise(self, whole, "num_clients")
        self._random = random.Random(self.seed)
        self._held: dict[str, _Held] = {}
        self._restarts = 0
        self._nodes = {
            100 + each: self._context(each, 100 + each) for each in range(self.num_clients)
        }
        # Message() asks for the identity that Flower gives to each of its processes.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, _RUN, _SERVER

    def _context(self, partition: int, node: int) -> Context:
        return Context(
            run_id=_RUN,
            node_id=node,
            node_config={"partition-id": partition, "num-partitions": self.num_clients},
            state=RecordDict(),
            run_config=dict(self.run_config),
        )

    def start(self, server_app: ServerApp) -> Context:
        """Run a ServerApp on this grid to its end; returns the server's context."""
        context = Context(
            run_id=_RUN,
            node_id=_SERVER,
            node_config={},
            state=RecordDict(),
            run_config=dict(self.run_config),
        )
        server_app(grid=self, context=context)
        return context

    def restart(self, node: int) -> int:
        """Let a node die and come back, with an empty state, under the new id that is returned."""
        partition = int(self._nodes.pop(node).node_config["partition-id"])
        self._restarts += 1
        new = 100 + self.num_clients + self._restarts
        self._nodes[new] = self._context(partition, new)
        return new

    # -- what Flower's servers use -----------------------------------------------------------

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
        wanted = [each for each in message_ids if each in self._held]
        self._random.shuffle(wanted)
        found: list[Message] = []
        for each in wanted:
            held = self._held[each]
            if held.pulls_left:
                held.pulls_left -= 1
            else:
                found += self._held.pop(each).replies
        return found

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        waiting, replies = set(self.push_messages(messages)), []
        while waiting:
            for reply in self.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                replies.append(reply)
        return replies

    # -- the network -------------------------------------------------------------------------

    def _push(self, message: Message) -> str:
        node = message.metadata.dst_node_id
        if any(held.node == node for held in self._held.values()):
            raise RefusedRun(
                f"Two messages are in flight to node {node}: wait for the first one's reply, or for "
                "its error.",
                topic="out-of-order",
            )
        is_training = message.metadata.message_type.startswith("train")
        faults = self.faults if is_training else Faults()
        name = str(uuid4())
        vars(message.metadata)["_message_id"] = name  # as Flower's own grids do
        held = _Held(message, self._random.randint(1, 6) if self._happens(faults.late) else 0)
        self._held[name] = held
        if node not in self._nodes:
            held.fail(_NO_NODE)
        elif self._happens(faults.undelivered):
            held.fail(_NO_MESSAGE)
        else:
            self._deliver(held, faults)
        return name

    def _deliver(self, held: _Held, faults: Faults) -> None:
        for _ in range(2 if self._happens(faults.duplicated) else 1):
            self._call(held)
        if self._happens(faults.lost):
            held.fail(_NO_REPLY)
        if self._happens(faults.restarted):
            held.fail(_NO_NODE)
            self.restart(held.node)

    def _call(self, held: _Held) -> None:
        self.calls += 1
        try:
            held.replies.append(self.client_app(held.message, self._nodes[held.node]))
        except Exception as error:
            held.fail(_RAISED, f"{type(error)}:<'{error}'>")

    def _happens(self, probability: float) -> bool:
        return self._random.random() < probability
