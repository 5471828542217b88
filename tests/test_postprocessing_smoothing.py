"""LaplacianSmoothing as a post-processor: of the whole flat vector, or of each parameter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_dp.postprocessing import LaplacianSmoothing

PARAMS = [torch.zeros(4, 3), torch.zeros(1), torch.zeros(2), torch.zeros(5)]
SIZES = [12, 1, 2, 5]


def estimate(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(20, generator=torch.Generator().manual_seed(0)).to(dtype)


def smoothed(processor: LaplacianSmoothing, v: torch.Tensor) -> torch.Tensor:
    result, _ = processor.apply(processor.init(PARAMS), v)
    return result


@pytest.mark.parametrize("sigma", [0.2, 1.0, 3.0, 50.0])
def test_the_whole_vector_is_one_circle(sigma, dense):
    exact = np.linalg.solve(dense(20, sigma), estimate().numpy())
    found = smoothed(LaplacianSmoothing(sigma), estimate())
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sigma", [0.2, 1.0, 3.0, 50.0])
def test_per_parameter_each_one_is_a_circle(sigma, dense):
    parts = np.split(estimate().numpy(), np.cumsum(SIZES)[:-1])
    exact = [np.linalg.solve(dense(len(part), sigma), part) for part in parts]
    found = smoothed(LaplacianSmoothing(sigma, per_parameter=True), estimate())
    np.testing.assert_allclose(found.numpy(), np.concatenate(exact), rtol=1e-5, atol=1e-6)
    assert not np.allclose(found, smoothed(LaplacianSmoothing(sigma), estimate()), atol=0.05)


@pytest.mark.parametrize("per_parameter", [False, True])
def test_sigma_0_is_the_identity(per_parameter):
    assert torch.equal(smoothed(LaplacianSmoothing(0.0, per_parameter), estimate()), estimate())


@pytest.mark.parametrize(("sigma", "energy"), [(1.0, 0.268), (2.0, 0.185), (3.0, 0.149)])
def test_noise_loses_the_energy_that_the_docstring_says(sigma, energy):
    params = [torch.zeros(200_000)]
    v = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    processor = LaplacianSmoothing(sigma)
    u, _ = processor.apply(processor.init(params), v)
    assert float(u.square().sum() / v.square().sum()) == pytest.approx(energy, rel=0.01)
    assert (1 + 2 * sigma) / (1 + 4 * sigma) ** 1.5 == pytest.approx(energy, abs=5e-4)
    gamma = (v @ u) / (v @ v)
    assert float(gamma) == pytest.approx(1 / math.sqrt(1 + 4 * sigma), rel=0.01)


@pytest.mark.parametrize("sigma", [-0.5, math.nan, math.inf])
def test_a_sigma_that_is_negative_or_not_finite_is_refused_by_name(sigma):
    with pytest.raises(ValueError, match=rf"LaplacianSmoothing\(sigma={sigma}\) must be finite"):
        LaplacianSmoothing(sigma)
