"""The sparsifier is unbiased, and its message is k values and a seed."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dp.sparsify import SparseVector, random_k, shared_mask

U = torch.tensor([3.0, -1.0, 0.5, 2.0, 0.0, -4.0, 1.0])


def test_it_is_unbiased_over_seeds_with_the_variance_of_the_definition():
    draws = torch.stack([random_k(U.double(), 2, seed, 5).dense() for seed in range(4000)])
    error = (7 / 2 - 1) * float(U.square().sum())  # E ‖S(u) - u‖²
    assert float((draws - U).square().sum(1).mean()) == pytest.approx(error, rel=0.05)
    # Each entry of the mean has standard deviation |u_i| sqrt((d/k - 1) / 4000) = .025 |u_i|.
    assert bool(((draws.mean(0) - U).abs() <= 4 * 0.025 * U.abs() + 1e-12).all())


def test_the_kept_entries_are_scaled_and_the_others_are_0():
    message = random_k(U, 3, seed=9, round_=4)
    kept = shared_mask(9, 4, 7, 3)
    expected = torch.zeros(7)
    expected[kept] = U[kept] * 7 / 3
    assert torch.equal(message.dense(), expected)
    assert torch.equal(message.coordinates(), kept)
    assert torch.equal(message.values, U[kept] * (7 / 3))


def test_all_entries_are_sent_as_they_are():
    assert torch.equal(random_k(U, 7, seed=1, round_=0).dense(), U)


def test_which_entries_are_kept_never_changes():
    """Published: senders and receivers of different versions must agree."""
    at = [random_k(torch.ones(20), 4, seed, round_).coordinates() for seed, round_ in PUBLISHED]
    assert [mask.tolist() for mask in at] == list(PUBLISHED.values())


PUBLISHED = {
    (0, 0): [0, 2, 11, 17],
    (1, 0): [2, 3, 5, 9],
    (0, 1): [14, 15, 16, 17],
    (2**64 - 1, 2**63): [5, 9, 11, 18],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keep", [1, 3, 7])
def test_a_message_arrives_bit_by_bit(dtype, keep):
    message = random_k(U.to(dtype) / 3, keep, seed=2**64 - 1, round_=2**40)
    arrived = SparseVector.from_bytes(message.to_bytes())
    assert arrived.values.dtype == dtype
    assert torch.equal(arrived.values, message.values)
    assert torch.equal(arrived.dense(), message.dense())
    assert (arrived.size, arrived.seed, arrived.round_) == (7, 2**64 - 1, 2**40)


def test_a_tenth_of_a_million_entries_is_a_tenth_of_the_bytes():
    u = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    sparse, dense = (len(random_k(u, k, 7, 0).to_bytes()) for k in (100_000, 1_000_000))
    assert (sparse, dense) == (400_040, 4_000_040)


def test_the_message_does_not_share_memory_with_the_vector():
    u = U.clone()
    for keep in (3, 7):
        before = random_k(u, keep, 1, 0).to_bytes()
        message = random_k(u, keep, 1, 0)
        u += 1
        assert message.to_bytes() == before
        u -= 1
        message.dense().zero_()
        assert message.to_bytes() == before


def damaged(message: bytes, place: int, new: bytes) -> bytes:
    return message[:place] + new + message[place + len(new) :]


GOOD = random_k(U, 3, 1, 0).to_bytes()


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (b"", "0 bytes holds no sparse vector"),
        (GOOD[:39], "39 bytes holds no sparse vector"),
        (b"X" + GOOD[1:], "52 bytes holds no sparse vector"),
        (damaged(GOOD, 4, b"\x02"), "format 2"),
        (damaged(GOOD, 6, b"\x09"), "type 9"),
        (GOOD[:-1], "3 values of 4 bytes, and has 11"),
        (GOOD + b"\0", "3 values of 4 bytes, and has 13"),
        (damaged(GOOD, 8, b"\x02"), "keep=3 must be a whole number from 1 to 2"),
        (damaged(GOOD, 16, bytes(8))[:40], "keep=0 must be"),
        (damaged(GOOD, 8, b"\xff" * 8), "size=18446744073709551615 must be"),
    ],
)
def test_a_message_that_is_damaged_is_refused(message, match):
    with pytest.raises(ValueError, match=match):
        SparseVector.from_bytes(message)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"u": U[None]}, r"u has shape \(1, 7\)"),
        ({"u": U.half()}, "float16; it must be flat, float32 or float64"),
        ({"u": torch.arange(7)}, "int64; it must be"),
        ({"u": torch.zeros(0)}, "size=0 must be"),
        ({"keep": 8}, "keep=8 must be a whole number from 1 to 7"),
        ({"keep": 0}, "keep=0 must be"),
        ({"keep": math.nan}, "keep=nan must be"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"round_": 2**64}, "round_=18446744073709551616 must be"),
    ],
)
def test_bad_arguments_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        random_k(**{"u": U, "keep": 3, "seed": 1, "round_": 0, **change})


def test_values_that_are_no_vector_are_refused():
    with pytest.raises(ValueError, match=r"values of shape \(2, 2\)"):
        SparseVector(torch.zeros(2, 2), 4, 0, 0)
