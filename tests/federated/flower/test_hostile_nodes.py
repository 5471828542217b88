"""A node that answers nonsense, or in another's name, harms itself alone; over Flower's messages."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")

import torch
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
from torch import Tensor, nn

from lightning_dp.federated import AsyncPlan, AsyncServer, PolynomialSizes
from lightning_dp.federated.asynchronous import ConstantSteps
from lightning_dp.federated.flower import server_app
from lightning_dp.federated.flower.exchange import Exchange, pack, payload_of
from lightning_dp.federated.flower.loopback import LoopbackGrid
from lightning_dp.federated.flower.server import Logbook
from lightning_dp.federated.protocol import Message as Content

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SIZE, CLIENTS = 3, 3

Spoil = Callable[[Message, RecordDict], Message]


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(SIZE))


def value(client: int, i: int) -> Tensor:
    return torch.full((SIZE,), 1.0 + client + 0.1 * i)


def end_of(rounds: int) -> Tensor:
    x = torch.zeros(SIZE)
    for i in range(rounds):
        x = x - 0.5 * sum(value(client, i) for client in range(CLIENTS))
    return x


class Node:
    """Answers as it should; each message to client 1 first in one of the ways to spoil it."""

    def __init__(self, spoil: Iterator[Spoil], kind: str = "train") -> None:
        self.spoil, self.kind, self.spoilt, self.turn = spoil, kind, 0, True

    def answer(self, message: Message, context: Context) -> RecordDict:
        client = int(context.node_config["partition-id"])
        facts = {"client": client, "num_clients": CLIENTS, "epsilon": 0.5}
        if message.metadata.message_type == "query":
            return pack(b"", facts)
        request = Content.from_bytes(payload_of(message))
        numbers = {"round": request["round"], "counter": request["counter"]}
        update = Content("update", numbers, {"update": value(client, request["round"])})
        return pack(update.to_bytes(), facts)

    def __call__(self, message: Message, context: Context) -> Message:
        good = self.answer(message, context)
        is_mine = context.node_config["partition-id"] == 1
        if is_mine and message.metadata.message_type == self.kind:
            way = next(self.spoil, None) if self.turn else None
            self.turn = not self.turn
            if way is not None:
                self.spoilt += 1
                return way(message, good)
        return Message(good, reply_to=message)


def server(folder: Path, rounds: int, **changes: Any) -> Any:
    plan = AsyncPlan(rounds, PolynomialSizes(a=0, b=8), ConstantSteps(0.5))
    settings = {"poll_interval": 0.0005, "patience": 20.0, **changes}
    return server_app(
        lambda context: Weights(),
        lambda context, run, start: AsyncServer(run, plan, start, CLIENTS),
        **{"num_clients": CLIENTS, "folder": folder, **settings},
    )


def summary(folder: Path) -> dict[str, Any]:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads((folder / "federation.json").read_text(), parse_constant=no_constant)


def model(folder: Path) -> Tensor:
    return torch.load(folder / "model.pt", weights_only=True)["x"]


# -- ways to spoil a reply -------------------------------------------------------------------


def records(**changed: Any) -> Spoil:
    def spoil(message: Message, good: RecordDict) -> Message:
        kept = {name: record for name, record in {**good, **changed}.items() if record is not None}
        return Message(RecordDict(kept), reply_to=message)

    return spoil


def array(given: Any) -> Spoil:
    return records(payload=ArrayRecord({"bytes": given}))


def file(header: str, body: bytes = b"1234", major: int = 1) -> Spoil:
    """An array of NumPy's whose header says what it likes."""
    text = header.encode() + b"\n"
    data = b"\x93NUMPY" + bytes([major, 0]) + len(text).to_bytes(2, "little") + text + body
    return array(Array("uint8", (4,), "numpy.ndarray", data))


def with_facts(**changed: Any) -> Spoil:
    def spoil(message: Message, good: RecordDict) -> Message:
        facts = ConfigRecord()
        vars(facts)["_data"].update({**good["facts"], **changed})  # also what Flower would refuse
        return Message(RecordDict({**good, "facts": facts}), reply_to=message)

    return spoil


def error(code: int, reason: str) -> Spoil:
    return lambda message, good: Message(Error(code, reason), reply_to=message)


NUMPY = "{'descr': '%s', 'fortran_order': False, 'shape': %s, }"
WORDS = np.frombuffer(b"hello", np.uint8)
UNREADABLE: list[Spoil] = [
    lambda message, good: Message(RecordDict(), reply_to=message),
    records(payload=None),
    records(payload=ConfigRecord({"bytes": b"ldp1"})),
    records(payload=MetricRecord({"bytes": 1.0})),
    records(payload=ArrayRecord({})),
    records(payload=ArrayRecord({"other": Array(WORDS)})),
    records(payload=ArrayRecord({"bytes": Array(WORDS), "more": Array(WORDS)})),
    records(more=ConfigRecord({"a": 1})),
    array(Array(WORDS)),
    array(Array(np.zeros(0, np.uint8))),
    array(Array(np.zeros((2, 3), np.uint8))),
    array(Array(np.zeros(4, np.complex64))),
    array(Array(np.zeros(4, bool))),
    array(Array(np.array(["text"]))),
    array(Array("uint8", (5,), "torch.tensor", b"hello")),
    array(Array("uint8", (5,), "numpy.ndarray", b"hello")),
    array(Array("object", (1,), "numpy.ndarray", b"")),
    file(NUMPY % ("|u1", "(4611686018427387904, 4)")),
    file(NUMPY % ("|u1", "(4611686018427387904,)")),
    file(NUMPY % ("|u1", "(-1,)")),
    file(NUMPY % ("|u1", "((4,),)")),
    file(NUMPY % ("|O", "(4,)")),
    file(NUMPY % (">f8", "(4,)")),
    file(NUMPY % ("|u1", "(3,)")),
    file(NUMPY % ("|u1", "(4,)"), major=9),
    file("(" * 60_000),
    file("__import__('os').abort()"),
    error(2, "record 17 is HIV positive"),
    error(99, "x" * 100_000),
    with_facts(client=0),
    with_facts(client=7),
    with_facts(client=-1),
]
STRANGE: list[Spoil] = [
    records(facts=None),
    records(facts=ConfigRecord({})),
    records(facts=MetricRecord({"epsilon": 1.0})),
    with_facts(client=2**70),
    with_facts(client=[1]),
    with_facts(epsilon="high"),
    with_facts(epsilon=math.nan),
    with_facts(epsilon=-1),
    with_facts(epsilon=True),
    with_facts(epsilon=b"1"),
    with_facts(epsilon=[1.0]),
    with_facts(epsilon=10**400),
    with_facts(epsilon=math.inf),
    with_facts(more=math.nan),
    with_facts(more=-math.inf),
    with_facts(more=b"\xff"),
    with_facts(more="\ud800"),
    with_facts(more="x" * 10**6),
    with_facts(more=10**5000),
    with_facts(more=None),
    with_facts(more={"a": object()}),
    with_facts(more=np.float32(1)),
    with_facts(**{str(i): i for i in range(1000)}),
    with_facts(**{"x" * 10**6: 1}),
]


def test_no_reply_ends_the_run_of_the_others(tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning_dp.federated")  # whatever other tests have set
    rounds = len(UNREADABLE) + 2
    node = Node(iter(UNREADABLE))
    LoopbackGrid(node, CLIENTS).start(server(tmp_path, rounds))

    assert node.spoilt == len(UNREADABLE)
    torch.testing.assert_close(model(tmp_path), end_of(rounds))
    found = summary(tmp_path)
    assert (found["rounds"], found["problems"]) == (rounds, len(UNREADABLE))
    assert found["clients"]["1"]["client"] == 1 and found["clients"]["1"]["epsilon"] == 0.5
    said = [each.getMessage() for each in caplog.records if "Asking again" in each.msg]
    assert len(said) == len(UNREADABLE)
    assert all(each.startswith("Client 1: ") and len(each) < 300 for each in said)
    assert not any("HIV" in each for each in said)


def test_an_answer_counts_whatever_its_client_says_of_itself(tmp_path):
    """Facts that cannot be kept are left out, and the summary is JSON."""
    rounds = 2 * len(STRANGE) + 2
    node = Node(iter(STRANGE))
    LoopbackGrid(node, CLIENTS).start(server(tmp_path, rounds))

    assert node.spoilt == len(STRANGE)
    torch.testing.assert_close(model(tmp_path), end_of(rounds))
    told = summary(tmp_path)["clients"]["1"]
    assert told["epsilon"] == 0.5 and told["more"] in ("-inf", "\ud800", "x")
    assert len(json.dumps(told)) < 10_000


@pytest.mark.parametrize(
    "spoil",
    [
        with_facts(client=-1),
        with_facts(client=CLIENTS),
        with_facts(client=10**5000),
        with_facts(client="1"),
        with_facts(client=1.0),
        with_facts(client=True),
        with_facts(client=None),
        records(facts=None),
        records(facts=ConfigRecord({})),
        records(facts=MetricRecord({"client": 1})),
        lambda message, good: Message(RecordDict(), reply_to=message),
        error(2, "no"),
    ],
)
def test_a_node_that_does_not_say_who_it_is_is_asked_again(tmp_path, spoil):
    node = Node(iter([spoil]), "query")
    LoopbackGrid(node, CLIENTS).start(server(tmp_path, 3))

    assert node.spoilt == 1
    torch.testing.assert_close(model(tmp_path), end_of(3))
    assert sorted(summary(tmp_path)["clients"]) == ["0", "1", "2"]


def test_a_run_whose_summary_cannot_be_written_is_not_over(tmp_path, monkeypatch):
    def full(self: Logbook, step: int, reason: str) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(Logbook, "close", full)
        with pytest.raises(OSError, match="no space left"):
            LoopbackGrid(Node(iter(())), CLIENTS).start(server(tmp_path, 2))
    assert (tmp_path / "server.pt").exists()

    LoopbackGrid(Node(iter(())), CLIENTS).start(server(tmp_path, 2))
    assert summary(tmp_path)["rounds"] == 2 and not (tmp_path / "server.pt").exists()


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
    grid = Poisoned(Node(iter(())), CLIENTS)
    grid.start(server(tmp_path, 5))

    assert grid.breaks == 0
    torch.testing.assert_close(model(tmp_path), end_of(5))
    assert summary(tmp_path)["problems"] == 4


def test_an_answer_in_another_nodes_name_is_dropped(tmp_path):
    def forged(message: Message, good: RecordDict) -> Message:
        update = Content("update", {"round": 0, "counter": 0}, {"update": value(9, 9)})
        content = pack(update.to_bytes(), {**good["facts"]})
        reply = Message(content, reply_to=message)
        vars(reply.metadata)["_src_node_id"] = 100
        return reply

    node = Node(iter([forged]))
    LoopbackGrid(node, CLIENTS).start(server(tmp_path, 3, ttl=0.2))

    assert node.spoilt == 1
    torch.testing.assert_close(model(tmp_path), end_of(3))


# -- whose number it is ------------------------------------------------------------------------


def test_a_number_that_is_taken_is_not_given_away(tmp_path, caplog):
    """Node 102 calls itself client 0, once there is one."""
    caplog.set_level("INFO", logger="lightning_dp.federated")
    asked, node = set(), Node(iter(()))

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train":
            asked.add(context.node_id)
        content = node.answer(message, context)
        if context.node_id == 102 and 100 not in asked:
            return error(2, "not yet")(message, content)
        if context.node_id == 102:
            content["facts"]["client"] = 0
        return Message(content, reply_to=message)

    grid = LoopbackGrid(app, CLIENTS)
    with pytest.raises(RuntimeError, match=r"without a SuperNode: \[2\].*node 102.*is client 0"):
        grid.start(server(tmp_path, 3, patience=0.3))
    assert asked == {100, 101}
    assert summary(tmp_path)["ended"].startswith("it failed (RefusedRun)")
    said = [each.getMessage() for each in caplog.records if "client 0" in each.getMessage()]
    assert len(said) == 1 and said[0].startswith("Node 102: ")


def test_a_node_that_comes_back_with_a_new_id_takes_its_number_when_the_old_one_has_left():
    """As a SuperNode does that was killed: Flower still lists the old node for a while."""
    node = Node(iter(()))
    grid = LoopbackGrid(node, 1)
    exchange = Exchange(grid, 1, run="trial", ttl=60.0, poll_interval=0.0)
    old = grid._nodes[100]

    def look(until: Callable[[], bool]) -> None:
        for _ in range(1000):
            exchange.collect()
            if until():
                return
        raise AssertionError("it never came to that")

    look(lambda: exchange.idle == [0])
    assert exchange._nodes == {0: 100}
    new = grid.restart(100)
    grid._nodes[100] = old  # killed, and still listed
    for _ in range(50):
        exchange.collect()
    assert exchange._nodes == {0: 100} and exchange.missing == []
    del grid._nodes[100]
    look(lambda: exchange._nodes == {0: new})


# -- patience ----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["lost", "stale", "error", "nonsense"])
def test_patience_is_not_renewed_by_a_client_that_answers_without_getting_on(tmp_path, way):
    def spoil(message: Message, good: RecordDict) -> Message:
        i = Content.from_bytes(payload_of(message))["round"]
        if way == "error":
            return error(2, "no")(message, good)
        lost, stale = {"round": i}, {"round": i - 1, "counter": i - 1}
        content = {
            "lost": Content("lost", lost),
            "stale": Content("update", stale, {"update": value(1, i - 1)}),
            "nonsense": Content("nonsense", lost),
        }[way]
        return Message(pack(content.to_bytes(), {**good["facts"]}), reply_to=message)

    class Always(Node):
        def __call__(self, message: Message, context: Context) -> Message:
            good = self.answer(message, context)
            if context.node_id != 101 or message.metadata.message_type == "query":
                return Message(good, reply_to=message)
            is_first = Content.from_bytes(payload_of(message))["round"] == 0
            return Message(good, reply_to=message) if is_first else spoil(message, good)

    grid = LoopbackGrid(Always(iter(())), CLIENTS)
    with pytest.raises(RuntimeError, match=r"No reply could be used for 0\.3 s"):
        grid.start(server(tmp_path, 4, patience=0.3))
    assert summary(tmp_path)["rounds"] == 1
    assert (tmp_path / "server.pt").exists() and not (tmp_path / "model.pt").exists()
