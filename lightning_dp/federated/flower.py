"""Federations on Flower: one message at a time to each client, each answered from its ledger."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import filelock
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from lightning_dp._files import fixed_folder, local_folder, replaced
from lightning_dp._refusals import RefusedRun, RefusedSetting, text_of
from lightning_dp._validate import above_0, instance, whole_from_0
from lightning_dp.accounting.base import Relation
from lightning_dp.federated.client import Client, check_fingerprint, fingerprint
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.logbook import Logbook, Problem
from lightning_dp.federated.protocol import (
    AbstractServer,
    Attendance,
    Fact,
    MessageError,
    Records,
)
from lightning_dp.functional import flat_dtype, flatten, unflatten

__all__ = ["client_app", "server_app"]

_log = logging.getLogger("lightning_dp.federated")
_console = logging.getLogger("flwr")  # whose lines Flower shows

_PAYLOAD, _BYTES, _FACTS = "payload", "bytes", "facts"
_LARGEST_NUMBER, _LONGEST_SHOWN = 2**63, 300
_SHORTEST_PAUSE, _LONGEST_PAUSE, _BETWEEN_LINES = 0.001, 30.0, 10.0
_STATE = "server.pt"
# Flower's codes, in our words: the reason that comes with one may be anybody's text, and is shown
# where it is a refusal only, which is made of what the server sent, and of the plan.
_RAISED, _NO_NODE = 2, 5
_CAUSES = {
    1: "its app could not be loaded",
    _RAISED: "it failed, and its log has the cause",
    3: "the message did not reach it",
    4: "its reply did not come",
    _NO_NODE: "its node is gone",
    8: "its app crashed",
}
_REFUSES = "The client refuses: "
_NO_CAUSE = "The client could not answer. The cause is in its log, since it may contain records."

_Record = TypeVar("_Record", ArrayRecord, ConfigRecord)


# -- a client --------------------------------------------------------------------------------------


def client_app(
    build: Callable[[Context], Records],
    protocol: Callable[[Context, str, Records, ReleaseLedger], Client],
    ledger_dir: str | Path | Callable[[Context], str | Path],
    runs: Collection[str] | None = None,
) -> ClientApp:
    """Return Flower's ClientApp that answers the requests of a protocol.

    A lock next to its ledger makes a client answer one request after another. An exception never
    leaves it, since its message may tell of records: the client's log has the cause. A request that
    does not keep to the plan, or a server whose module is another one, is refused before a charge.

    Assign the result at module level: Flower looks for it there. ``docs/federated.md`` has an example.

    Args:
        build: this client's records (:class:`~lightning_dp.federated.local.LocalRecords`), from
            Flower's context: which client it is says ``context.node_config["partition-id"]``.
            Called once in a process for each client.
        protocol: the client's state machine, from Flower's context, the name of the run, these
            records and their ledger. Called once in a process for each client and run.
        ledger_dir: absolute path of a folder on this client's disk, with the ledger of the data set
            ``client-`` and ``partition-id``. All runs over the data must use it, and no other data may.
        runs: the names of the federations that are answered (``name`` of
            :func:`~lightning_dp.federated.flower.server_app`); None for any.

    Raises:
        ValueError: for a ``ledger_dir`` that is relative or a URL.
    """
    if not callable(ledger_dir):
        ledger_dir = fixed_folder("ledger_dir", ledger_dir)
    app, known = ClientApp(), dict[int, Records]()  # of the clients that this process answers for
    latest: dict[tuple[int, Path], tuple[tuple[str, int], Client]] = {}  # of each, with its run

    @app.train()
    @app.query()
    def answer(message: Message, context: Context) -> Message:
        cause = _NO_CAUSE
        try:
            return Message(work(message, context), reply_to=message)
        except MessageError as error:  # made of what the server sent, and of the plan
            _log.warning("%s refuses what the server asks: %s", _name(context), text_of(error))
            cause = f"{_REFUSES}{text_of(error)}"
        except Exception:
            _log.exception("%s could not answer.", _name(context))
        return Message(Error(_RAISED, cause), reply_to=message)

    def work(message: Message, context: Context) -> RecordDict:
        """Return the reply to a request; to a query, the client's number and facts alone."""
        number, num_clients = (_config(context, key) for key in ("partition-id", "num-partitions"))
        asked = facts_of(message)
        if runs is not None and asked["run"] not in runs:
            raise MessageError("this run is not in the list of those that it answers.")
        given = ledger_dir(context) if callable(ledger_dir) else ledger_dir
        folder = fixed_folder("ledger_dir", given)
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / f"client-{number}.lock"):
            if number not in known:
                built = instance("build(...)", build(context), Records)  # type: ignore[type-abstract]
                known[number] = built
            records, at, run = known[number], (number, folder), (str(asked["run"]), context.run_id)
            if asked.get("module") and hasattr(records, "fingerprint"):
                check_fingerprint(str(asked["module"]), records.fingerprint)
            if at not in latest or latest[at][0] != run:
                made = protocol(context, run[0], records, ReleaseLedger(folder, f"client-{number}"))
                latest[at] = run, instance("protocol(...)", made, Client)  # type: ignore[type-abstract]
            client = latest[at][1]
            is_query = message.metadata.message_type.startswith("query")
            payload = b"" if is_query else client.answer(payload_of(message))
            facts = {"client": number, "num_clients": num_clients, **client.facts}
            if records.unit != "client":  # of a whole client, also this number is private
                facts["num_records"] = records.num_records
            return pack(payload, facts)

    return app


def _name(context: Context) -> str:
    return f"Client {context.node_config.get('partition-id')}"


def _config(context: Context, name: str) -> int:
    """Return a number of the node's configuration, or raise ValueError with the cure."""
    try:
        return whole_from_0(name, context.node_config.get(name))
    except ValueError as error:
        raise ValueError(
            f"{error} Start the SuperNode with --node-config 'partition-id=I num-partitions=P': which "
            "client it is, from 0 on, and how many there are."
        ) from None


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


def _record(message: Message, name: str, kind: type[_Record]) -> _Record:
    if not message.has_content() or set(message.content) - {_PAYLOAD, _FACTS}:
        raise MessageError(f"It does not hold the records {_PAYLOAD!r} and {_FACTS!r} alone.")
    found = message.content.get(name)
    if not isinstance(found, kind):
        raise MessageError(f"It has no {kind.__name__} {name!r}.")
    return found


# -- the server ------------------------------------------------------------------------------------


def server_app(
    build: Callable[[Context], nn.Module],
    protocol: Callable[[Context, str, Tensor], AbstractServer],
    *,
    folder: str | Path | Callable[[Context], str | Path] = "federated",
    evaluate: Callable[[Context, nn.Module], Mapping[str, float]] | None = None,
    ttl: float = 600.0,
    poll_interval: float = 1.0,
    name: str | None = None,
) -> ServerApp:
    """Return Flower's ServerApp that runs a protocol to its end.

    - A message that is lost, that expires or whose client died is asked again, and so is one whose
      reply cannot be used. :class:`~lightning_dp.federated.Quorum` has when a round goes on.
    - The state is saved to ``server.pt`` before a request leaves that rests on it, or its model is
      evaluated: if the run dies, a new one with the same ``folder`` goes on from there.
    - ``folder`` gets the files of :class:`~lightning_dp.federated.logbook.Logbook`, and at the end
      ``model.pt``, the module's ``state_dict``.

    Assign the result at module level: Flower looks for it there.

    Args:
        build: the LightningModule, from Flower's context (its ``run_config``). The protocol starts
            at its trained weights; frozen ones do not go over the wire, and must be the clients'.
        protocol: the server's state machine, from Flower's context, the name of the run (no other
            run has it) and the trained parameters as a flat vector.
        folder: where results go, and where a run that died is found again. A relative path is one
            from the working directory in which this function is called.
        evaluate: metrics of the global model, on data that the server may use. They are not
            covered by any client's ε if those data are private.
        ttl: seconds after which a message counts as lost; longer than a round takes.
        poll_interval: seconds between two looks for replies when nothing happens.
        name: of the run, if clients are given a list of those that they answer; no other run over
            their data may have had it. By default a random one.

    Raises:
        ValueError: for numbers that are not greater than 0, or a ``folder`` that is not on a local disk.
    """
    ttl, poll_interval = above_0("ttl", ttl), above_0("poll_interval", poll_interval)
    here = Path.cwd()
    if not callable(folder):
        folder = local_folder("folder", folder)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        place = local_folder("folder", folder(context) if callable(folder) else folder, here)
        try:  # two servers would each noise the same sums
            place.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(place / "server.lock").acquire(timeout=0)
        except OSError as error:  # a lock that another one has is one, too
            raise RefusedSetting(
                f"folder={str(place)!r} takes no results: {error}. Another server is at work in it, or "
                "it cannot be written. Give another folder, or make room.",
                topic="federated-server",
            ) from None
        with lock:
            work(context, grid, place)

    def work(context: Context, grid: Grid, place: Path) -> None:
        module = instance("build(context)", build(context), nn.Module)
        params = [param for param in module.parameters() if param.requires_grad]
        saved = _saved(place)
        run = saved["run"] if saved else name or secrets.token_hex(8)
        machine = protocol(context, run, flatten(params).to(flat_dtype(params)))
        instance("protocol(...)", machine, AbstractServer)  # type: ignore[type-abstract]
        if saved:
            with _read(place / _STATE, KeyError, TypeError, AttributeError, IndexError):
                machine.load_state_dict(saved["state"])
        metrics = (lambda: evaluate(context, module)) if evaluate else dict[str, float]
        exchange = Exchange(grid, machine.num_clients, run, fingerprint(module), ttl, poll_interval)
        is_sampled = getattr(machine, "sampling", None) is not None
        book = Logbook(place, run, is_new=saved is None, is_sampled=is_sampled)
        _ServerRun(run, machine, module, params, metrics, exchange, place, book).to_the_end()

    return app


# -- messages ------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """A reply of a client, with its public numbers."""

    node: int
    client: int
    payload: bytes | None  # None if it has come, or come back, at a new node
    facts: Mapping[str, Fact]


class _Flight(NamedTuple):
    node: int
    client: int | None  # None: the node is asked for its number
    deadline: float


class Exchange:
    """Finds the clients' nodes, sends, and collects what comes back, in any order.

    - Never two messages are in flight to one node; a reply that nobody waits for is dropped.
    - After a message that is lost or of no use, the next one to that node waits, longer and longer.
    - A client's number belongs to the first node that names it, until Flower no longer lists that
      node: one that was killed and started again has a new id, and is asked again later.

    The name of the ``run`` and the fingerprint of the server's ``module`` go with every message.
    """

    def __init__(
        self, grid: Grid, num_clients: int, run: str, module: str, ttl: float, poll_interval: float
    ) -> None:
        self._grid, self._num_clients = grid, num_clients
        self._facts = {"run": run, "module": module}
        self._ttl, self.poll_interval = ttl, poll_interval
        self._problems: list[Problem] = []
        self._flights: dict[str, _Flight] = {}
        self.nodes: dict[int, int] = {}
        """Of each client that has come."""
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
            for client, node in sorted(self.nodes.items())
            if node not in busy and self._not_before.get(node, 0.0) <= now
        ]

    def take_problems(self) -> list[Problem]:
        """Return the problems since the last call."""
        found, self._problems = self._problems, []
        return found

    @property
    def _busy(self) -> set[int]:
        return {flight.node for flight in self._flights.values()}

    def send(self, client: int, payload: bytes) -> None:
        """Send to a client that is idle."""
        self._push("train", self.nodes[client], client, payload)

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

    def settle(self, reply: Reply, problem: str) -> None:
        """Note that a reply was applied, or its problem: a node that is of no use must wait."""
        if problem:
            self._failed(reply, problem)
        else:
            self._failures.pop(reply.node, None)

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
            code, reason = message.error.code, message.error.reason or ""
            if code == _NO_NODE:
                self._free(flight)  # it is asked again if it was only away
            if reason.startswith(_REFUSES):
                raise MessageError(f"it answers {reason[:_LONGEST_SHOWN]!r}")
            raise MessageError(f"error {code}: {_CAUSES.get(code, 'of an unknown cause')}")
        client, payload, facts = flight.client, None, _public_facts(message)
        named: Any = facts.get("client")
        if client is None:
            client = self._introduce(flight.node, named)
        else:
            payload = payload_of(message)
        if named not in (None, client):
            self._free(flight)
            raise MessageError("its reply is another client's")
        return Reply(flight.node, client, payload, facts)

    # -- nodes -------------------------------------------------------------------------------

    def _look_for_nodes(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self.poll_interval
        listed = set(self._grid.get_node_ids())
        present = {client: node for client, node in self.nodes.items() if node in listed}
        strangers = listed - set(present.values())
        if self._is_freed or len(present) < len(self.nodes):
            for node in strangers:  # one of them may have waited for the number
                self._not_before.pop(node, None)
        self.nodes, self._is_freed = present, False
        for node in strangers - self._busy:
            if self._not_before.get(node, 0.0) <= now:
                self._push("query", node, None, b"")

    def _introduce(self, node: int, client: int | None) -> int:
        """Give a node the client's number that it names."""
        if client is None or not 0 <= client < self._num_clients:
            raise MessageError(
                f"it names itself client {client}, but this run has num_clients={self._num_clients}. "
                f"Give every SuperNode --node-config 'partition-id=I num-partitions={self._num_clients}'"
            )
        if self.nodes.get(client, node) != node:
            raise MessageError(
                f"it names itself client {client}, which another node is until it leaves. Give "
                "every SuperNode its own partition-id"
            )
        self.nodes[client] = node
        self._failures.pop(node, None)
        self._not_before.pop(node, None)
        return client

    def _failed(self, at: _Flight | Reply, problem: str) -> None:
        failures = self._failures[at.node] = self._failures.get(at.node, 0) + 1
        pause = min(_LONGEST_PAUSE, self.poll_interval * 2.0 ** min(failures, 32))
        self._not_before[at.node] = time.monotonic() + pause
        sender = f"Node {at.node}" if at.client is None else f"Client {at.client}"
        self._problems.append(Problem(sender, at.client, problem))

    def _free(self, flight: _Flight) -> None:
        """Take a client's number from its node."""
        if flight.client is not None and self.nodes.get(flight.client) == flight.node:
            del self.nodes[flight.client]
            self._is_freed = True

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


def _public_facts(message: Message) -> dict[str, Fact]:
    """Return the facts of a client that are kept; an answer is not lost for the sake of others."""
    try:
        facts = facts_of(message)
    except MessageError:
        return {}
    return {
        name: facts[name] for name, fits in _KEPT.items() if name in facts and fits(facts[name])
    }


def _is_number(value: Any) -> bool:
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and value >= 0 and (isinstance(value, float) or value < _LARGEST_NUMBER)


_KEPT: dict[str, Callable[[Any], bool]] = {
    "client": lambda value: type(value) is int and abs(value) < _LARGEST_NUMBER,
    **dict.fromkeys(("num_clients", "num_records", "epsilon", "delta"), _is_number),
    **dict.fromkeys(("seeded", "trusts_server"), lambda value: isinstance(value, bool)),
    "unit": ("record", "user", "client").__contains__,
    "relation": get_args(Relation).__contains__,
}


# -- a run ---------------------------------------------------------------------------------------


@dataclass
class _ServerRun:
    """One run of the ServerApp."""

    name: str
    machine: AbstractServer
    module: nn.Module
    params: list[nn.Parameter]
    metrics: Callable[[], Mapping[str, float]]
    exchange: Exchange
    folder: Path
    logbook: Logbook
    _next_line: float = 0.0
    _is_saved: bool = False

    def to_the_end(self) -> None:
        """Ask, collect and apply, until the protocol is done or lacks its quorum for too long."""
        self.attendance = Attendance(self.machine.quorum, time.monotonic())
        try:
            self._go_on()
        except BaseException as error:
            why = f"it failed ({type(error).__name__}); a new run in this folder goes on"
            self.logbook.close(self.machine, why)
            raise
        _save(self.module.state_dict(), self.folder / "model.pt")
        reason = self.machine.reason or "no quorum; a new run in this folder goes on"
        self.logbook.close(self.machine, reason)
        if self.machine.is_done:
            (self.folder / _STATE).unlink(missing_ok=True)  # the next run is a new one
        _console.info(self.logbook.line(self.machine.round))

    def _go_on(self) -> None:
        machine, quorum = self.machine, self.machine.quorum
        self._publish()
        stage, published = machine.stage, machine.round
        heard_at, pause = time.monotonic(), _SHORTEST_PAUSE
        while not machine.is_done:
            for client in self.exchange.idle:
                if (request := machine.request(client)) is not None:
                    self._save_state()
                    self.exchange.send(client, request)
            applied = [self._apply(reply) for reply in self.exchange.collect()]
            for problem in self.exchange.take_problems():
                self.logbook.add_problem(problem)
                if problem.client is not None:
                    self.attendance.fail(problem.client)
            now, left_out = time.monotonic(), set[int]()
            is_lost = not any(applied) and now - heard_at > quorum.patience
            if machine.stage == stage and (
                is_lost or self.attendance.is_over(machine.awaited, now)
            ):
                left_out = machine.leave_out()
                self.logbook.add_absences(stage[0], left_out)
            if machine.stage != stage:
                stage = machine.stage
                self.attendance.begin(now, left_out)
            if any(applied) or left_out:
                self._is_saved = False
                if machine.round != published:
                    published = machine.round
                    self._save_state()  # a server that noises must not do so again
                    self._publish()
                heard_at, pause = now, _SHORTEST_PAUSE
            elif is_lost:
                missing = sorted({*range(machine.num_clients)} - self.exchange.nodes.keys())
                _log.warning(
                    "The run ends: no reply could be used for %s s, and round %d lacks its quorum. "
                    "Clients without a SuperNode: %s. Latest problems: %s. Start the missing SuperNodes, "
                    "and look into the logs of the clients that fail; a new run with the same folder "
                    "goes on where this one stopped.",
                    *(quorum.patience, machine.round, missing, self.logbook.problems),
                )
                self._save_state()
                return
            else:
                time.sleep(pause)
                pause = min(2 * pause, self.exchange.poll_interval)

    def _apply(self, reply: Reply) -> bool:
        """Give a reply to the protocol; return True if it has gone on by it."""
        if reply.payload is None:  # the client has come, or come back
            self.attendance.hear(reply.client)
            self.logbook.add_client(reply.client, reply.facts)
            return False
        round_ = self.machine.round_of(reply.client)
        try:
            # A machine that returns nothing has taken it.
            is_late = self.machine.receive(reply.client, reply.payload) is False
            self.attendance.hear(reply.client)
            problem = "its reply came twice, or too late" if is_late else ""
        except MessageError as error:
            problem = f"its reply cannot be used: {text_of(error)}"
        self.exchange.settle(reply, problem)
        if not problem:
            answered = reply.client not in self.machine.refused
            self.logbook.add_reply(round_, reply.client, reply.facts, answered)
        return not problem

    def _publish(self) -> None:
        """Load and log a new global model."""
        with torch.no_grad():
            values = unflatten(self.machine.point, self.params)
            for param, value in zip(self.params, values, strict=True):
                param.copy_(value)
        self.logbook.add_model(self.machine.round, self.metrics())
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _BETWEEN_LINES
            _console.info(self.logbook.line(self.machine.round))

    def _save_state(self) -> None:
        """Save before a new request leaves: no client may be ahead of a server that resumes.

        Replies since then are asked for again, and are the same bytes.
        """
        if not self._is_saved:
            _save({"run": self.name, "state": self.machine.state_dict()}, self.folder / _STATE)
        self._is_saved = True


def _save(value: Any, path: Path) -> None:
    """Write with torch, so that the file is whole at any moment, and durable on return."""
    with replaced(path, mode=None) as file:
        torch.save(value, file)


def _saved(folder: Path) -> dict[str, Any] | None:
    """Return the state of a run that died in this folder."""
    path = folder / _STATE
    if not path.exists():
        return None
    with _read(path, Exception):  # the file may be anybody's
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        if not isinstance(saved["run"], str) or not isinstance(saved["state"], dict):
            raise TypeError("it holds something else")
    return saved


@contextmanager
def _read(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Refuse a state that cannot be read, with the cure."""
    try:
        yield
    except errors as error:
        raise RefusedRun(
            f"{path} cannot be read ({type(error).__name__}), so the run that it is of cannot go on. "
            "Put the right file back; or move it away, and a new run begins, whose rounds every "
            "client is charged on top of those that were made.",
            topic="federated-server",
        ) from None
