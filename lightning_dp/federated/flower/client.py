"""A client's side of a federation on Flower."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import filelock
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from lightning_dp.federated.base import AbstractClient, Records
from lightning_dp.federated.flower.exchange import pack, payload_of
from lightning_dp.mechanism import BudgetExhausted

__all__ = ["client_app"]

_log = logging.getLogger("lightning_dp.federated")

_RAISED = 2  # Flower's code for a ClientApp that failed
_NO_CAUSE = (
    "The client could not answer. The cause is in its own log, since it may tell of records."
)


def client_app(
    build: Callable[[Context], Records],
    protocol: Callable[[Context, Records, Path], AbstractClient],
    ledger_dir: str | Path | Callable[[Context], str | Path],
) -> ClientApp:
    """Flower's ClientApp that answers the requests of a protocol.

    The same app runs in a simulation, where processes serve several clients in turn, and under a
    SuperNode, which starts a process for every message. What must outlast a process is in the
    client's ledger, on disk before a reply leaves; Flower's ``context.state`` is not used.

    - Requests to one client are answered one after another, by a lock beside its ledger, also
      when an expired message is still being worked on.
    - When the client's budget does not allow what is asked, it says so, and the run ends.
    - An exception never leaves the client, since its message may tell of records: the server reads
      that the client could not answer, and the client's log has the cause.

    Assign the result at module level: Flower looks for it there.

    Args:
        build: this client's records and model
            (:class:`~lightning_dp.federated.local.LocalRecords`), from Flower's context: which
            client it is says ``context.node_config["partition-id"]``. Called once in a process for
            each client.
        protocol: the client's state machine, for these records and the folder of its ledger.
            Called for every request.
        ledger_dir: folder on this client's disk that holds its ledger, in a folder of its own for
            each ``partition-id``. Its loss is the loss of what was spent.
    """
    app, desk = ClientApp(), _Desk(build, protocol, ledger_dir)
    app.train()(desk.answer)
    app.query()(desk.introduce)
    return app


@dataclass
class _Desk:
    """Where the messages for the clients of this process arrive."""

    build: Callable[[Context], Records]
    protocol: Callable[[Context, Records, Path], AbstractClient]
    ledger_dir: str | Path | Callable[[Context], str | Path]
    _records: dict[int, Records] = field(default_factory=dict)

    def answer(self, message: Message, context: Context) -> Message:
        """The reply to a request of the protocol."""
        return self._guarded(message, context, lambda client: client.answer(payload_of(message)))

    def introduce(self, message: Message, context: Context) -> Message:
        """Who this is."""
        return self._guarded(message, context, lambda client: b"")

    def _guarded(
        self, message: Message, context: Context, work: Callable[[AbstractClient], bytes]
    ) -> Message:
        number = int(context.node_config["partition-id"])
        try:
            given = self.ledger_dir
            folder = Path(given(context) if callable(given) else given) / f"client-{number}"
            folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(folder / "client.lock"):
                if number not in self._records:
                    self._records[number] = self.build(context)
                client = self.protocol(context, self._records[number], folder)
                facts = {
                    "client": number,
                    "num_clients": int(context.node_config["num-partitions"]),
                    "exhausted": False,
                }
                try:
                    payload = work(client)
                except BudgetExhausted:
                    payload, facts["exhausted"] = b"", True
                facts.update(client.facts)
        except Exception:
            _log.exception("Client %d could not answer.", number)
            return Message(Error(_RAISED, _NO_CAUSE), reply_to=message)
        return Message(pack(payload, facts), reply_to=message)
