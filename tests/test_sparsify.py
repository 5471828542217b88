"""The sparsifier is unbiased, and k values and a public seed are all of it."""

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
def test_values_seed_and_round_are_all_of_it(dtype, keep):
    sent = random_k(U.to(dtype) / 3, keep, seed=2**64 - 1, round_=2**40)
    again = SparseVector(sent.values, 7, 2**64 - 1, 2**40)
    assert again.values.dtype == dtype and again.keep == keep == len(sent.values)
    assert torch.equal(again.dense(), sent.dense())


def test_values_do_not_share_memory_with_the_vector():
    u = U.clone()
    for keep in (3, 7):
        sent = random_k(u, keep, 1, 0)
        before = sent.values.clone()
        u += 1
        assert torch.equal(sent.values, before)
        u -= 1
        sent.dense().zero_()
        assert torch.equal(sent.values, before)


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
