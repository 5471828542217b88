"""Every protocol over Flower's messages: no network, node or reply changes the model or a ledger."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")

import lightning as L
import numpy as np
import torch
from filelock import FileLock
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from loopback import Faults, LoopbackGrid
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp.accounting import PLDAccountant
from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
)
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.flower import (
    Exchange,
    _save,
    client_app,
    pack,
    payload_of,
    server_app,
)
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.logbook import Logbook, Presence, federation_page, read_rounds
from lightning_dp.federated.protocol import Message as Content
from lightning_dp.federated.protocol import Quorum
from lightning_dp.plotting import plot_federation, svg
from tests.federated.zoo import (
    CLIENTS,
    DELTA,
    EVERYBODY,
    FEDERATIONS,
    ROUNDS,
    SEED,
    START,
    Federation,
    LogCosh,
    history,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Diff2. the noise"),
]

GOOD, BAD = Faults(), Faults(0.4, 0.15, 0.1, 0.15, 0.1)
SGD = FEDERATIONS["asynchronous"]


class Weights(nn.Module):
    def __init__(self, start: Tensor = START) -> None:
        super().__init__()
        self.x = nn.Parameter(start.clone())


def number(context: Context) -> int:
    return int(context.node_config["partition-id"])


def client_of(federation: Federation, folder: Path, records=LogCosh, **settings: Any) -> ClientApp:
    budget = {"target_epsilon": math.inf, "target_delta": DELTA}

    def protocol(context: Context, run: str, data: Any, ledger: Any) -> Any:
        c = number(context)
        given = {"seed": SEED + c, **budget, **settings}
        return federation.client(data, c, ledger, run=run, **given)

    return client_app(lambda context: records(seed=number(context)), protocol, folder / "ledgers")


def server_of(make: Callable[[str, Tensor], Any], place: Path, **changes: Any) -> Any:
    settings = {"poll_interval": 0.001, **changes}
    start = settings.pop("start", START)
    return server_app(
        lambda context: Weights(start),
        lambda context, run, point: make(run, point),
        **{"folder": place / "server", **settings},
    )


def run(
    place: Path, federation: Federation = SGD, faults: Faults = GOOD, seed=0, records=LogCosh,
    settings: Any = None, **changes: Any,
) -> None:  # fmt: skip
    client = client_of(federation, place, records, **(settings or {}))
    quorum = changes.pop("quorum", EVERYBODY)
    server = server_of(lambda run, x: federation.server(run, x, quorum), place, **changes)
    LoopbackGrid(client, CLIENTS, faults, seed=seed).start(server)


def alone(
    place: Path, module: Callable[[], Any], records: Callable[[], Any], name=None, runs=None
) -> None:
    """Two rounds of one client, on three records each."""
    plan = AsyncPlan(2, PolynomialSizes(0, 3), InverseSteps(0.1), noise_multiplier=2.0)
    privacy = ClientPrivacy(1.0, 2.0, target_epsilon=math.inf)
    client = client_app(
        lambda context: records(),
        lambda context, run, data, ledger: AsyncClient(data, plan, privacy, ledger, run=run),
        *(place / "ledgers", runs),
    )
    server = server_app(
        lambda context: module(),
        lambda context, run, x: AsyncServer(run, plan, x, 1, Quorum(patience=0.5)),
        **{"folder": place / "server", "poll_interval": 0.001, "name": name},
    )
    LoopbackGrid(client, 1).start(server)


def summary(folder: Path) -> dict[str, Any]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = (folder / "server" / "federation.json").read_text()
    return json.loads(text, parse_constant=no_constant)


def model(folder: Path) -> Tensor:
    return torch.load(folder / "server" / "model.pt", weights_only=True)["x"]


def check_end(folder: Path, federation: Federation = SGD) -> None:
    torch.testing.assert_close(model(folder), federation.twin(), rtol=0, atol=1e-12)
    for c in range(CLIENTS):
        charged = Counter(dict(history(folder / "ledgers", f"client-{c}")))
        assert charged == Counter(dict(federation.events(c)))
    assert not (folder / "server" / "server.pt").exists()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[logging.LogRecord]]:
    """The records of the log in which a text occurs."""
    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    return lambda text: [each for each in caplog.records if text in each.getMessage()]


# -- whole runs --------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FEDERATIONS)
def test_a_bad_network_changes_neither_the_model_nor_the_ledgers(tmp_path, name):
    run(tmp_path, FEDERATIONS[name], BAD, seed=len(name))
    check_end(tmp_path, FEDERATIONS[name])
    assert summary(tmp_path)["problems"] > 0


def test_a_budget_holds_over_federations_and_the_run_ends(tmp_path):
    target = PLDAccountant().epsilon(SGD.events(0)[:4], DELTA) * 1.001
    for _ in range(2):  # of the second run nothing is left
        run(tmp_path, settings={"target_epsilon": target})
        assert history(tmp_path / "ledgers", "client-0") == SGD.events(0)[:4]
        assert (
            summary(tmp_path)["ended"] == "0 of the clients have budget left, and a round needs 3"
        )
    first, second = (tmp_path / "server" / f"rounds{n}.csv" for n in ("-1", ""))
    for path, rounds in ((first, 4), (second, 0)):  # in the next one, all refuse
        found = [each.answered for each in read_rounds(path)]
        assert found == [True] * rounds * CLIENTS + [False] * CLIENTS


def test_the_number_of_records_of_a_whole_client_stays_there(tmp_path):
    for unit in ("record", "user", "client"):
        place = tmp_path / unit
        run(place, records=type("Unit", (LogCosh,), {"unit": unit}), settings={"seed": None})
        found = summary(place)["clients"]["1"]
        assert found["unit"] == unit and ("num_records" in found) == (unit != "client")
        page = (place / "server" / "federation.md").read_text()
        assert ("each has one id, and is at one client only" in page) == (unit == "user")
        assert ("about its users, by all" in page) == (unit == "user")


def test_a_module_of_half_precision_is_trained_in_float32(tmp_path):
    class Linear(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1, dtype=torch.bfloat16)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(batch[0]).float().mean()

    rows = TensorDataset(torch.ones(4, 3).bfloat16())
    alone(tmp_path, Linear, lambda: LocalRecords(Linear(), rows))
    assert summary(tmp_path)["problems"] == 0 and summary(tmp_path)["rounds"] == 2


def test_a_server_that_died_goes_on_and_nothing_is_charged_twice(tmp_path, monkeypatch):
    receive, count = AsyncServer.receive, 0

    def dies(self: AsyncServer, client: int, reply: bytes) -> bool:
        nonlocal count
        count += 1
        if count == 8:  # some of round 2 is in, some is not
            raise KeyboardInterrupt
        return receive(self, client, reply)

    monkeypatch.setattr(AsyncServer, "receive", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, faults=BAD)
    assert summary(tmp_path)["ended"].startswith("it failed (KeyboardInterrupt)")
    monkeypatch.setattr(AsyncServer, "receive", receive)
    run(tmp_path, faults=BAD, seed=1)
    check_end(tmp_path)


def test_a_server_that_noises_shows_one_model_of_a_round_however_it_dies(tmp_path):
    """Two noises on one sum would be two releases for one charge."""
    federation, shown = FEDERATIONS["DIFF2, trusted server"], []

    def evaluate(context: Context, module: nn.Module) -> dict[str, float]:
        shown.append(module.x.detach().clone())
        if len(shown) in (2, 4):
            raise KeyboardInterrupt
        return {}

    def again() -> None:
        server = server_of(
            lambda run, x: replace(federation.server(run, x, EVERYBODY), seed=None),
            *(tmp_path,),
            evaluate=evaluate,
        )
        LoopbackGrid(client_of(federation, tmp_path), CLIENTS, GOOD).start(server)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            again()
    again()
    assert len({tuple(x.tolist()) for x in shown}) == ROUNDS + 1


def test_two_servers_do_not_share_a_folder(tmp_path):
    (tmp_path / "server").mkdir()
    with (
        FileLock(tmp_path / "server" / "server.lock"),
        pytest.raises(ValueError, match="Another server is at work"),
    ):
        run(tmp_path)
    run(tmp_path)


def test_an_exception_at_a_client_tells_the_server_nothing(tmp_path, log):
    failed: set[int] = set()

    class Failing(LogCosh):
        def bounded_sum(self, query, records):
            if len(self.asked) == 3 and id(self) not in failed:
                failed.add(id(self))
                raise ValueError("record 17 is HIV positive")
            return super().bounded_sum(query, records)

    run(tmp_path, records=Failing)
    check_end(tmp_path)
    asked_again = log("Asking again")
    assert len(asked_again) == CLIENTS and not log("HIV")
    assert "HIV" in str(log("could not answer")[0].exc_info[1])


def test_a_servers_state_is_on_disk_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    calls, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("replace"), replace(*paths)))
    _save({"round": 3}, tmp_path / "server.pt")
    assert calls == ["fsync", "replace", "fsync"]


# -- replies of anybody ------------------------------------------------------------------------

Spoil = Callable[[Message, RecordDict], Message]
WIDE = torch.zeros(3)


def value(client: int, i: int) -> Tensor:
    return torch.full((3,), 1.0 + client + 0.1 * i)


def end_of(rounds: int) -> Tensor:
    x = WIDE
    for i in range(rounds):
        x = x - 0.5 * sum(value(client, i) for client in range(CLIENTS))
    return x


class Node:
    """Answers as it should; each message to client 1 first in one of the ways to spoil it."""

    def __init__(self, spoil: Iterable[Spoil] = (), kind: str = "train") -> None:
        self.spoil, self.kind, self.spoilt, self.turn = iter(spoil), kind, 0, True

    def answer(self, message: Message, context: Context) -> RecordDict:
        client = number(context)
        facts = {"client": client, "num_clients": CLIENTS, "epsilon": 0.5}
        if message.metadata.message_type == "query":
            return pack(b"", facts)
        request = Content.from_bytes(payload_of(message))
        i = request["round"]
        update = Content("update", {"round": i}, {"update": value(client, i)})
        return pack(update.to_bytes(), facts)

    def __call__(self, message: Message, context: Context) -> Message:
        good = self.answer(message, context)
        if number(context) == 1 and message.metadata.message_type == self.kind:
            way = next(self.spoil, None) if self.turn else None
            self.turn = not self.turn
            if way is not None:
                self.spoilt += 1
                return way(message, good)
        return Message(good, reply_to=message)


def serve(folder: Path, rounds: int, client: Any, **changes: Any) -> LoopbackGrid:
    limits = changes.pop("limits", {})
    plan = AsyncPlan(rounds, PolynomialSizes(a=0, b=8), InverseSteps(0.5), **limits)
    grid = changes.pop("grid", LoopbackGrid)(client, changes.pop("nodes", CLIENTS))
    quorum = changes.pop("quorum", EVERYBODY)

    def server(run: str, x: Tensor) -> AsyncServer:
        return AsyncServer(run, plan, x, CLIENTS, quorum)

    grid.start(server_of(server, folder, start=WIDE, **changes))
    return grid


def records(**changed: Any) -> Spoil:
    def spoil(message: Message, good: RecordDict) -> Message:
        kept = {name: record for name, record in {**good, **changed}.items() if record is not None}
        return Message(RecordDict(kept), reply_to=message)

    return spoil


def array(given: Any = None, **named: Any) -> Spoil:
    first = {} if given is None else {"bytes": given}
    return records(payload=ArrayRecord({**first, **named}))


def with_facts(**changed: Any) -> Spoil:
    def spoil(message: Message, good: RecordDict) -> Message:
        facts = ConfigRecord()
        vars(facts)["_data"].update({**good["facts"], **changed})  # also what Flower would refuse
        return Message(RecordDict({**good, "facts": facts}), reply_to=message)

    return spoil


def error(code: int, reason: str) -> Spoil:
    return lambda message, good: Message(Error(code, reason), reply_to=message)


def nothing(message: Message, good: RecordDict) -> Message:
    return Message(RecordDict(), reply_to=message)


WORDS = Array(np.frombuffer(b"hello", np.uint8))
UNREADABLE: list[Spoil] = [
    nothing,
    records(payload=None),
    records(payload=ConfigRecord({"bytes": b"ldp1"})),
    records(payload=MetricRecord({"bytes": 1.0})),
    records(more=ConfigRecord({"a": 1})),
    array(),
    array(other=WORDS),
    array(WORDS, more=WORDS),
    array(WORDS),
    array(Array(np.zeros((2, 3), np.complex64))),
    array(Array("uint8", (5,), "torch.tensor", b"hello")),
    array(Array("object", (2**62, 4), "numpy.ndarray", b"")),
    error(2, "record 17 is HIV positive"),
    error(99, "x" * 100_000),
    *(with_facts(client=each) for each in (0, 7, -1)),
]
STRANGE: list[Spoil] = [
    records(facts=None),
    records(facts=ConfigRecord({})),
    records(facts=MetricRecord({"epsilon": 1.0})),
    with_facts(client=2**70),
    with_facts(client=[1]),
    *(with_facts(epsilon=e) for e in ("high", math.nan, -1, True, b"1", [1.0], 10**400, math.inf)),
    *(with_facts(more=each) for each in (math.nan, -math.inf, b"\xff", "\ud800", "x" * 10**6)),
    *(with_facts(more=each) for each in (10**5000, None, {"a": object()}, np.float32(1))),
    with_facts(**{str(i): i for i in range(1000)}),
    with_facts(**{"x" * 10**6: 1}),
    with_facts(epsilon_of_plan=0.0, unit="<b>", relation="none", seeded=1, num_records=-1),
]


def test_no_reply_ends_the_run_of_the_others(tmp_path, log):
    rounds, node = len(UNREADABLE) + 2, Node(UNREADABLE)
    serve(tmp_path, rounds, node, poll_interval=0.0005)
    assert node.spoilt == len(UNREADABLE)
    torch.testing.assert_close(model(tmp_path), end_of(rounds))
    found = summary(tmp_path)
    assert (found["rounds"], found["problems"]) == (rounds, len(UNREADABLE))
    assert found["clients"]["1"]["client"] == 1 and found["clients"]["1"]["epsilon"] == 0.5
    said = [each.getMessage() for each in log("Asking again")]
    assert len(said) == len(UNREADABLE) and not log("HIV")
    assert all(each.startswith("Client 1: ") and len(each) < 300 for each in said)


def test_an_answer_counts_whatever_its_client_tells_of_itself(tmp_path):
    """Facts that cannot be kept are left out, and the summary is JSON."""
    rounds, node = 2 * len(STRANGE) + 2, Node(STRANGE)
    serve(tmp_path, rounds, node)
    assert node.spoilt == len(STRANGE)
    torch.testing.assert_close(model(tmp_path), end_of(rounds))
    told = summary(tmp_path)["clients"]["1"]
    assert told.keys() == {"client", "num_clients", "epsilon"} and told["epsilon"] == 0.5


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "spoil",
    [
        *(with_facts(client=c) for c in (-1, CLIENTS, 10**5000, "1", 1.0, True, None)),
        records(facts=None),
        records(facts=MetricRecord({"client": 1})),
        nothing,
        error(2, "no"),
    ],
)
def test_a_node_that_does_not_name_its_client_is_asked_again(tmp_path, spoil):
    node = Node([spoil], "query")
    serve(tmp_path, 2, node)
    assert node.spoilt == 1
    torch.testing.assert_close(model(tmp_path), end_of(2))
    assert sorted(summary(tmp_path)["clients"]) == ["0", "1", "2"]


class Poisoned(LoopbackGrid):
    """Fails as Flower does where it cannot read one of the messages that it is asked for."""

    breaks = 4

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = list(message_ids)
        for each in wanted:
            if self.breaks and each in self._flights and self._flights[each].node == 101:
                if len(wanted) == 1:
                    del self._flights[each]
                    self.breaks -= 1
                raise KeyError("an object")
        return super().pull_messages(wanted)


def test_a_message_that_flower_cannot_read_is_asked_again(tmp_path):
    assert serve(tmp_path, 5, Node(), grid=Poisoned).breaks == 0
    torch.testing.assert_close(model(tmp_path), end_of(5))
    assert summary(tmp_path)["problems"] == 4


def test_an_answer_in_another_nodes_name_is_dropped(tmp_path):
    def forged(message: Message, good: RecordDict) -> Message:
        update = Content("update", {"round": 0}, {"update": value(9, 9)})
        reply = Message(pack(update.to_bytes(), {**good["facts"]}), reply_to=message)
        vars(reply.metadata)["_src_node_id"] = 100
        return reply

    node = Node([forged])
    serve(tmp_path, 3, node, ttl=0.2)
    assert node.spoilt == 1
    torch.testing.assert_close(model(tmp_path), end_of(3))


# -- a quorum ----------------------------------------------------------------------------------

HASTY = Quorum(clients=2, wait=0.5, tries=2, patience=0.5)


def without_client_1(rounds: int, since: int) -> Tensor:
    x = WIDE
    for i in range(rounds):
        x = x - 0.5 * sum(value(c, i) for c in range(CLIENTS) if c != 1 or i < since)
    return x


def useless(way: str) -> Callable[[Message, Context], Message]:
    """Client 1 is of no use from round 1 on."""

    def answer(message: Message, context: Context) -> Message:
        good = Message(Node().answer(message, context), reply_to=message)
        if context.node_id != 101 or message.metadata.message_type == "query":
            return good
        i = Content.from_bytes(payload_of(message))["round"]
        if i == 0:
            return good
        if way.startswith("error"):
            return error(int(way[-1]), "no")(message, good.content)
        content = {
            "too late": Content("update", {"round": i - 1}, {"update": value(1, i - 1)}),
            "another protocol": Content("nonsense", {"round": i}),
            "longer than": Content("update", {"round": i}, {"update": value(1, i) + 1e6}),
        }[way]
        return Message(pack(content.to_bytes(), {"client": 1}), reply_to=message)

    return answer


USELESS = ["too late", "another protocol", "longer than", "error 2", "error 4"]
LIMITS = {"max_grad_norm": 1.0, "noise_multiplier": 2.0}


@pytest.mark.few(2)
@pytest.mark.parametrize("way", USELESS)
def test_a_round_goes_on_without_a_client_that_is_of_no_use(tmp_path, way, log):
    """A line a round names it, and what it did."""
    begin = time.perf_counter()
    serve(tmp_path, 5, useless(way), quorum=HASTY, limits=LIMITS)
    assert time.perf_counter() - begin < 10
    torch.testing.assert_close(model(tmp_path), without_client_1(5, since=1))
    found = summary(tmp_path)
    assert (found["rounds"], found["left out"]) == (5, 4)
    lines = [each.getMessage() for each in log("goes on without client 1")]
    assert [line.split()[1] for line in lines] == ["1", "2", "3", "4"]
    assert all(way in line for line in lines)


@pytest.mark.parametrize("way", USELESS)
def test_patience_is_not_renewed_by_a_client_that_is_of_no_use(tmp_path, way, log):
    everybody = replace(EVERYBODY, patience=0.3)
    serve(tmp_path, 4, useless(way), quorum=everybody, limits=LIMITS)
    (line,) = log("no reply could be used for 0.3 s, and round 1 lacks its quorum")
    assert "'Client 1': " in line.getMessage() and way in line.getMessage()
    assert summary(tmp_path)["rounds"] == 1 and "no quorum" in summary(tmp_path)["ended"]
    assert (tmp_path / "server" / "server.pt").exists()  # to go on with


def test_a_client_that_comes_late_takes_part_from_then_on(tmp_path, log):
    grid = LoopbackGrid(Node(), CLIENTS)
    late, look = grid._nodes.pop(101), LoopbackGrid.get_node_ids
    quorum = Quorum(clients=2, wait=0.2)

    def server(run: str, x: Tensor) -> AsyncServer:
        plan = AsyncPlan(40, PolynomialSizes(a=0, b=8), InverseSteps(0.5))
        machine = AsyncServer(run, plan, x, CLIENTS, quorum)
        receive = machine.receive

        def admit(client: int, reply: bytes) -> bool:
            if machine.round == 3:
                grid._nodes[101] = late
            return receive(client, reply)

        machine.receive = admit
        return machine

    grid.start(server_of(server, tmp_path, start=WIDE))
    missed = len(log("goes on without client 1: it has not replied"))
    assert 4 <= missed < 40 and look(grid)
    x = without_client_1(40, since=0)
    for i in range(missed, 40):
        x = x - 0.5 * value(1, i)
    torch.testing.assert_close(model(tmp_path), x)


def test_a_run_without_its_quorum_ends_with_its_model_and_is_gone_on_with(tmp_path, caplog):
    """Its clients have paid for the rounds that are in the model, and pay for each once."""
    client, quorum = client_of(SGD, tmp_path), replace(HASTY, wait=5.0)

    class Leaving(LoopbackGrid):
        def push_messages(self, messages):
            if len(self._nodes) == CLIENTS and history_length(tmp_path) >= 2 * CLIENTS:
                del self._nodes[101], self._nodes[102]
            return super().push_messages(messages)

    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    for kind in (Leaving, LoopbackGrid):
        server = server_of(lambda run, x: SGD.server(run, x, quorum), tmp_path)
        kind(client, CLIENTS).start(server)
        if kind is Leaving:
            found = summary(tmp_path)
            assert found["rounds"] == 2 and "no quorum; a new run in this folder" in found["ended"]
            assert float((model(tmp_path) - START).norm()) > 0.01
            assert "Clients without a SuperNode: [1, 2]" in caplog.text
    check_end(tmp_path)


def history_length(folder: Path) -> int:
    return sum(len(history(folder / "ledgers", f"client-{c}")) for c in range(CLIENTS))


@pytest.mark.parametrize("unit", ["record", "user", "client"])
def test_a_client_answers_the_runs_on_its_list_only(tmp_path, log, unit):
    for name in (None, "diabetes 2026"):
        alone(
            tmp_path,
            Weights,
            type("Unit", (LogCosh,), {"unit": unit}),
            name,
            runs=["diabetes 2026"],
        )
        assert sum(n for _, n in history(tmp_path / "ledgers", "client-0")) == (2 if name else 0)
        (tmp_path / "server" / "server.pt").unlink(missing_ok=True)
    assert log("this run is not in the list of those that it answers")
    told = summary(tmp_path)["clients"]["0"]
    assert told["epsilon"] == pytest.approx(told["epsilon_of_plan"], rel=1e-3) and told["epsilon"]


def test_a_claim_that_falls_is_logged(tmp_path, log):
    book = Logbook(tmp_path, "trial", is_new=True)
    for epsilon in (0.5, 0.5, 0.7, math.inf, 0.2):
        book.add_client(1, {"epsilon": epsilon})
    (line,) = log("claims epsilon")
    assert line.getMessage().startswith("Client 1 claims epsilon 0.2 after inf")


def test_a_claim_is_never_shown_rounded_down(tmp_path):
    book, shown = Logbook(tmp_path, "trial", is_new=True), dict[str, float]()
    book._writer.add_scalar = lambda name, value, step: shown.update({name: np.float32(value)})
    book.add_reply(0, 1, {"epsilon": 0.70004}, answered=True)  # float32 has less
    book.add_model(1, {})
    assert book.line(1).startswith("Federation: 1 rounds are over; largest epsilon that a client ")
    assert "claims 0.7001" in book.line(1)
    assert all(shown[f"privacy/epsilon_{each}"] >= 0.70004 for each in ("client_1", "max"))


# -- the page at the end -----------------------------------------------------------------------


def test_the_page_of_a_run_has_who_was_there_and_what_each_claims(tmp_path):
    """Client 1 gives up in round 2; the server dies in round 4, and another one goes on."""
    path, asked = tmp_path / "server" / "rounds.csv", []

    class Leaving(LogCosh):
        def bounded_sum(self, query: Any, records: Any) -> Any:
            if self.seed == 1 and len(asked) >= 6:
                raise KeyError("a record's name")
            asked.append(self.seed)
            if len(asked) == 11:
                path.write_text(path.read_text() + "4,0")  # half a line
                raise KeyboardInterrupt
            return super().bounded_sum(query, records)

        def __init__(self, seed: int) -> None:
            super().__init__(seed=seed)
            self.seed = seed

    settings = {"quorum": Quorum(clients=2, tries=2), "settings": {"target_epsilon": 50.0}}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, records=Leaving, **settings)
    assert len(read_rounds(path)) == 6 + 2 * 3
    run(tmp_path, records=Leaving, **settings)
    attendance = read_rounds(path)
    assert [(p.round, p.client) for p in attendance] == [
        (i, c) for i in range(ROUNDS) for c in range(CLIENTS)
    ]
    assert [(p.round, p.client) for p in attendance if not p.answered] == [
        (i, 1) for i in range(2, ROUNDS)
    ]
    found = summary(tmp_path)["clients"]
    for c in (0, 2):
        charged = history(tmp_path / "ledgers", f"client-{c}")
        epsilons = [p.epsilon for p in attendance if p.client == c]
        assert epsilons == sorted(epsilons) and epsilons[-1] == found[f"{c}"]["epsilon"]
        assert epsilons[-1] == pytest.approx(PLDAccountant().epsilon(charged, DELTA), rel=1e-3)
    page = (tmp_path / "server" / "federation.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| 1 |")]
    assert row.endswith("| 2 | 2–5 |") and "record's name" not in page
    picture = (tmp_path / "server" / "federation.svg").read_text()
    assert picture.startswith("<?xml") and picture.count("<use") >= len(attendance)


def test_the_page_names_who_is_not_private_and_what_is_unknown():
    """The facts are those that `test_an_answer_counts_whatever_its_client_tells_of_itself` lets in."""
    facts = {"epsilon": "inf", "seeded": True}
    about = {"run": "trial", "rounds": 1, "ended": "", "metrics": {}, "clients": {"0": facts}}
    page = federation_page(about, [Presence(0, 3, True, math.nan)])
    row = "| 0 |  | inf |  | δ = , unknown relation, unknown unit | 0 |  |"
    assert row in page and "| 3 |" in page and "Client 0 draws repeatable" in page
    facts.update(unit="client", trusts_server=True, epsilon=1.00001, relation="replace_one")
    page = federation_page(about, [])
    assert "replace_one, client |" in page
    assert "1.001" in page and "about its data as a whole," in page and "without noise" in page


def test_the_picture_of_a_long_run_is_small():
    attendance = [(i, c, bool(i % 5), 0.01 * i) for i in range(1000) for c in range(20)]
    assert len(svg(lambda: plot_federation(attendance))) < 500_000


# -- whose number it is ------------------------------------------------------------------------


def test_a_number_that_is_taken_is_not_given_away(tmp_path, log):
    """Node 102 calls itself client 0, once there is one."""
    asked, node = set(), Node()

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            asked.add(context.node_id)
        content = node.answer(message, context)
        if context.node_id == 102 and 100 not in asked:
            return error(2, "not yet")(message, content)
        if context.node_id == 102:
            content["facts"]["client"] = 0
        return Message(content, reply_to=message)

    serve(tmp_path, 3, app, quorum=replace(EVERYBODY, patience=0.3))
    assert log("without a SuperNode: [2]") and log("'Node 102': 'it names itself client 0")
    assert asked == {100, 101}
    assert [each.args[0] for each in log("itself client 0") if each.args[0] != 0.3] == ["Node 102"]


def test_a_node_of_another_federation_is_refused_with_the_cure(tmp_path, log):
    serve(tmp_path, 2, Node(), nodes=5)
    torch.testing.assert_close(model(tmp_path), end_of(2))
    refused = [each.getMessage() for each in log("num_clients=3")]
    assert len(refused) == 2  # each once
    assert all("--node-config 'partition-id" in each for each in refused)


def test_a_node_that_comes_back_with_a_new_id_takes_its_number_when_the_old_one_has_left():
    """Connect again like a killed SuperNode: Flower still lists the old node for a while."""
    grid = LoopbackGrid(Node(), 1)
    exchange = Exchange(grid, 1, "trial", "", ttl=60.0, poll_interval=0.0)
    old = grid._nodes[100]

    def look(until: Callable[[], bool]) -> None:
        for _ in range(1000):
            exchange.collect()
            if until():
                return
        raise AssertionError("it never came to that")

    look(lambda: exchange.idle == [0])
    new = grid.restart(100)
    grid._nodes[100] = old  # killed, and still listed
    for _ in range(50):
        exchange.collect()
    assert exchange.nodes == {0: 100}
    del grid._nodes[100]
    look(lambda: exchange.nodes == {0: new})


# -- arguments, folders, modules ---------------------------------------------------------------


@pytest.mark.parametrize("folder", ["ledgers", "s3://bucket/ledgers", ""])
def test_ledgers_are_in_a_folder_that_does_not_differ_between_processes(folder):
    with pytest.raises(ValueError, match="ledger_dir="):
        client_app(lambda context: None, lambda *given: None, ledger_dir=folder)


@pytest.mark.parametrize("content", [b"", b"garbage", {}, [], {"run": "a", "state": {}}])
def test_an_unreadable_state_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "server" / "server.pt"
    path.parent.mkdir()
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match=r"server\.pt cannot be read .* move it away"):
        run(tmp_path)
    assert path.read_bytes() == before
    path.unlink()  # the cure works
    serve(tmp_path, 1, Node())


def introduce(grid: LoopbackGrid) -> Message:
    """Ask a node for its number, as a server does."""
    asked = RecordDict({"facts": ConfigRecord({"run": "a", "module": ""})})
    [node] = grid.get_node_ids()
    [reply] = grid.send_and_receive([Message(asked, node, "query")])
    return reply


@pytest.mark.parametrize("missing", ["partition-id", "num-partitions"])
def test_a_node_without_a_number_gets_the_cure_and_charges_nothing(tmp_path, caplog, missing):
    grid = LoopbackGrid(client_of(SGD, tmp_path), 1)
    [context] = grid._nodes.values()
    del context.node_config[missing]
    assert introduce(grid).has_error()
    assert re.search(rf"{missing}=None .*--node-config 'partition-id=I", caplog.text)
    assert [*tmp_path.rglob("*.journal")] == []


class Body(L.LightningModule):
    """A frozen layer that each process draws for itself, as long as nobody seeds it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.head(self.body(batch[0])).mean()


@pytest.mark.parametrize("is_seeded", [True, False])
def test_a_module_is_trained_where_its_frozen_layers_are_the_servers(tmp_path, log, is_seeded):
    def body() -> Body:
        if is_seeded:
            torch.manual_seed(0)
        return Body()

    alone(tmp_path, body, lambda: LocalRecords(body(), TensorDataset(torch.ones(4, 3))))
    if not is_seeded:  # refused by name, before a charge
        text = "body.weight, body.bias are not those of the server's module"
        assert {each.args[0] for each in log(text)} >= {"Client 0", "Node 100"}  # both say so
    assert sum(n for _, n in history(tmp_path / "ledgers", "client-0")) == 2 * is_seeded


# -- the grid itself ---------------------------------------------------------------------------


def echo(message: Message, context: Context) -> Message:
    """Count the messages of a node in its state."""
    count = int(context.state["n"]["n"]) + 1 if "n" in context.state else 1
    context.state["n"] = ConfigRecord({"n": count})
    answer = ConfigRecord({"client": number(context), "count": count})
    return Message(RecordDict({"r": answer}), reply_to=message)


def ask(grid: LoopbackGrid, node: int) -> str:
    (name,) = grid.push_messages([Message(RecordDict(), node, "train", ttl=60)])
    return name


def pull_all(grid: LoopbackGrid, names: list[str]) -> Iterator[Message]:
    while names:
        for reply in grid.pull_messages(names):
            names = [name for name in names if name != reply.metadata.reply_to_message_id]
            yield reply


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (Faults(), [1]),
        (Faults(late=1.0), [1]),
        (Faults(lost=1.0), ["error 4"]),
        (Faults(undelivered=1.0), ["error 3"]),
        (Faults(restarted=1.0), ["error 5"]),
        (Faults(duplicated=1.0), [1, 2]),
    ],
)
def test_a_fault_is_read_as_flowers_error(faults, expected):
    grid = LoopbackGrid(echo, 1, faults)
    (node,) = grid.get_node_ids()
    name = ask(grid, node)
    with pytest.raises(RuntimeError, match=f"Two messages are in flight to node {node}"):
        ask(grid, node)
    replies = pull_all(grid, [name])
    assert expected == [
        f"error {r.error.code}" if r.has_error() else r.content["r"]["count"] for r in replies
    ]


def test_a_restarted_node_has_a_new_id_and_no_state_and_replies_overtake_each_other():
    orders = set()
    for seed in range(10):
        grid = LoopbackGrid(echo, 4, Faults(late=0.5), seed=seed)
        first = next(iter(grid.get_node_ids()))
        list(pull_all(grid, [ask(grid, first)]))
        new = grid.restart(first)
        assert new not in range(100, 104) and len(list(grid.get_node_ids())) == 4
        replies = list(pull_all(grid, [ask(grid, node) for node in grid.get_node_ids()]))
        assert all(reply.content["r"]["count"] == 1 for reply in replies)
        orders.add(tuple(int(reply.content["r"]["client"]) for reply in replies))
    assert len(orders) > 5
    with pytest.raises(ValueError, match=r"Faults\(lost=nan\) must be in \[0, 1\]"):
        Faults(lost=math.nan)
