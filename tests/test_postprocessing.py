"""Post-processors: one contract for all, and the closed form of each."""

from __future__ import annotations

import copy
import dataclasses
import io
import math

import pytest
import torch
from torch import Tensor

from lightning_dp import postprocessing
from lightning_dp.postprocessing import AbstractPostProcessor, LaplacianSmoothing, Momentum

# One line for each post-processor.
CASES: dict[str, AbstractPostProcessor] = {
    "momentum": Momentum(0.9),
    "momentum_identity": Momentum(0.0),
    "laplacian_smoothing": LaplacianSmoothing(1.0),
    "laplacian_smoothing_per_parameter": LaplacianSmoothing(1.0, per_parameter=True),
}
PARAMS = [torch.zeros(2, 2), torch.zeros(3)]
SIZE = 7  # entries of them all


@pytest.fixture(params=CASES)
def processor(request: pytest.FixtureRequest) -> AbstractPostProcessor:
    return CASES[request.param]


def releases(steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SIZE, generator=generator).to(dtype) for _ in range(steps)]


def apply_all(processor: AbstractPostProcessor, estimates: list[Tensor]) -> list[Tensor]:
    state, results = processor.init(PARAMS), []
    for estimate in estimates:
        result, state = processor.apply(state, estimate)
        results.append(result)
    return results


class TestContract:
    """What every post-processor promises."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_it_keeps_length_and_type(self, processor, dtype):
        for result in apply_all(processor, releases(3, dtype)):
            assert result.shape == (SIZE,)
            assert result.dtype == dtype

    def test_it_is_a_pure_function_of_its_arguments(self, processor):
        first, second = (torch.stack(apply_all(processor, releases(4))) for _ in range(2))
        assert torch.equal(first, second)

    def test_it_changes_none_of_its_arguments(self, processor):
        state = processor.init(PARAMS)
        for estimate in releases(3):
            before = copy.deepcopy((state, estimate))
            _, following = processor.apply(state, estimate)
            assert repr((state, estimate)) == repr(before)
            state = following

    def test_it_is_linear_in_the_releases(self, processor):
        once = torch.stack(apply_all(processor, releases(4)))
        doubled = torch.stack(apply_all(processor, [2 * release for release in releases(4)]))
        torch.testing.assert_close(doubled, 2 * once)

    @pytest.mark.parametrize("saved_after", [0, 2])
    def test_it_resumes_from_a_checkpoint(self, processor, saved_after):
        expected = apply_all(processor, releases(5))
        state = processor.init(PARAMS)
        for number, estimate in enumerate(releases(5)):
            if number == saved_after:
                file = io.BytesIO()
                torch.save(state, file)
                file.seek(0)
                state = torch.load(file, weights_only=True)
            result, state = processor.apply(state, estimate)
            assert torch.equal(result, expected[number])

    def test_it_is_frozen_configuration(self, processor):
        for name in [f.name for f in dataclasses.fields(processor)]:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(processor, name, 0)

    def test_its_repr_is_the_call_that_made_it(self, processor):
        assert eval(repr(processor), vars(postprocessing)) == processor


def test_every_postprocessor_is_tested():
    public = {getattr(postprocessing, name) for name in postprocessing.__all__}
    assert public - {AbstractPostProcessor} == {type(processor) for processor in CASES.values()}


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.9, 0.999])
def test_momentum_is_the_weighted_average_of_all_releases(beta):
    """m_t = sum_s beta^(t-s) g_s / sum_s beta^(t-s), all releases at hand."""
    given = releases(12, torch.float64)

    results = apply_all(Momentum(beta), given)

    for t, result in enumerate(results):
        weights = torch.tensor([beta ** (t - s) for s in range(t + 1)], dtype=torch.float64)
        average = (weights[:, None] * torch.stack(given[: t + 1])).sum(0) / weights.sum()
        torch.testing.assert_close(result, average, rtol=1e-9, atol=1e-12)


def test_momentum_of_equal_releases_is_the_release():
    for result in apply_all(Momentum(0.9), [torch.full((SIZE,), 0.7)] * 20):
        torch.testing.assert_close(result, torch.full((SIZE,), 0.7))


def test_momentum_with_beta_0_is_the_identity():
    for result, release in zip(apply_all(Momentum(0.0), releases(5)), releases(5), strict=True):
        assert torch.equal(result, release)


@pytest.mark.parametrize("beta", [-0.1, 1.0, 2.0, math.nan])
def test_a_beta_outside_its_range_is_refused(beta):
    with pytest.raises(ValueError, match=rf"Momentum\(beta={beta}\) must be in \[0, 1\)"):
        Momentum(beta)
