"""Fingerprints: every change of bits shows, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from lightning_dp import _fingerprint
from lightning_dp._fingerprint import fingerprint


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in small tensors."""
    monkeypatch.setattr(_fingerprint, "_BLOCK", 64)
    _fingerprint._weights.cache_clear()
    yield
    _fingerprint._weights.cache_clear()


def oracle(tensors) -> int:
    """The definition, in Python's integers."""
    data = b"".join(bytes(t.contiguous().view(-1).view(torch.uint8).tolist()) for t in tensors)
    weights = _fingerprint._weights(torch.device("cpu")).tolist()
    total = 0
    for start in range(0, len(data), 64):
        block = data[start : start + 64]
        block += bytes(-len(block) % 8)
        words = [
            int.from_bytes(block[i : i + 8], "little", signed=True) for i in range(0, len(block), 8)
        ]
        mixed = sum(w * (b ^ (b >> 31)) for w, b in zip(weights, words, strict=False))
        total = (total * _fingerprint._MULTIPLIER + mixed) % 2**64
    return total - 2**64 if total >= 2**63 else total


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 7, 16, 33, 200])
def test_it_is_the_definition(dtype, size):
    tensors = [torch.randn(size).to(dtype), torch.randn(3, 5).to(dtype).t()]

    assert int(fingerprint(tensors)) == oracle(tensors)


def test_how_the_entries_are_divided_makes_no_difference():
    whole = torch.randn(101)

    assert fingerprint(list(whole.split(7))) == fingerprint([whole[:50], whole[50:]])
    assert fingerprint([whole[1:]]) == fingerprint([whole[1:].clone()])
    assert fingerprint([]) == 0


def test_each_bit_counts():
    tensor = torch.randn(40)
    bits = tensor.view(torch.int32)
    seen = {int(fingerprint([tensor]))}
    for entry in range(40):
        for bit in range(32):
            flip = 1 << bit if bit < 31 else -(2**31)
            bits[entry] ^= flip
            seen.add(int(fingerprint([tensor])))
            bits[entry] ^= flip
    assert len(seen) == 1 + 40 * 32


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.neg_(),
        lambda t: t[:, 1].neg_(),
        lambda t: t[:, 0].neg_(),
        lambda t: t[::2].neg_(),
        lambda t: t.copy_(t.flip(0)),
        lambda t: t.copy_(t.roll(8, 0)),  # whole blocks change places
        lambda t: t.copy_(t.flip(1)),
        lambda t: t.mul_(2),
        lambda t: t.zero_(),
        lambda t: t.sign_(),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_changes_of_many_entries_do_not_cancel(change, dtype):
    for seed in range(20):
        tensor = torch.randn(64, 2, generator=torch.Generator().manual_seed(seed)).to(dtype)
        before = fingerprint([tensor])
        change(tensor)
        assert fingerprint([tensor]) != before


def test_one_entry_of_a_longer_vector():
    vector = torch.arange(10.0)
    assert fingerprint([vector[3::20]]) == fingerprint([torch.tensor([3.0])])
