"""Norms, clip factors and flat vectors, against a slow loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_dp.functional import clip_factors, flatten, per_sample_norms, unflatten

SHAPES = ((3, 4), (5,), (2, 2, 2))


def random_gradients(records: int, *, seed: int = 0, spread: float = 3.0) -> list[Tensor]:
    """One (records, *shape) tensor per shape; record norms on both sides of 1."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-spread, spread, records, base=2.0)
    return [
        torch.randn(records, *shape, generator=generator)
        * sizes.view(-1, *[1] * len(shape))
        / math.sqrt(25)
        for shape in SHAPES
    ]


# -- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 1_000_003, 3_000_000])
def test_norms_of_long_rows_are_true_to_a_millionth(length):
    rows = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    truth = rows.double().square().sum(1).sqrt()

    torch.testing.assert_close(per_sample_norms([rows]), truth, rtol=1e-6, atol=0)


def test_a_long_row_of_equal_values_is_not_under_estimated():
    """The case in which a float32 running sum stagnates: it would come out 1e-3 too small."""
    rows = torch.full((1, 5_000_000), 0.1)
    truth = rows[0, 0].double().item() * math.sqrt(5_000_000)

    assert per_sample_norms([rows]).item() == pytest.approx(truth, rel=1e-6)


def test_the_norm_of_a_record_goes_over_all_parameters():
    gradients = random_gradients(7)
    truth = torch.cat([gradient.double().flatten(1) for gradient in gradients], dim=1).norm(dim=1)

    torch.testing.assert_close(per_sample_norms(gradients), truth, rtol=1e-6, atol=0)


def test_norms_of_scalar_parameters_and_of_a_single_record():
    assert per_sample_norms([torch.tensor([3.0, -4.0])]).tolist() == [3.0, 4.0]
    assert per_sample_norms([torch.tensor([[3.0, 4.0]])]).tolist() == [5.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_norm_of_a_record_that_is_not_finite_is_not_finite(bad):
    gradients = random_gradients(4)
    gradients[1][2, 0] = bad

    is_finite = torch.isfinite(per_sample_norms(gradients))

    assert is_finite.tolist() == [True, True, False, True]


# -- factors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [0.25, 1.0, 7.0])
def test_factors_scale_long_vectors_to_the_clip_norm_and_leave_short_ones(clip_norm):
    norms = torch.tensor([0.0, 0.1, 1.0, 8.0, 1e30], dtype=torch.float64)

    factors = clip_factors(norms, clip_norm)

    expected = [1.0 if n <= clip_norm else clip_norm / n for n in norms.tolist()]
    torch.testing.assert_close(factors, torch.tensor(expected, dtype=torch.float64))
    assert (factors * norms <= clip_norm * (1 + 1e-15)).all()


@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
def test_factors_are_zero_where_the_norm_is_not_finite(clip_norm):
    assert clip_factors(torch.tensor([math.nan, math.inf, 1.0]), clip_norm).tolist() == [0, 0, 1]


def test_an_infinite_clip_norm_leaves_every_finite_vector():
    assert clip_factors(torch.tensor([0.0, 1.0, 1e30]), math.inf).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan])
def test_a_clip_norm_that_bounds_nothing_is_refused(clip_norm):
    with pytest.raises(ValueError, match=f"clip_norm={clip_norm} must be greater than 0"):
        clip_factors(torch.ones(2), clip_norm)


def test_unflatten_undoes_flatten_with_shape_and_dtype():
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(4).bfloat16()]

    parts = unflatten(flatten([tensor.float() for tensor in tensors]), tensors)

    for part, tensor in zip(parts, tensors, strict=True):
        assert part.dtype == tensor.dtype
        assert torch.equal(part, tensor)
