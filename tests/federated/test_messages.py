"""Messages: what was sent is what is read; nothing that anybody sends harms a server."""

from __future__ import annotations

import json
import math
import pickle
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp.federated.protocol import AbstractServer, Message, MessageError
from tests.federated.zoo import FEDERATIONS, START

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]
)
@pytest.mark.parametrize("size", [0, 3])
def test_the_content_of_a_message_is_read_as_it_was_sent(dtype, size):
    tensor = torch.arange(size).to(dtype)
    facts = {"a": 1, "b": 0.1 + 0.2, "c": math.inf, "d": "ε\ud800", "e": True, "f": 2**62 + 1}
    sent = Message("kind", facts, {"t": tensor, "u": tensor, "v": torch.ones(9)[::2]})
    read = Message.from_bytes(sent.to_bytes())
    assert (read.kind, dict(read.facts)) == ("kind", facts)
    assert all(torch.equal(read.tensors[name], tensor) for name in ("t", "u"))
    assert read.tensors["t"].dtype == dtype
    assert read.to_bytes() == sent.to_bytes()
    read.tensors["v"].add_(1)  # its memory is its own
    assert torch.equal(Message.from_bytes(sent.to_bytes()).tensors["v"], torch.ones(5))


def test_missing_and_wrong_parts_are_named():
    message = Message("kind", {"i": -1, "b": True}, {"t": torch.ones(2)})
    for work, match in (
        (lambda: message["round"], "has no 'round'"),
        (lambda: message.whole("i"), "i=-1 must be a whole number"),
        (lambda: message.whole("b"), "b=True must be a whole number"),
        (lambda: message.reals("t", 3, torch.float32), "2 numbers and is not a vector of 3"),
        (lambda: message.tensor("v"), "has no tensor 'v'"),
        (lambda: Message("k", {}, {"t": torch.ones(1).int()}).to_bytes(), r"torch\.int32"),
        (lambda: Message("k", {}, {"t": torch.ones(1, 1)}).to_bytes(), r"shape \(1, 1\)"),
    ):
        with pytest.raises(MessageError, match=match):
            work()


# -- replies of anybody ------------------------------------------------------------------------


@cache
def honest(name: str) -> list[tuple[int, bytes]]:
    """The replies of a run up to one that only client 1 owes: of round 1, or of a worker alone."""
    server, found = FEDERATIONS[name].server("trial", START), []
    with tempfile.TemporaryDirectory() as folder:
        make = FEDERATIONS[name].clients(Path(folder))
        while server.awaited != {1}:
            c = min(server.awaited - ({1} if server.round else set()))
            found.append((c, make(c).answer(server.request(c))))
            server.receive(*found[-1])
        return [*found, (1, make(1).answer(server.request(1)))]


def machine(name: str) -> tuple[AbstractServer, Message]:
    """A server that all but client 1 have answered, and that client's reply."""
    server, replies = FEDERATIONS[name].server("trial", START), honest(name)
    for c, reply in replies[:-1]:
        server.receive(c, reply)
    return server, Message.from_bytes(replies[-1][1])


def raw(good: Message, header: Any = None, **changes: Any) -> bytes:
    """The bytes of a reply whose header holds anything."""
    ((name, value),) = good.tensors.items()
    body = value.numpy().tobytes()
    tensor = {"dtype": "F64", "shape": [len(value)], "data_offsets": [0, len(body)]}
    facts = json.dumps([good.kind, dict(good.facts)])
    whole = {"__metadata__": {"lightning_dp": facts}, name: {**tensor, **changes}}
    text = header if header is not None else json.dumps(whole).encode()
    return len(text).to_bytes(8, "little") + text + body


def bad_replies(good: Message) -> Iterator[Any]:
    """Headers that no message has; test_outliving.py changes the rest of a message."""
    content, ((name, value),) = good.to_bytes(), good.tensors.items()
    size = len(value)
    offsets = {"dtype": "F64", "shape": [size], "data_offsets": [0, 8 * size]}
    for fact in good.facts:
        for value in (1.0, math.nan, "0", "x" * 10**5, 10**400, None, [0]):
            text = json.dumps([good.kind, {**good.facts, fact: value}])
            metadata = {"__metadata__": {"lightning_dp": text}}
            yield raw(good, json.dumps({**metadata, name: offsets}).encode())
    many = {**good.facts, **{str(i): 0 for i in range(10_000)}}
    yield Message(good.kind, many, good.tensors).to_bytes()
    yield Message("x" * 10**5, good.facts, good.tensors).to_bytes()
    yield Message(good.kind, good.facts, {}).to_bytes()
    shapes = [
        [2**62, size],
        [0, 2**62, 4],
        [0, 2**70],
        [2**31, 2**31, 0],
        [-size],
        [4.0],
        [1, size],
    ]
    for shape in (*shapes, [size, 1], [[size]], "4", 4, {}, None, [1] * 1000 + [size], [0] * 9, []):
        yield raw(good, shape=shape)
    for dtype in ("C64", "BOOL", "I64", "F32", "object", "F64 ", "", None, 4):
        yield raw(good, dtype=dtype)
    for wrong in ([0, 8], [4, 20], [16, 0], [0, 2**64], [0], None):
        yield raw(good, data_offsets=wrong)
    for header in (b"", b"[]", b"{}", b"null", b"4", b"[" * 10**5, b'{"a":' * 10**5, b"\xff"):
        yield raw(good, header)
    for facts in ("", "[]", "4", "[1, {}]", '["k", []]', '["k", {"a": {}}]', "[" * 10**5):
        yield raw(good, json.dumps({"__metadata__": {"lightning_dp": facts}}).encode())
    yield raw(good, json.dumps({"__metadata__": {"other": "x"}}).encode())
    yield from (content * 2, bytes(len(content)), b"\xff" * 8 + content[8:])
    yield from (pickle.dumps(good.kind), None, "text", 4, [])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def state(server: AbstractServer) -> dict[str, Any]:
    return {**server.state_dict(), "requests": [server.request(client) for client in range(3)]}


@pytest.mark.parametrize("name", FEDERATIONS)
def test_a_bad_reply_is_refused_and_changes_nothing(name):
    server, good = machine(name)
    before, count = state(server), 0
    for count, reply in enumerate(bad_replies(good), 1):
        with pytest.raises(MessageError) as error:
            server.receive(1, reply)
        assert len(str(error.value)) < 500, count
        assert same(before, state(server)), count
    assert count >= 60
    for client in (-1, 3, 2**62, True, "1", None, 1.0):
        with pytest.raises(MessageError, match=r"none of the clients 0, \.\.\., 2"):
            server.receive(client, good.to_bytes())
    assert same(before, state(server))
    assert server.receive(1, good.to_bytes()) is True


def test_a_message_without_safetensors_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"lightning-dp\[federated\]"):
        Message("kind").to_bytes()
