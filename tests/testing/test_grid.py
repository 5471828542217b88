"""The in-process grid: Flower's messages, with every fault that a network has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs lightning-dp[federated]")

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from lightning_dp.federated.flower.loopback import Faults, LoopbackGrid

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def counting_app() -> ClientApp:
    """Each node counts its messages in its state, and echoes."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        count = int(context.state["n"]["n"]) + 1 if "n" in context.state else 1
        context.state["n"] = ConfigRecord({"n": count})
        me = int(context.node_config["partition-id"])
        asked = int(message.content["r"]["round"])
        if asked < 0:
            raise ValueError("asked for it")
        answer = ConfigRecord({"client": me, "round": asked, "count": count})
        return Message(RecordDict({"r": answer}), reply_to=message)

    return app


def ask(grid: LoopbackGrid, node: int, round_number: int) -> str:
    content = RecordDict({"r": ConfigRecord({"round": round_number})})
    (name,) = grid.push_messages([Message(content, node, "train", ttl=60)])
    return name


def pull_all(grid: LoopbackGrid, names: list[str]) -> list[Message]:
    """Pull until every message has at least one reply, as a server does."""
    replies: list[Message] = []
    while {reply.metadata.reply_to_message_id for reply in replies} != set(names):
        replies += grid.pull_messages(names)
    return replies


def test_every_node_answers_and_replies_name_their_messages():
    grid = LoopbackGrid(counting_app(), 5)
    names = [ask(grid, node, 7) for node in grid.get_node_ids()]

    replies = pull_all(grid, names)

    assert sorted(reply.content["r"]["client"] for reply in replies) == [0, 1, 2, 3, 4]
    assert sorted(reply.metadata.reply_to_message_id for reply in replies) == sorted(names)
    assert {reply.metadata.src_node_id for reply in replies} == set(grid.get_node_ids())
    assert grid.calls == 5


def test_replies_overtake_each_other():
    orders = set()
    for seed in range(10):
        grid = LoopbackGrid(counting_app(), 4, Faults(late=0.5), seed=seed)
        replies = pull_all(grid, [ask(grid, node, 0) for node in grid.get_node_ids()])
        orders.add(tuple(int(reply.content["r"]["client"]) for reply in replies))

    assert len(orders) > 5


@pytest.mark.parametrize(
    ("faults", "code", "calls"),
    [
        (Faults(lost=1.0), 4, 1),
        (Faults(undelivered=1.0), 3, 0),
        (Faults(restarted=1.0), 5, 1),
    ],
)
def test_a_fault_is_read_as_flowers_error(faults, code, calls):
    grid = LoopbackGrid(counting_app(), 1, faults)
    (node,) = grid.get_node_ids()

    (reply,) = pull_all(grid, [ask(grid, node, 0)])

    assert reply.has_error() and not reply.has_content()
    assert reply.error.code == code
    assert grid.calls == calls


def test_a_duplicate_reaches_the_client_and_the_server_twice():
    grid = LoopbackGrid(counting_app(), 1, Faults(duplicated=1.0))
    (node,) = grid.get_node_ids()

    replies = pull_all(grid, [ask(grid, node, 0)])

    assert [reply.content["r"]["count"] for reply in replies] == [1, 2]


def test_a_restarted_node_has_a_new_id_the_same_partition_and_no_state():
    grid = LoopbackGrid(counting_app(), 3)
    before = list(grid.get_node_ids())
    pull_all(grid, [ask(grid, before[1], 0)])

    new = grid.restart(before[1])

    assert new not in before
    assert set(grid.get_node_ids()) == {before[0], before[2], new}
    (reply,) = pull_all(grid, [ask(grid, new, 0)])
    assert (reply.content["r"]["client"], reply.content["r"]["count"]) == (1, 1)
    (gone,) = pull_all(grid, [ask(grid, before[1], 0)])
    assert gone.error.code == 5


def test_an_exception_in_the_client_is_an_error_reply():
    grid = LoopbackGrid(counting_app(), 1)
    (node,) = grid.get_node_ids()

    (reply,) = pull_all(grid, [ask(grid, node, -1)])

    assert reply.error.code == 2
    assert "asked for it" in reply.error.reason


def test_two_messages_in_flight_to_one_node_are_refused():
    grid = LoopbackGrid(counting_app(), 2)
    first, other = grid.get_node_ids()
    name = ask(grid, first, 0)
    ask(grid, other, 0)

    with pytest.raises(RuntimeError, match=f"Two messages are in flight to node {first}"):
        ask(grid, first, 1)

    pull_all(grid, [name])
    ask(grid, first, 1)


def test_faults_are_repeatable_and_about_training_only():
    def outcomes(seed: int) -> Counter[Any]:
        grid = LoopbackGrid(counting_app(), 1, Faults(0.3, 0.3, 0.3, 0.3, 0.3), seed=seed)
        found: Counter[Any] = Counter()
        for number in range(50):
            (node,) = grid.get_node_ids()
            for reply in pull_all(grid, [ask(grid, node, number)]):
                found[reply.error.code if reply.has_error() else "ok"] += 1
        return found

    assert outcomes(3) == outcomes(3)
    assert outcomes(3) != outcomes(4)
    assert set(outcomes(3)) == {"ok", 3, 4, 5}


def test_a_server_app_runs_on_it_with_the_run_config():
    seen = {}
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        seen["nodes"] = len(list(grid.get_node_ids()))
        seen["rounds"] = context.run_config["rounds"]

    LoopbackGrid(counting_app(), 3, run_config={"rounds": 4}).start(app)

    assert seen == {"nodes": 3, "rounds": 4}


@pytest.mark.parametrize("bad", [-0.1, 1.5, float("nan")])
def test_faults_are_probabilities(bad):
    with pytest.raises(ValueError, match=r"Faults\(lost=.*\) must be in \[0, 1\]"):
        Faults(lost=bad)


def test_a_federation_has_clients():
    with pytest.raises(ValueError, match="num_clients=0"):
        LoopbackGrid(counting_app(), 0)
