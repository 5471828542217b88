"""The Flower adapter moves a protocol's messages, whatever the network does."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")

import lightning as L
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
)
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.flower import client_app, server_app
from lightning_dp.federated.flower.loopback import Faults, LoopbackGrid
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.protocol import AbstractClient, AbstractServer, MessageError
from lightning_dp.federated.protocol import Message as Content

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BAD_NETWORK = Faults(late=0.4, lost=0.15, undelivered=0.1, duplicated=0.15, restarted=0.1)


class AddingServer(AbstractServer):
    """x <- x - 0.1 Σ_c (x + c), all clients in every round: synchronous, and easy to check."""

    def __init__(self, x: Tensor, clients: int, rounds: int) -> None:
        self.x, self.clients, self.rounds = x.double(), clients, rounds
        self.k, self.parts = 0, {}
        self.forgotten: list[int] = []

    point = property(lambda self: self.x.clone())
    round = property(lambda self: self.k)
    is_done = property(lambda self: self.k >= self.rounds)
    reason = property(lambda self: "all rounds are over" if self.is_done else "")

    def request(self, client: int) -> bytes | None:
        if self.is_done or client in self.parts:
            return None
        return Content("ask", {"round": self.k}, {"x": self.x}).to_bytes()

    def receive(self, client: int, reply: bytes) -> None:
        message = Content.from_bytes(reply)
        if message["round"] != self.k:
            return
        self.parts[client] = message.tensor("part")
        if len(self.parts) == self.clients:
            self.x = self.x - 0.1 * sum(self.parts[client] for client in sorted(self.parts))
            self.k, self.parts = self.k + 1, {}

    def forget(self, client: int) -> None:
        self.forgotten.append(client)

    def state_dict(self) -> dict[str, Any]:
        parts = {str(client): part for client, part in self.parts.items()}
        return {"x": self.x, "k": self.k, "parts": parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.x, self.k = state["x"], state["k"]
        self.parts = {int(client): part for client, part in state["parts"].items()}


class AddingClient(AbstractClient):
    """Answers x + c, and writes down in its folder what it was asked."""

    def __init__(self, context: Context, run: str, folder: Path) -> None:
        self.number = int(context.node_config["partition-id"])
        self.run, self.folder = run, folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.fails_at = int(context.run_config.get("fails-at", -1))

    def answer(self, request: bytes) -> bytes:
        message = Content.from_bytes(request)
        with open(self.folder / "asked", "a") as file:
            file.write(f"{message['round']}\n")
        asked = Counter((self.folder / "asked").read_text().split())
        if message["round"] == self.fails_at and asked[str(self.fails_at)] < 3:
            raise ValueError("record 17 is HIV positive")
        part = message.tensor("x") + self.number
        return Content("part", {"round": message["round"]}, {"part": part}).to_bytes()

    @property
    def facts(self) -> dict[str, Any]:
        return {"epsilon": 0.25 * (1 + self.number), "run": self.run}


class Numbers:
    num_records = 10


def start_model(context: Context) -> nn.Module:
    layer = nn.Linear(3, 1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.fixture
def client(tmp_path: Path) -> ClientApp:
    return client_app(
        lambda context: Numbers(),
        lambda context, run, records, ledger: AddingClient(
            context, run, ledger.journal_path.parent / ledger.dataset_id
        ),
        tmp_path / "ledgers",
    )


@pytest.fixture
def run(tmp_path: Path, client: ClientApp) -> Callable[..., tuple[LoopbackGrid, AddingServer]]:
    """Run a federation of 4 clients on the loopback grid."""

    def go(
        faults: Faults = BAD_NETWORK, seed: int = 0, rounds: int = 8, **config: Any
    ) -> tuple[LoopbackGrid, AddingServer]:
        machines: list[AddingServer] = []

        def protocol(context: Context, run: str, point: Tensor) -> AddingServer:
            machines.append(AddingServer(point, 4, rounds))
            return machines[-1]

        app = server_app(
            start_model,
            protocol,
            num_clients=4,
            folder=tmp_path / "server",
            evaluate=lambda context, model: {"weight": float(model.weight.detach().sum())},
            poll_interval=0.001,
            patience=config.pop("patience", 60),
        )
        grid = LoopbackGrid(client, 4, faults, config, seed=seed)
        grid.start(app)
        return grid, machines[-1]

    return go


def expected(rounds: int) -> Tensor:
    x = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    for _ in range(rounds):
        x = x - 0.1 * sum(x + client for client in range(4))
    return x


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "server" / "federation.json").read_text())


def asked(folder: Path, client: int) -> Counter[str]:
    return Counter((folder / "ledgers" / f"client-{client}" / "asked").read_text().split())


def test_on_a_good_network_every_client_is_asked_once_a_round(run, tmp_path):
    grid, machine = run(Faults())

    assert grid.calls == 4 + 4 * 8  # who are you, and the rounds
    torch.testing.assert_close(machine.point, expected(8), rtol=0, atol=1e-12)
    assert all(asked(tmp_path, client) == {str(k): 1 for k in range(8)} for client in range(4))


@pytest.mark.parametrize("seed", range(3))
def test_no_fault_of_the_network_changes_the_result(run, tmp_path, seed):
    grid, machine = run(seed=seed)

    torch.testing.assert_close(machine.point, expected(8), rtol=0, atol=1e-12)
    assert grid.calls > 40
    assert summary(tmp_path)["problems"] > 0
    assert (summary(tmp_path)["rounds"], summary(tmp_path)["replies"]) == (8, 32)


def test_every_request_is_for_a_client_that_knows_nothing(run):
    """Under a SuperNode every message is answered by a new process."""
    _, machine = run(Faults())

    assert Counter(machine.forgotten) >= Counter(dict.fromkeys(range(4), 8))


def test_one_run_name_goes_with_every_message_and_another_run_has_another(run, tmp_path):
    names = set()
    for _ in range(2):
        run(Faults(), rounds=2)
        found = {facts["run"] for facts in summary(tmp_path)["clients"].values()}
        assert len(found) == 1
        names |= found

    assert len(names) == 2


def test_never_two_messages_are_in_flight_to_a_node(client, tmp_path):
    """The grid refuses a second one; a server that ignores what is in flight shows it."""
    grid = LoopbackGrid(client, 2, Faults(late=1.0), {})
    node = next(iter(grid.get_node_ids()))
    content = RecordDict({"facts": ConfigRecord({})})
    grid.push_messages([Message(content, node, "train")])

    with pytest.raises(RuntimeError, match="Two messages are in flight"):
        grid.push_messages([Message(content, node, "train")])


def test_an_exception_at_a_client_tells_the_server_nothing(run, tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    _, machine = run(Faults(), **{"fails-at": 3})

    torch.testing.assert_close(machine.point, expected(8), rtol=0, atol=1e-12)
    assert asked(tmp_path, 2)["3"] == 3
    from_server = [each.getMessage() for each in caplog.records if "Asking again" in each.msg]
    assert len(from_server) == 8
    assert not any("HIV" in message for message in from_server)
    at_the_client = [each for each in caplog.records if "could not answer" in each.msg]
    assert "HIV" in str(at_the_client[0].exc_info[1])


def test_a_client_that_never_answers_ends_the_run_with_its_name(run):
    with pytest.raises(RuntimeError, match=r"No reply could be used for 0\.2 s.*\{[0-3]: 'error"):
        run(Faults(lost=1.0), patience=0.2)


def test_a_new_run_goes_on_where_one_died(run, tmp_path, monkeypatch):
    receive, count = AddingServer.receive, 0

    def dies(self: AddingServer, client: int, reply: bytes) -> None:
        nonlocal count
        count += 1
        if count == 18:  # in the middle of round 4
            raise KeyboardInterrupt
        receive(self, client, reply)

    monkeypatch.setattr(AddingServer, "receive", dies)
    with pytest.raises(KeyboardInterrupt):
        run(Faults())
    monkeypatch.setattr(AddingServer, "receive", receive)

    name = torch.load(tmp_path / "server" / "server.pt", weights_only=True)["run"]

    _, machine = run(Faults())

    assert summary(tmp_path)["clients"]["0"]["run"] == name
    torch.testing.assert_close(machine.point, expected(8), rtol=0, atol=1e-12)
    assert asked(tmp_path, 0)["3"] == 1  # a finished round is not asked again
    assert not (tmp_path / "server" / "server.pt").exists()


def test_a_reply_that_is_no_message_is_asked_again(run, monkeypatch, tmp_path):
    receive, count = AddingServer.receive, 0

    def refuses(self: AddingServer, client: int, reply: bytes) -> None:
        nonlocal count
        count += 1
        if count % 5 == 0:
            raise MessageError("cut off")
        receive(self, client, reply)

    monkeypatch.setattr(AddingServer, "receive", refuses)

    _, machine = run(Faults())

    torch.testing.assert_close(machine.point, expected(8), rtol=0, atol=1e-12)


def test_progress_metrics_and_every_clients_epsilon_are_in_tensorboard(run, tmp_path):
    run(Faults(), rounds=5)

    events = EventAccumulator(str(tmp_path / "server")).Reload()
    weights = {each.step: each.value for each in events.Scalars("global/weight")}
    assert weights == {k: pytest.approx(float(expected(k)[:3].sum()), rel=1e-6) for k in range(6)}
    assert [each.value for each in events.Scalars("progress/replies")] == [0, 4, 8, 12, 16, 20]
    for client in range(4):
        (value, *_) = events.Scalars(f"privacy/epsilon_client_{client}")
        assert value.value == 0.25 * (1 + client)
    assert events.Scalars("privacy/epsilon_max")[-1].value == 1.0
    clients = summary(tmp_path)["clients"]
    assert [clients[str(client)]["epsilon"] for client in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_model_is_saved_as_the_module_that_build_gave(run, tmp_path):
    run(Faults())

    model = start_model(None)
    model.load_state_dict(torch.load(tmp_path / "server" / "model.pt", weights_only=True))
    x = torch.cat([model.weight.flatten(), model.bias]).double()
    torch.testing.assert_close(x, expected(8), rtol=0, atol=1e-6)


def test_a_node_of_another_federation_is_refused_with_the_cure_and_the_others_go_on(
    client, tmp_path, caplog
):
    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    app = server_app(
        start_model,
        lambda context, run, point: AddingServer(point, 2, 3),
        num_clients=2,
        folder=tmp_path / "server",
        poll_interval=0.001,
    )

    LoopbackGrid(client, 4).start(app)

    assert summary(tmp_path)["rounds"] == 3
    refused = [each.getMessage() for each in caplog.records if "num_clients=2" in each.getMessage()]
    assert len(refused) == 2  # each once
    assert all("is client" in each and "--node-config 'partition-id" in each for each in refused)


@pytest.mark.parametrize("name", ["ttl", "poll_interval", "patience"])
@pytest.mark.parametrize("bad", [0, -1.0, math.nan])
def test_numbers_out_of_range_are_named(name, bad):
    with pytest.raises(ValueError, match=f"{name}="):
        server_app(start_model, lambda context, run, point: None, num_clients=2, **{name: bad})


@pytest.mark.parametrize("bad", [0, True, "3", 2.5, None])
@pytest.mark.parametrize("is_function", [False, True])
def test_what_is_no_number_of_clients_is_refused(client, tmp_path, bad, is_function):
    with pytest.raises(ValueError, match="num_clients="):
        app = server_app(
            start_model,
            lambda context, run, point: AddingServer(point, 2, 1),
            num_clients=(lambda context: bad) if is_function else bad,
            folder=tmp_path,
        )
        LoopbackGrid(client, 2).start(app)


@pytest.mark.parametrize("clients", [2, 4])
def test_a_server_of_another_number_of_clients_is_refused_before_anybody_is_asked(
    client, tmp_path, clients
):
    plan = AsyncPlan(2, PolynomialSizes(a=0, b=4), InverseSteps(0.1, beta=0.01))
    app = server_app(
        start_model,
        lambda context, run, point: AsyncServer(run, plan, point, clients),
        num_clients=3,
        folder=tmp_path / "server",
    )
    grid = LoopbackGrid(client, 3)
    with pytest.raises(
        ValueError, match=f"num_clients=3 of server_app.* not num_clients={clients}"
    ):
        grid.start(app)
    assert grid.calls == 0


@pytest.mark.parametrize("content", [b"", b"garbage", {}, [], {"run": "a", "state": {}}])
def test_a_state_that_is_none_is_refused_and_kept(run, tmp_path, content):
    (tmp_path / "server").mkdir()
    path = tmp_path / "server" / "server.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match=r"server\.pt cannot be read .* move it away"):
        run(Faults())
    assert path.read_bytes() == before
    path.unlink()  # the cure works
    _, machine = run(Faults(), rounds=1)
    assert machine.is_done


def test_a_folder_that_is_a_file_is_named(run, tmp_path):
    (tmp_path / "server").write_text("a file")
    with pytest.raises(ValueError, match=r"folder=.*server' takes no results"):
        run(Faults())


@pytest.mark.parametrize("missing", ["partition-id", "num-partitions"])
def test_a_node_without_a_number_says_how_to_start_it_and_charges_nothing(
    run, client, tmp_path, caplog, missing
):
    grid = LoopbackGrid(client, 1)
    [context] = grid._nodes.values()
    del context.node_config[missing]
    grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()])
    asked = RecordDict({"facts": ConfigRecord({"run": "a", "module": ""})})
    [node] = grid.get_node_ids()
    [reply] = grid.send_and_receive([Message(asked, node, "query")])
    assert reply.has_error()
    assert re.search(rf"{missing}=None .*--node-config 'partition-id=I", caplog.text)
    assert [*tmp_path.rglob("*.journal")] == []


@pytest.mark.parametrize("part", ["build", "protocol"])
def test_apps_whose_functions_return_nothing_say_so_in_the_clients_log(tmp_path, caplog, part):
    made = {"build": lambda context: Numbers(), "protocol": lambda *given: None}
    app = client_app(**{**made, part: lambda *given: None}, ledger_dir=tmp_path)
    grid = LoopbackGrid(app, 1)
    [node] = grid.get_node_ids()
    asked = RecordDict({"facts": ConfigRecord({"run": "a", "module": ""})})
    [reply] = grid.send_and_receive([Message(asked, node, "query")])
    assert reply.has_error()
    assert ("records=None must be" if part == "build" else "protocol(...)=None") in caplog.text


@pytest.mark.parametrize("folder", ["ledgers", "s3://bucket/ledgers", ""])
def test_a_ledger_that_would_differ_between_processes_is_refused(folder):
    with pytest.raises(ValueError, match="ledger_dir="):
        client_app(lambda context: None, lambda *given: None, ledger_dir=folder)


@pytest.mark.parametrize("is_function", [False, True])
def test_the_servers_folder_stays_where_the_app_was_made(
    client, tmp_path, monkeypatch, is_function
):
    monkeypatch.chdir(tmp_path)
    folder = (lambda context: "results") if is_function else "results"
    server = server_app(
        start_model,
        lambda context, run, point: AddingServer(point, 1, 1),
        num_clients=1,
        folder=folder,
        poll_interval=0.001,
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    LoopbackGrid(client, 1).start(server)
    assert (tmp_path / "results" / "federation.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(ValueError, match="folder="):
        server_app(start_model, lambda *given: None, num_clients=1, folder="s3://bucket")


class Body(L.LightningModule):
    """A frozen layer that each process draws for itself, as long as nobody seeds it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.head(self.body(batch[0])).mean()


def test_a_client_whose_frozen_layers_are_others_refuses_by_name_before_a_charge(tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    plan = AsyncPlan(1, PolynomialSizes(0, 2), InverseSteps(0.1, 0.01))
    privacy = ClientPrivacy(1.0, 2.0, target_epsilon=math.inf)
    client = client_app(
        lambda context: LocalRecords(Body(), TensorDataset(torch.ones(4, 3))),
        lambda context, run, data, ledger: AsyncClient(data, plan, privacy, ledger, run=run),
        ledger_dir=tmp_path / "ledgers",
    )
    server = server_app(
        lambda context: Body(),
        lambda context, run, start: AsyncServer(run, plan, start, 1),
        num_clients=1,
        folder=tmp_path / "server",
        poll_interval=0.001,
        patience=0.2,
    )
    with pytest.raises(RuntimeError, match="No reply could be used"):
        LoopbackGrid(client, 1).start(server)
    assert "body.weight, body.bias are not those of the server's module" in caplog.text
    assert ReleaseLedger(tmp_path / "ledgers", "client-0").history() == []
