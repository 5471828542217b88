"""No reply, whatever is in it, harms a server: it is refused, and nothing has changed."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp.estimators import Diff2, MeanGradient
from lightning_dp.federated import AsyncPlan, AsyncServer, PolynomialSizes
from lightning_dp.federated.asynchronous import ConstantSteps
from lightning_dp.federated.protocol import Message, MessageError
from lightning_dp.federated.synchronous import BVRLSGD, SynchronousServer
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import Constant

SIZE = 4
ROUTINE = BVRLSGD(0.5, 3, 0.5, noise_multiplier=3.0, sample_rate=0.4)

Server = AsyncServer | SynchronousServer


def vector(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def update(i: int, seed: int) -> Message:
    return Message("update", {"round": i, "counter": 0}, {"update": vector(seed)})


def asynchronous() -> tuple[Server, Message]:
    """In round 1 of 3, where client 1 may answer and client 0 has."""
    plan = AsyncPlan(3, PolynomialSizes(a=0, b=8), ConstantSteps(0.5))
    server = AsyncServer("trial", plan, torch.zeros(SIZE), 3)
    for client, i in ((0, 0), (1, 0), (2, 0), (0, 1)):
        server.receive(client, update(i, client).to_bytes())
    return server, update(1, 7)


def synchronous(**changes: Any) -> tuple[SynchronousServer, Message]:
    plan = NoisePlan(0.0, Constant(), FullBatch(), 1.0, changes.pop("estimator", MeanGradient(1.0)))
    server = SynchronousServer("trial", plan, torch.zeros(SIZE), 3, 3, 30, 0.5, **changes)
    answer = Message("answer", {"round": 0, "part": 0}, {"sum": vector(7)})
    server.receive(0, answer.to_bytes())
    return server, answer


def walking() -> tuple[Server, Message]:
    """Worker 1 goes on alone."""
    server, answer = synchronous(estimator=Diff2(3, 1.0, 0.6), local_routine=ROUTINE)
    for client in (1, 2):
        server.receive(client, answer.to_bytes())
    assert [server.request(client) is None for client in range(3)] == [True, False, True]
    return server, Message("walked", {"round": 0, "part": 0}, {"x": vector(7)})


MACHINES: dict[str, Callable[[], tuple[Server, Message]]] = {
    "asynchronous": asynchronous,
    "trusted": lambda: synchronous(noise="server"),
    "synchronous": lambda: synchronous(noise="client"),
    "walking": walking,
}

# -- replies that are none -------------------------------------------------------------------


def raw(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return b"ldp1" + len(text).to_bytes(4, "little") + text + body


def with_bad_facts(good: Message) -> Iterator[Any]:
    for name in good.facts:
        yield Message(
            good.kind, {k: v for k, v in good.facts.items() if k != name}, good.tensors
        ).to_bytes()
        (tensor,) = good.tensors
        body = good.tensors[tensor].numpy().tobytes()
        for value in (-1, True, 1.0, 0.5, math.nan, math.inf, "0", "x" * 100_000, 2**62, 10**400):
            yield raw([good.kind, {**good.facts, name: value}, [[tensor, "float32", [4]]]], body)
        for value in (None, [], {}, [0], {"a": 0}):
            yield raw([good.kind, {**good.facts, name: value}, [[tensor, "float32", [4]]]], body)
    for facts in ({"round": 2}, {"round": 2**62}, {"more": 1}, {str(i): 0 for i in range(10_000)}):
        yield Message(good.kind, {**good.facts, **facts}, good.tensors).to_bytes()
    yield Message(good.kind, {}, good.tensors).to_bytes()


def with_bad_tensors(good: Message) -> Iterator[Any]:
    (name,) = good.tensors
    ones = torch.ones(SIZE)
    for tensors in (
        {},
        {"other": ones},
        {name: ones, "other": ones},
        {name: torch.ones(SIZE - 1)},
        {name: torch.ones(SIZE + 1)},
        {name: torch.ones(0)},
        {name: torch.ones(())},
        {name: torch.ones(1, SIZE)},
        {name: torch.ones(SIZE, dtype=torch.int64)},
        {name: torch.full((SIZE,), math.nan)},
        {name: torch.tensor([1.0, 1.0, math.inf, 1.0])},
        {name: torch.tensor([1.0, 1.0, -math.inf, 1.0], dtype=torch.bfloat16)},
        {name: torch.full((SIZE,), 1e39, dtype=torch.float64)},  # finite until it is cast
        {name: torch.full((SIZE,), -1e300, dtype=torch.float64)},
        {name: torch.full((SIZE,), 3e38)},  # finite, but its norm is not
    ):
        yield Message(good.kind, good.facts, tensors).to_bytes()


def with_bad_headers(good: Message) -> Iterator[Any]:
    (name,) = good.tensors
    body, kind, facts = good.tensors[name].numpy().tobytes(), good.kind, dict(good.facts)
    for shape in (
        *([2**62, 4], [0, 2**62, 4], [2**70], [0, 2**70], [2**31, 2**31, 0], [4, -1], [-4], [4.0]),
        *([[4]], [True, 4], ["4"], "4", 4, {}, None, [None], [1] * 1000 + [4], [4, [4]]),
        *([0] * 9, [10**4299], {"4": 4}),
    ):
        yield raw([kind, facts, [[name, "float32", shape]]], body)
    for dtype in ("complex64", "bool", "object", "int32", ">f4", "float32 ", "", None, 4, ["f"]):
        yield raw([kind, facts, [[name, dtype, [4]]]], body)
    for described in (
        *([[name, "float32"]], [[name]], [[]], [name], name, None, {}, 4, [[None, "float32", [4]]]),
        *([[[name], "float32", [4]]], [[name, "float32", [4], 4]]),
        [[name, "float32", [2]], [name, "float32", [2]]],
    ):
        yield raw([kind, facts, described], body)
    for other in ("answered", "round", "query", "local", "", None, 5, [], {}, "x" * 100_000):
        yield raw([other, facts, [[name, "float32", [4]]]], body)
    for header in (b"", b"[]", b"{}", b"null", b"4", b'"x"', b"[" * 100_000, b'{"a":' * 100_000):
        yield raw(header, body)
    text = json.dumps([kind, facts, [[name, "float32", [4]]]])
    yield raw(text.replace('"round": ', '"round": 9, "round": ').encode(), body)
    yield raw(text.encode("utf-8") + b"\xff", body)
    yield raw(text.encode() + b" " * 2**21, body)


def with_bad_bytes(good: Message) -> Iterator[Any]:
    content = good.to_bytes()
    yield from (content[:cut] for cut in range(0, len(content), 7))
    yield from (content + b"0", content * 2, b"ldp2" + content[4:], bytes(len(content)))
    yield from (content[:4] + n.to_bytes(4, "little") + content[8:] for n in (0, 3, 2**32 - 1))
    yield from (pickle.dumps(good.kind), None, "text", 4, [], content.decode("latin-1"))


def bad_replies(good: Message) -> list[Any]:
    return [
        each
        for make in (with_bad_facts, with_bad_tensors, with_bad_headers, with_bad_bytes)
        for each in make(good)
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("name", MACHINES)
def test_a_reply_that_is_none_is_refused_and_changes_nothing(name):
    server, good = MACHINES[name]()
    replies = bad_replies(good)
    assert len(replies) >= 140
    for number, reply in enumerate(replies):
        before = server.state_dict(), [server.request(client) for client in range(3)]
        with pytest.raises(MessageError) as error:
            server.receive(1, reply)
        assert len(str(error.value)) < 500, number
        after = server.state_dict(), [server.request(client) for client in range(3)]
        assert same(before[0], after[0]) and before[1] == after[1], number
    assert server.receive(1, good.to_bytes()) is True


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("client", [-1, 3, 2**62, True, "1", None, 1.0])
def test_nobody_answers_for_a_client_that_there_is_not(name, client):
    server, good = MACHINES[name]()
    before = server.state_dict()
    with pytest.raises(MessageError, match=r"none of the clients 0, \.\.\., 2"):
        server.receive(client, good.to_bytes())
    assert same(before, server.state_dict())


# -- well-formed ones, in the wrong place ------------------------------------------------------


def test_a_client_does_no_round_that_it_may_not_do_yet():
    server, _ = asynchronous()
    before = server.point
    with pytest.raises(MessageError, match="round 2, which it was not asked for"):
        server.receive(0, update(2, 0).to_bytes())
    for client in (1, 2):
        server.receive(client, update(1, client).to_bytes())
    for client in range(3):
        server.receive(client, update(2, client).to_bytes())
    assert server.is_done and not torch.equal(server.point, before)
    end = server.point
    with pytest.raises(MessageError, match="round 3, which it was not asked for"):
        server.receive(0, update(3, 0).to_bytes())
    assert torch.equal(server.point, end)


def test_an_update_that_makes_the_model_infinite_is_refused_alone():
    plan = AsyncPlan(2, PolynomialSizes(a=0, b=8), ConstantSteps(1e30))
    server = AsyncServer("trial", plan, torch.zeros(SIZE), 2)
    large = Message("update", {"round": 0, "counter": 0}, {"update": torch.full((SIZE,), 1e15)})
    with pytest.raises(MessageError, match="update of client 0 the model is not finite"):
        server.receive(0, large.to_bytes())
    assert server.receive(1, update(0, 1).to_bytes()) is True
    assert server.applied == [0, 1]


def test_only_the_worker_in_turn_walks():
    server, walked = walking()
    for client, reply in ((0, walked), (2, walked), (0, Message("refused", walked.facts))):
        with pytest.raises(MessageError, match="was not asked of it"):
            server.receive(client, reply.to_bytes())
    wrong = Message("answer", walked.facts, {"sum": vector(1)})
    assert server.receive(1, wrong.to_bytes()) is False  # as if it came twice
    assert server.receive(1, walked.to_bytes()) is True
    torch.testing.assert_close(server.point, vector(7))


def test_who_has_answered_a_step_does_not_leave_it():
    server, answer = synchronous()
    with pytest.raises(MessageError, match="was not asked of it"):
        server.receive(0, Message("refused", answer.facts).to_bytes())
    with pytest.raises(MessageError, match="sent 'walked', which was not asked"):
        server.receive(1, Message("walked", answer.facts, {"x": vector(1)}).to_bytes())
    assert not server.is_done


def test_a_run_that_diverges_ends_at_its_last_finite_model():
    """Each answer is finite, and the step is not."""
    server, _ = synchronous()
    server.learning_rate = 1e38
    large = Message("answer", {"round": 0, "part": 0}, {"sum": torch.full((SIZE,), 1e18)})
    for client in (1, 2):
        server.receive(client, large.to_bytes())
    assert server.is_done and "no longer finite" in server.reason
    assert torch.equal(server.point, torch.zeros(SIZE))


@pytest.mark.parametrize("name", ["asynchronous", "trusted", "synchronous"])
def test_what_came_twice_or_says_that_the_model_is_lost_is_no_progress(name):
    server, good = MACHINES[name]()
    assert server.receive(1, good.to_bytes()) is True
    assert server.receive(1, good.to_bytes()) is False
    if name == "asynchronous":
        lost = Message("lost", {"round": good["round"]}).to_bytes()
        assert [server.receive(2, lost) for _ in range(3)] == [False] * 3
