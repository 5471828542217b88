"""Norms, clip factors and flat vectors, against a slow loop in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_dp import functional as smoothing
from lightning_dp.functional import (
    clip_factors,
    flatten,
    laplacian_smoothing,
    squared_row_norms,
    unflatten,
)

# -- norms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 1_000_003, 3_000_000])
def test_norms_of_long_rows_are_true_to_a_millionth(length):
    rows = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    truth = rows.double().square().sum(1).sqrt()

    torch.testing.assert_close(squared_row_norms(rows).sqrt(), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_norm_of_a_record_that_is_not_finite_is_not_finite(bad):
    rows = torch.randn(4, 3)
    rows[2, 0] = bad

    assert squared_row_norms(rows).isfinite().tolist() == [True, True, False, True]


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


# -- functional.laplacian_smoothing against the dense solve, and its algebra ---------------------


SIZES = [1, 2, 3, 4, 5, 8, 31, 32, 97, 128, 255, 257]  # 2 neighbours that are one, odd, prime
SIGMAS = [1e-6, 0.01, 0.2, 0.5, 1.0, 3.0, 10.0, 10.5, 100.0, 1e4, 1e6]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(found: torch.Tensor, exact: np.ndarray) -> float:
    """‖found - exact‖ / ‖exact‖."""
    return float(np.linalg.norm(found.double().numpy() - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("size", SIZES)
def test_it_solves_the_dense_system(size, dense):
    v = noise(size, seed=size)
    for sigma in SIGMAS:
        exact = np.linalg.solve(dense(size, sigma), v.double().numpy())
        assert off(laplacian_smoothing(v, sigma), exact) < 5e-7
        assert off(laplacian_smoothing(v.double(), sigma), exact) < 1e-14 * (10 + 4 * sigma)


@pytest.mark.parametrize("sigma", [0.3, 3.0, 300.0])
def test_it_solves_the_dense_system_in_blocks(sigma, dense, monkeypatch):
    monkeypatch.setattr(smoothing, "_CPU_BLOCK", 100)
    v = noise(1009)
    exact = np.linalg.solve(dense(1009, sigma), v.double().numpy())

    assert off(laplacian_smoothing(v, sigma), exact) < 5e-7


@pytest.mark.parametrize("size", [2**18 - 1, 2**18 + 1, 600_011])
def test_long_vectors_are_solved_too(size):
    """By substitution: (1 + 2σ) u_i - σ u_(i-1) - σ u_(i+1) is v_i."""
    v = noise(size)
    for sigma in (1.0, 40.0):
        u = laplacian_smoothing(v, sigma).double()
        back = (1 + 2 * sigma) * u - sigma * (u.roll(1) + u.roll(-1))
        assert off(back, v.double().numpy()) < 5e-7 * (1 + sigma)
        exact = laplacian_smoothing(v.double(), sigma)
        assert off(u, exact.numpy()) < 5e-7


@pytest.mark.parametrize("sigma", [1.0, 30.0])
def test_rounding_stays_small_where_the_result_is_much_smaller_than_the_input(sigma, dense):
    matrix = dense(256, sigma)
    alternating = torch.tensor([1.0, -1.0] * 128) * noise(256).abs()
    twice_sharpened = torch.tensor(matrix @ matrix @ noise(256).double().numpy()).float()
    steep_steps = noise(256).sign() * 1000 + noise(256)
    for v in (alternating, twice_sharpened, steep_steps):
        exact = np.linalg.solve(matrix, v.double().numpy())
        assert off(laplacian_smoothing(v, sigma), exact) < 5e-7


@pytest.mark.parametrize("sigma", [1e-6, 1.0, 1e3, 1e12, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_vector_stays_exactly_and_the_mean_of_any(sigma, dtype):
    assert torch.equal(laplacian_smoothing(torch.full((300,), 0.1, dtype=dtype), sigma),
                       torch.full((300,), 0.1, dtype=dtype))  # fmt: skip
    v = noise(301, dtype=dtype)
    smooth = laplacian_smoothing(v, sigma)
    torch.testing.assert_close(smooth.double().mean(), v.double().mean(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("sigma", [1.0, 2.0, 3.0, 4.0, 5.0])
def test_gamma_and_the_noise_energy_have_the_papers_values(sigma, dense):
    """Tables 3 and 4 of the paper: γ = tr A⁻¹ / d, β = tr A⁻² / d, to three digits."""
    inverse = laplacian_smoothing(torch.eye(300, dtype=torch.float64), sigma)

    gamma, beta = float(inverse.trace() / 300), float((inverse @ inverse).trace() / 300)

    table = {1: (0.447, 0.268), 2: (0.333, 0.185), 3: (0.277, 0.149), 4: (0.243, 0.128)}
    assert (gamma, beta) == pytest.approx(table.get(int(sigma), (0.218, 0.114)), abs=6e-4)
    omega = (2 * sigma + 1 - math.sqrt(4 * sigma + 1)) / (2 * sigma)
    closed = (1 + omega**300) / ((1 - omega**300) * math.sqrt(4 * sigma + 1))
    assert gamma == pytest.approx(closed, rel=1e-12)
    torch.testing.assert_close(inverse, torch.tensor(np.linalg.inv(dense(300, sigma))))


def test_sigma_0_and_one_entry_are_the_identity_in_memory_of_their_own():
    for v, sigma in ((noise(7), 0.0), (noise(1), 5.0), (noise(0), 1.0)):
        u = laplacian_smoothing(v, sigma)
        assert torch.equal(u, v)
        assert v.numel() == 0 or u.data_ptr() != v.data_ptr()


@pytest.mark.parametrize("sigma", [1.0, 50.0, 1e5])
def test_rows_are_smoothed_each_by_itself(sigma):
    rows = noise(3, 2, 90)
    smooth = laplacian_smoothing(rows, sigma)
    assert smooth.shape == rows.shape
    for i in range(3):
        for j in range(2):
            alone = laplacian_smoothing(rows[i, j], sigma)
            torch.testing.assert_close(smooth[i, j], alone, rtol=1e-6, atol=1e-7)


def test_its_argument_stays_as_it_is_whatever_its_strides():
    wide = noise(2, 500)
    for v in (wide[0], wide.T[:, 1], wide[0, ::2], noise(500).requires_grad_()):
        before = v.detach().clone()
        u = laplacian_smoothing(v, 1.0)
        assert torch.equal(v, before)
        assert u.is_contiguous()
        assert not u.requires_grad
        assert torch.equal(u, laplacian_smoothing(before, 1.0))


@pytest.mark.parametrize("size", [3, 1000, 40_000_000])
@pytest.mark.parametrize("sigma", [1.0, 1e4])
def test_nothing_leaves_the_device(size, sigma):
    """The device "meta" has no values: reading one, or copying them to the CPU, would raise."""
    u = laplacian_smoothing(torch.empty(size, device="meta", dtype=torch.bfloat16), sigma)
    assert (u.device.type, u.dtype, u.shape) == ("meta", torch.bfloat16, (size,))


@pytest.mark.parametrize("sigma", [-1.0, -1e-9, math.nan, math.inf])
def test_a_sigma_that_is_negative_or_not_finite_is_refused(sigma):
    with pytest.raises(ValueError, match=rf"laplacian_smoothing\(sigma={sigma}\) must be finite"):
        laplacian_smoothing(noise(5), sigma)
