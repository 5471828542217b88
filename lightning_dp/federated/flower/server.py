"""The server's side of a federation on Flower."""

from __future__ import annotations

import json
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from lightning_dp._files import local_folder, replaced
from lightning_dp._refusals import RefusedRun, RefusedSetting, text_of
from lightning_dp._validate import above_0, instance, whole
from lightning_dp.accounting import PLDAccountant
from lightning_dp.federated.client import fingerprint
from lightning_dp.federated.flower.exchange import Exchange, Problem, Reply
from lightning_dp.federated.protocol import AbstractServer, Attendance, MessageError
from lightning_dp.functional import flatten, unflatten

__all__ = ["server_app"]

_log = logging.getLogger("lightning_dp.federated")
_console = logging.getLogger("flwr")  # whose lines Flower shows
_SHORTEST_PAUSE = 0.001
_BETWEEN_LINES = 10.0
_STATE = "server.pt"


def server_app(
    build: Callable[[Context], nn.Module],
    protocol: Callable[[Context, str, Tensor], AbstractServer],
    *,
    num_clients: int | Callable[[Context], int],
    folder: str | Path | Callable[[Context], str | Path] = "federated",
    evaluate: Callable[[Context, nn.Module], Mapping[str, float]] | None = None,
    ttl: float = 600.0,
    poll_interval: float = 1.0,
    name: str | None = None,
) -> ServerApp:
    """Return Flower's ServerApp that runs a protocol to its end.

    - At most one message is in flight to each client. A message that is lost, that expires or
      whose client died is asked again, and the client answers with the same bytes.
    - Replies are applied in any order, each once. One that cannot be used, whatever is wrong with it,
      is logged, and its client is asked again; the others go on. By the server's
      :class:`~lightning_dp.federated.protocol.Quorum` a round goes on without clients that are late
      or wrong, with one line that names each and its latest problem; and a run that lacks its quorum
      for too long ends with the latest model, and goes on if it is started again.
    - The server's state is saved to ``server.pt`` before a request leaves that rests on it: if the
      run dies, a new one with the same ``folder`` goes on from there.
    - TensorBoard files, ``federation.json`` (rounds, metrics, every client's ε; also of a run that
      fails) and at the end ``model.pt``, the module's ``state_dict``, are in ``folder``. ``epsilon`` of
      a client is what it claims, and ``epsilon_of_plan`` what the rounds cost by the plan, where that
      is known. A claim that falls is logged: that client's ledger was lost, or is another one.

    Assign the result at module level: Flower looks for it there.

    Args:
        build: the LightningModule, from Flower's context (its ``run_config``). The protocol starts
            at its trained weights. What is frozen does not go over the wire: clients must build the
            same, and refuse a server whose frozen weights differ. The server needs no training data.
        protocol: the server's state machine, from Flower's context, the name of the run (no other
            run has it) and the trained parameters as a flat vector.
        num_clients: how many clients take part, sooner or later.
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
    if not callable(num_clients):
        num_clients = whole("num_clients", num_clients)
    if not callable(folder):
        folder = local_folder("folder", folder)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        count = num_clients(context) if callable(num_clients) else num_clients
        count = whole("num_clients", count)
        place = local_folder("folder", folder(context) if callable(folder) else folder, here)
        module = instance("build(context)", build(context), nn.Module)
        params = [param for param in module.parameters() if param.requires_grad]
        saved = _saved(place)
        run = saved["run"] if saved else name or secrets.token_hex(8)
        machine = protocol(context, run, flatten(params))
        _check_machine(machine, count)
        if saved:
            try:
                machine.load_state_dict(saved["state"])
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise _unreadable(place / _STATE, error) from None
        metrics = (lambda: evaluate(context, module)) if evaluate else dict[str, float]
        exchange = Exchange(grid, count, run, fingerprint(module), ttl, poll_interval)
        _ServerRun(run, machine, module, params, metrics, exchange, place).to_the_end()

    return app


class Logbook:
    """The record of a run: TensorBoard files and ``federation.json``. Noised values and counts only."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise RefusedSetting(
                f"folder={str(folder)!r} takes no results: {error}. Give another folder, or make "
                "room.",
                topic="federated-server",
            ) from None
        self._path = folder / "federation.json"
        self._clients: dict[int, dict[str, Any]] = {}
        self._metrics: dict[str, float] = {}
        self._counts: Counter[str] = Counter(replies=0, problems=0)
        self.problems: dict[str, str] = {}
        """The latest problem of each sender, since its reply was applied."""

    def add_client(self, client: int, facts: Mapping[str, Any], step: int | None) -> None:
        """Note the facts of a client; with ``step``, of its reply, which is counted."""
        before = self._clients.get(client, {})
        self._clients[client] = {**before, **facts, "client": client}
        if facts.get("epsilon", math.inf) < before.get("epsilon", 0.0):
            _log.warning(
                "Client %s claims epsilon %.4g after %.4g: its ledger was lost, or is another one.",
                *(client, facts["epsilon"], before["epsilon"]),
            )
        if step is not None:
            self.problems.pop(f"Client {client}", None)
            self._counts["replies"] += 1
            if "epsilon" in facts:
                self._scalar(f"privacy/epsilon_client_{client}", facts["epsilon"], step)

    def add_problem(self, problem: Problem) -> None:
        """Count and log a problem: each of a client that is asked again, else a new one only."""
        sender, _, text, again = problem
        if self.problems.get(sender) != text or (again and problem.client is not None):
            end = " Asking again." if again else ""
            _log.warning("%s: %s.%s", sender, text.rstrip("."), end)
        self.problems[sender] = text
        self._counts["problems"] += 1

    def add_absences(self, step: int, clients: Iterable[int]) -> None:
        """Log each client that a round goes on without, and its latest problem."""
        for client in sorted(clients):
            problem = self.problems.get(f"Client {client}", "it has not replied")
            _log.warning("Round %d goes on without client %d: %s", step, client, problem)
            self._counts["left out"] += 1

    def add_model(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a new global model."""
        self._metrics = {name: float(value) for name, value in metrics.items()}
        scalars = {f"global/{name}": value for name, value in self._metrics.items()}
        scalars |= {f"progress/{name}": count for name, count in self._counts.items()}
        if claims := self._claims:
            scalars["privacy/epsilon_max"] = max(claims)
        for name, value in scalars.items():
            self._scalar(name, value, step)
        self._writer.flush()

    @property
    def _claims(self) -> list[float]:
        return [facts["epsilon"] for facts in self._clients.values() if "epsilon" in facts]

    def line(self, step: int) -> str:
        """Return one line for the console: the progress of the run."""
        parts = [f"{name} {value:.4g}" for name, value in self._metrics.items()]
        if claims := self._claims:
            parts.append(f"largest epsilon that a client claims {max(claims):.4g}")
        parts += [f"{count} {name}" for name, count in self._counts.items()]
        return f"Federation: {step} rounds are over; " + ", ".join(parts)

    def close(self, machine: AbstractServer, reason: str) -> None:
        """Write the summary of a run that is over or has failed, whatever the facts were."""
        clients = {}
        for client, facts in sorted(self._clients.items()):
            planned = _epsilon_of_plan(machine, facts)
            clients[str(client)] = _json({**facts, **planned})
        summary = {
            "rounds": machine.round,
            "ended": reason,
            "metrics": _json(self._metrics),
            **self._counts,
            "clients": clients,
        }
        content = json.dumps(summary, allow_nan=False, indent=2) + "\n"
        with replaced(self._path, mode=None) as file:
            file.write(content.encode())
        self._writer.close()

    def _scalar(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):  # TensorBoard draws no infinite ε; the summary has it
            self._writer.add_scalar(name, value, step)


def _epsilon_of_plan(machine: AbstractServer, facts: Mapping[str, Any]) -> dict[str, float]:
    """Return ε of the rounds so far by the plan, at a client's own δ, relation and size."""
    try:
        history = machine.spent(facts["num_records"]) if facts["unit"] == "record" else None
        if history is None:
            return {}
        epsilon = PLDAccountant().epsilon(history, facts["delta"], facts["relation"])
    except (KeyError, ValueError, TypeError, ArithmeticError):  # facts may be anybody's
        return {}
    return {"epsilon_of_plan": epsilon}


def _json(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Write infinity as the text "inf", which JSON has no number for."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in numbers.items()
    }


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
    _next_line: float = 0.0

    def to_the_end(self) -> None:
        """Ask, collect and apply, until the protocol is done or lacks its quorum for too long."""
        self.logbook = Logbook(self.folder)
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
            (self.folder / _STATE).unlink()  # the next run is a new one
        _console.info(self.logbook.line(self.machine.round))

    def _go_on(self) -> None:
        machine, quorum = self.machine, self.machine.quorum
        self._publish()
        self._save_state()
        stage, published = machine.stage, machine.round
        heard_at, pause = time.monotonic(), _SHORTEST_PAUSE
        while not machine.is_done:
            for client in self.exchange.idle:
                if (request := machine.request(client)) is not None:
                    self.exchange.send(client, request)
            applied = [self._apply(reply) for reply in self.exchange.collect()]
            for problem in self.exchange.take_problems():
                self.logbook.add_problem(problem)
                if problem.again and problem.client is not None:
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
                self._save_state()
                if machine.round != published:
                    published = machine.round
                    self._publish()
                heard_at, pause = now, _SHORTEST_PAUSE
            elif is_lost:
                _log.warning(
                    "The run ends: no reply could be used for %s s, and round %d lacks its quorum. "
                    "Clients without a SuperNode: %s. Latest problems: %s. Start the missing SuperNodes, "
                    "and look into the logs of the clients that fail; a new run with the same folder "
                    "goes on where this one stopped.",
                    *(quorum.patience, machine.round, self.exchange.missing, self.logbook.problems),
                )
                return
            else:
                time.sleep(pause)
                pause = min(2 * pause, self.exchange.poll_interval)

    def _apply(self, reply: Reply) -> bool:
        """Give a reply to the protocol; return True if it has gone on by it."""
        applied, problem = False, "its reply came twice, or too late"
        if reply.payload is None:  # the client has come, or come back
            self.attendance.hear(reply.client)
            self.logbook.add_client(reply.client, reply.facts, None)
            return False
        try:
            # A machine that returns nothing has taken it.
            applied = self.machine.receive(reply.client, reply.payload) is not False
            self.attendance.hear(reply.client)
            problem = "" if applied else problem
        except MessageError as error:
            problem = f"its reply cannot be used: {text_of(error)}"
        self.exchange.settle(reply, problem=problem, applied=applied)
        if applied:
            self.logbook.add_client(reply.client, reply.facts, self.machine.round)
        return applied

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
        """Save before the next request leaves: no client may be ahead of a server that resumes."""
        _save({"run": self.name, "state": self.machine.state_dict()}, self.folder / _STATE)


def _save(value: Any, path: Path) -> None:
    """Write with torch, so that the file is whole at any moment, and durable on return."""
    with replaced(path, mode=None) as file:
        torch.save(value, file)


def _check_machine(machine: object, num_clients: int) -> None:
    """Refuse what is no server, or one of another number of clients, which would wait for ever."""
    server = instance("protocol(...)", machine, AbstractServer)  # type: ignore[type-abstract]
    own = getattr(server, "num_clients", num_clients)
    if own != num_clients:
        raise RefusedSetting(
            f"num_clients={num_clients} of server_app() is not num_clients={own} of the server that "
            "protocol makes. Give both the number of clients.",
            topic="federated-server",
        )


def _saved(folder: Path) -> dict[str, Any] | None:
    """Return the state of a run that died in this folder."""
    path = folder / _STATE
    if not path.exists():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, weights_only=True)
        if not isinstance(saved["run"], str) or not isinstance(saved["state"], dict):
            raise TypeError("it holds something else")
    except Exception as error:  # of a file that may be anybody's
        raise _unreadable(path, error) from None
    return saved


def _unreadable(path: Path, error: Exception) -> RefusedRun:
    return RefusedRun(
        f"{path} cannot be read ({type(error).__name__}), so the run that it is of cannot go on. Put "
        "the right file back; or move it away, and a new run begins, whose rounds every client is "
        "charged on top of those that were made.",
        topic="federated-server",
    )
