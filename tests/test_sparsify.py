"""The sparsifier is unbiased, and k values and a public seed are all of it."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from lightning_dp.functional import SparseVector, random_k, shared_mask

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
def test_values_seed_and_round_are_all_of_it(dtype, keep):
    sent = random_k(U.to(dtype) / 3, keep, seed=2**64 - 1, round_=2**40)
    again = SparseVector(sent.values, 7, 2**64 - 1, 2**40)
    assert again.values.dtype == dtype and again.keep == keep == len(sent.values)
    assert torch.equal(again.dense(), sent.dense())


# -- the public coordinate set that everyone who knows the seed shares ---------------------------


@pytest.mark.parametrize(("size", "keep"), [(1, 1), (7, 7), (50, 1), (50, 49), (1000, 37)])
def test_the_set_is_sorted_distinct_and_of_the_size_asked_for(size, keep):
    for round_ in range(20):
        mask = shared_mask(3, round_, size, keep)
        assert mask.dtype == torch.int64 and mask.shape == (keep,)
        assert (mask.diff() > 0).all()
        assert mask[0] >= 0 and mask[-1] < size


def test_it_is_the_philox_stream_as_published():
    """Philox4x64-10 with counter 1 and zero key (Random123's known answers are for counter 0)."""
    words = _philox(0, 0, 10)
    smallest = sorted(range(10), key=lambda i: (words[i], i))[:4]
    assert shared_mask(0, 0, 10, 4).tolist() == sorted(smallest)


def test_the_slow_philox_gives_random123s_known_answers():
    assert _block((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )


@pytest.mark.parametrize(("seed", "round_"), [(7, 3), (2**64 - 1, 2**40), (0, 2**64 - 1)])
def test_large_seeds_and_rounds_are_used_whole(seed, round_):
    words = _philox(seed, round_, 30)
    smallest = sorted(range(30), key=lambda i: (words[i], i))[:9]
    assert shared_mask(seed, round_, 30, 9).tolist() == sorted(smallest)


def test_global_random_states_are_neither_read_nor_changed():
    first = shared_mask(5, 1, 100, 10)
    np.random.seed(0)
    torch.manual_seed(0)
    random.seed(0)
    states = np.random.get_state()[1].tolist(), torch.get_rng_state(), random.getstate()
    assert torch.equal(shared_mask(5, 1, 100, 10), first)
    assert np.random.get_state()[1].tolist() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == states[2]


def test_every_coordinate_and_every_pair_is_kept_equally_often():
    size, keep, rounds = 12, 5, 4000
    kept = torch.zeros(rounds, size)
    for round_ in range(rounds):
        kept[round_, shared_mask(1, round_, size, keep)] = 1
    counts = kept.T @ kept
    alone, together = keep / size, keep * (keep - 1) / (size * (size - 1))
    off = ~torch.eye(size, dtype=torch.bool)
    for observed, expected in ((counts.diagonal(), alone), (counts[off], together)):
        deviation = math.sqrt(rounds * expected * (1 - expected))
        assert (observed - rounds * expected).abs().max() < 5 * deviation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 10, 3), "seed=-1"),
        ((2**64, 0, 10, 3), "seed="),
        ((0, -1, 10, 3), "round_=-1"),
        ((0, 0, 0, 0), "size=0"),
        ((0, 0, 10, 11), "keep=11"),
        ((0, 0, 10, 0), "keep=0"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        shared_mask(*arguments)


def _philox(seed: int, round_: int, count: int) -> list[int]:
    """The first words of the stream: blocks of four, the counter begins at 1."""
    blocks = [_block((1 + i, 0, 0, 0), (seed, round_)) for i in range(-(-count // 4))]
    return [word for block in blocks for word in block][:count]


def _block(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x64-10 of Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011)."""
    word = 2**64
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 // word) ^ c[1] ^ k[0], p1 % word, (p0 // word) ^ c[3] ^ k[1], p0 % word]
        k = [(k[0] + 0x9E3779B97F4A7C15) % word, (k[1] + 0xBB67AE8584CAA73B) % word]
    return tuple(c)
