"""A client's side of a federation on Flower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import filelock
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from lightning_dp._files import fixed_folder
from lightning_dp._validate import instance, whole_from_0
from lightning_dp.federated.client import Client, check_fingerprint
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import (
    Fact,
    MessageError,
    Records,
    check_records,
)

__all__ = ["client_app", "facts_of", "pack", "payload_of"]

_log = logging.getLogger("lightning_dp.federated")

_RAISED = 2  # Flower's code for a ClientApp that failed
_PAYLOAD, _BYTES, _FACTS = "payload", "bytes", "facts"
_Record = TypeVar("_Record", ArrayRecord, ConfigRecord)
_NO_CAUSE = "The client could not answer. The cause is in its log, since it may contain records."


def client_app(
    build: Callable[[Context], Records],
    protocol: Callable[[Context, str, Records, ReleaseLedger], Client],
    ledger_dir: str | Path | Callable[[Context], str | Path],
    runs: Collection[str] | None = None,
) -> ClientApp:
    """Return Flower's ClientApp that answers the requests of a protocol.

    The same app runs in a simulation, where processes serve several clients in turn, and under a
    SuperNode, which starts a process for every message. What must outlast a process is in the
    client's ledger, on disk before a reply leaves; Flower's ``context.state`` is not used.

    - Requests to one client are answered one after another, by a lock next to its ledger, also
      when an expired message is still being worked on.
    - An exception never leaves the client, since its message may tell of records: the server reads
      that the client could not answer, and the client's log has the cause. A request that does not
      keep to the plan, or a server whose module is another one, is refused before a charge.

    Assign the result at module level: Flower looks for it there.

    Args:
        build: this client's records and model
            (:class:`~lightning_dp.federated.local.LocalRecords`), from Flower's context: which
            client it is says ``context.node_config["partition-id"]``. Called once in a process for
            each client.
        protocol: the client's state machine, from Flower's context, the name of the run, these
            records and their ledger. Called for every request: a process may be a new one each time.
        ledger_dir: folder on this client's disk that holds its ledger, whose data set is called
            ``client-`` and the ``partition-id``. All runs over the data must use it, no other data
            may, and its loss is the loss of what was spent. An absolute path, since every process
            of the client must find the same folder.
        runs: the names of the federations that are answered (``name`` of
            :func:`~lightning_dp.federated.flower.server_app`); None for any. Others are refused
            before anything is built.

    Raises:
        ValueError: for a ``ledger_dir`` that is relative or a URL.

    Example::

        def build(context):
            client = int(context.node_config["partition-id"])
            return LocalRecords(MyModule(), my_records(client))

        def protocol(context, run, records, ledger):
            return AsyncClient(records, PLAN, PRIVACY, ledger, run=run)

        app = client_app(build, protocol, ledger_dir="/var/lib/lightning-dp")
    """
    if not callable(ledger_dir):
        ledger_dir = fixed_folder("ledger_dir", ledger_dir)
    app, clients = ClientApp(), _Clients(build, protocol, ledger_dir, runs)
    app.train()(clients.answer)
    app.query()(clients.introduce)
    return app


@dataclass
class _Clients:
    """The clients that this process answers for."""

    build: Callable[[Context], Records]
    protocol: Callable[[Context, str, Records, ReleaseLedger], Client]
    ledger_dir: str | Path | Callable[[Context], str | Path]
    runs: Collection[str] | None
    _records: dict[int, Records] = field(default_factory=dict)

    def answer(self, message: Message, context: Context) -> Message:
        """Reply to a request of the protocol."""
        return self._reply(message, context, lambda client: client.answer(payload_of(message)))

    def introduce(self, message: Message, context: Context) -> Message:
        """Reply with the client's number and facts."""
        return self._reply(message, context, lambda client: b"")

    def _reply(
        self, message: Message, context: Context, work: Callable[[Client], bytes]
    ) -> Message:
        cause = _NO_CAUSE
        try:
            return Message(self._work(message, context, work), reply_to=message)
        except MessageError as error:  # made of what the server sent, and of the plan
            _log.warning("%s refuses what the server asks: %s", _name(context), error)
            cause = f"The client refuses: {error}"
        except Exception:
            _log.exception("%s could not answer.", _name(context))
        return Message(Error(_RAISED, cause), reply_to=message)

    def _work(
        self, message: Message, context: Context, work: Callable[[Client], bytes]
    ) -> RecordDict:
        number, num_clients = (_config(context, key) for key in ("partition-id", "num-partitions"))
        asked = facts_of(message)
        if self.runs is not None and asked["run"] not in self.runs:
            raise MessageError("this run is not in the list of those that it answers.")
        given = self.ledger_dir(context) if callable(self.ledger_dir) else self.ledger_dir
        folder = fixed_folder("ledger_dir", given)
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / f"client-{number}.lock"):
            if number not in self._records:
                built = self.build(context)
                check_records(built)
                self._records[number] = built
            records = self._records[number]
            ledger = ReleaseLedger(folder, f"client-{number}")
            if asked.get("module") and hasattr(records, "fingerprint"):
                check_fingerprint(str(asked["module"]), records.fingerprint)
            made = self.protocol(context, str(asked["run"]), records, ledger)
            client = instance("protocol(...)", made, Client)  # type: ignore[type-abstract]
            payload = work(client)
            facts = {"client": number, "num_clients": num_clients, **client.facts}
            return pack(payload, {**facts, "num_records": records.num_records})


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
