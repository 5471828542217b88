"""Messages: what was sent is what is read, and reading anything else is refused."""

from __future__ import annotations

import math
import pickle
import random

import pytest
import torch

from lightning_dp.federated.protocol import Message, MessageError


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]
)
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 5), ()])
def test_what_is_sent_is_read(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    facts = {"a": 1, "b": 0.1 + 0.2, "c": math.inf, "d": "ε", "e": True, "f": 2**62 + 1}
    sent = Message("kind", facts, {"t": tensor, "u": tensor.clone()})
    read = Message.from_bytes(sent.to_bytes())
    assert (read.kind, dict(read.facts)) == ("kind", facts)
    assert all(torch.equal(read.tensors[name], tensor) for name in ("t", "u"))
    assert read.tensors["t"].dtype == dtype
    assert read.to_bytes() == sent.to_bytes()


def test_what_is_read_owns_its_memory():
    content = Message("kind", {}, {"t": torch.ones(2)}).to_bytes()
    first = Message.from_bytes(content).tensors["t"]
    first += 1
    assert Message.from_bytes(content).tensors["t"].tolist() == [1.0, 1.0]


def test_any_damage_is_refused_or_harmless():
    """No bytes make it do anything but raise MessageError or give numbers."""
    content = Message("kind", {"i": 3}, {"t": torch.ones(4), "u": torch.arange(3)}).to_bytes()
    rng = random.Random(0)
    for _ in range(2000):
        broken = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        broken = broken[: rng.randint(0, len(broken))] if rng.random() < 0.5 else broken
        try:
            Message.from_bytes(bytes(broken))
        except MessageError:
            continue
    for cut in range(len(content)):
        with pytest.raises(MessageError, match="no message of lightning-dp"):
            Message.from_bytes(content[:cut])
    with pytest.raises(MessageError, match="another length"):
        Message.from_bytes(content + b"0")


class _Trap:
    def __reduce__(self):
        return (pytest.fail, ("it was run",))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ldp1",
        pickle.dumps(_Trap()),
        b"ldp1" + (2).to_bytes(4, "little") + b"[]",
        b"ldp1" + (31).to_bytes(4, "little") + b'["k",{},[["t","float32",[-1]]]]',
        b"ldp1" + (38).to_bytes(4, "little") + b'["k",{},[["t","float32",[9999999999]]]]'[:38],
        b"ldp1" + (15).to_bytes(4, "little") + b'["k",{"a":{}},[]]'[:15],
    ],
)
def test_no_message_is_refused(content):
    with pytest.raises(MessageError, match="no message of lightning-dp"):
        Message.from_bytes(content)


def test_missing_and_wrong_parts_are_named():
    message = Message("kind", {"i": -1, "b": True}, {"t": torch.ones(2)})
    with pytest.raises(MessageError, match="has no 'round'"):
        message["round"]
    with pytest.raises(MessageError, match="i=-1 must be a whole number"):
        message.whole("i")
    with pytest.raises(MessageError, match="b=True must be a whole number"):
        message.whole("b")
    with pytest.raises(MessageError, match=r"shape \(2,\), not a vector of 3"):
        message.tensor("t", 3)
    with pytest.raises(MessageError, match="has no tensor 'v'"):
        message.tensor("v")
    with pytest.raises(MessageError, match=r"dtype torch\.int32"):
        Message("kind", {}, {"t": torch.ones(1, dtype=torch.int32)}).to_bytes()
