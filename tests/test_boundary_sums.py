"""Clipping: what bounds a record's influence, against a slow loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_dp.boundary import BoundedSum, bounded_sum
from lightning_dp.functional import flatten, unflatten
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.materialised import MaterialisedGradients

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


def params_like(gradients: list[Tensor]) -> list[Tensor]:
    return [torch.zeros(gradient.shape[1:], dtype=gradient.dtype) for gradient in gradients]


def clipped_one_by_one(gradients: list[Tensor], clip_norm: float, scale: float = 1.0) -> Tensor:
    """The oracle: each finite record's flat gradient in float64, scaled down to the clip norm."""
    total = torch.zeros(sum(gradient[0].numel() for gradient in gradients), dtype=torch.float64)
    for record in zip(*gradients, strict=True):
        flat = torch.cat([part.double().reshape(-1) for part in record]) * scale
        norm = math.sqrt(sum(value * value for value in flat.tolist()))
        if math.isfinite(norm):
            total += flat * (1.0 if norm <= clip_norm else clip_norm / norm)
    return total


@pytest.mark.parametrize("clip_norm", [0.3, 1.0, 1e4, math.inf])
@pytest.mark.parametrize("scale", [1.0, 4.0, -0.5])
def test_bounded_sum_equals_a_loop_over_records(clip_norm, scale):
    gradients = random_gradients(9)

    total = bounded_sum(MaterialisedGradients(params_like(gradients), gradients, scale), clip_norm)

    expected = clipped_one_by_one(gradients, clip_norm, scale)
    torch.testing.assert_close(total.value.double(), expected, rtol=1e-5, atol=1e-6)
    assert total.clip_norm == clip_norm


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_no_record_contributes_more_than_the_clip_norm(scale):
    gradients, clip_norm = random_gradients(30, spread=20.0), 0.7
    params = params_like(gradients)

    norms = [
        bounded_sum(
            MaterialisedGradients(params, [g[i : i + 1] for g in gradients], scale), clip_norm
        ).value.norm()
        for i in range(30)
    ]

    assert max(norms) <= clip_norm * (1 + 1e-6)
    assert max(norms) == pytest.approx(clip_norm, rel=1e-6)  # and the bound is reached


def test_adding_a_record_moves_the_sum_by_at_most_the_clip_norm():
    gradients, clip_norm = random_gradients(10, spread=10.0), 0.5
    params = params_like(gradients)
    full = bounded_sum(MaterialisedGradients(params, gradients, 1.0), clip_norm).value
    for left_out in range(10):
        kept = [i for i in range(10) if i != left_out]
        fewer = bounded_sum(
            MaterialisedGradients(params, [g[kept] for g in gradients], 1.0), clip_norm
        ).value
        assert (full - fewer).norm() <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e34, -3e38])
@pytest.mark.parametrize("clip_norm", [1.0, math.inf])
def test_a_record_that_is_not_finite_or_overflows_counts_for_nothing(bad, clip_norm):
    gradients = random_gradients(6)
    params = params_like(gradients)
    others = [torch.cat([gradient[:2], gradient[3:]]) for gradient in gradients]
    alone = bounded_sum(MaterialisedGradients(params, others, 1.0), clip_norm).value
    gradients[0][2, 1, 1] = bad

    disturbed = bounded_sum(MaterialisedGradients(params, gradients, 1.0), clip_norm).value
    only = bounded_sum(MaterialisedGradients(params, [g[2:3] for g in gradients], 1.0), clip_norm)

    torch.testing.assert_close(disturbed, alone, rtol=1e-6, atol=1e-7)
    assert torch.equal(only.value, torch.zeros_like(only.value))


@pytest.mark.parametrize("size", [1e15, 1e30])
def test_large_records_that_do_not_overflow_are_clipped_not_dropped(size):
    gradients = [torch.tensor([[3 * size, 4 * size], [0.3, 0.4]])]

    total = bounded_sum(MaterialisedGradients(params_like(gradients), gradients, 1.0), 1.0).value

    torch.testing.assert_close(total, torch.tensor([0.9, 1.2]))


def test_when_every_record_is_bad_the_sum_is_zero():
    gradients = [torch.full((3, 4), math.nan)]
    total = bounded_sum(MaterialisedGradients([torch.zeros(4)], gradients, 1.0), 1.0)
    assert total.value.tolist() == [0.0] * 4


def test_an_unused_parameter_has_a_zero_sum_in_its_place():
    gradients = random_gradients(5)
    params = params_like(gradients)
    unused: list[Tensor | None] = [gradients[0], None, gradients[2]]

    total = bounded_sum(MaterialisedGradients(params, unused, 1.0), 0.5).value

    first, middle, last = unflatten(total, params)
    expected = clipped_one_by_one([gradients[0], gradients[2]], 0.5)
    torch.testing.assert_close(flatten([first, last]).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(middle, torch.zeros(5))


def test_a_model_that_used_no_parameter_has_no_records_and_a_zero_sum():
    gradients = MaterialisedGradients([torch.zeros(3), torch.zeros(2)], [None, None], 1.0)

    assert gradients.count == 0
    assert bounded_sum(gradients, 1.0).value.tolist() == [0.0] * 5


def test_bfloat16_gradients_are_summed_in_float32():
    """256 equal records: a bfloat16 running sum would stop growing at 2^8 units."""
    gradients = [torch.full((1024, 4), 0.25, dtype=torch.bfloat16)]
    params = [torch.zeros(4, dtype=torch.bfloat16)]

    total = bounded_sum(MaterialisedGradients(params, gradients, 1.0), 0.3).value

    assert total.dtype == torch.float32
    # Added up one after the other, as some processors do, 1,024 equal terms round by some 1e-5.
    torch.testing.assert_close(total, torch.full((4,), 1024 * 0.15), rtol=3e-5, atol=0.0)


def test_float64_gradients_are_summed_in_float64():
    gradients = [gradient.double() for gradient in random_gradients(5)]

    total = bounded_sum(MaterialisedGradients(params_like(gradients), gradients, 1.0), 0.5).value

    torch.testing.assert_close(total, clipped_one_by_one(gradients, 0.5), rtol=1e-12, atol=1e-14)


def test_layers_that_see_different_numbers_of_records_are_refused():
    with pytest.raises(UnsupportedModelError, match="more rows than there are records"):
        MaterialisedGradients(
            [torch.zeros(2), torch.zeros(2)], [torch.zeros(4, 2), torch.zeros(8, 2)], 1.0
        )


@pytest.mark.parametrize("count_weight", [0.0, 0.1])
@pytest.mark.parametrize("clip_norm", [1e-6, 0.3, 1.0, 1e5])
def test_chunks_are_added_up_in_one_vector(clip_norm, count_weight):
    """As one sum over all their records, and no record twice."""
    gradients = [5 * clip_norm * gradient for gradient in random_gradients(9)]
    params = params_like(gradients)

    def sum_of(records: slice, onto: BoundedSum | None = None) -> BoundedSum:
        chunk = MaterialisedGradients(params, [each[records] for each in gradients], 1.0)
        return bounded_sum(chunk, clip_norm, count_weight, onto)

    whole, first = sum_of(slice(None)), sum_of(slice(4))
    both = sum_of(slice(4, None), first)

    assert both.value is first.value
    assert both.clip_norm == whole.clip_norm
    torch.testing.assert_close(both.value, whole.value, rtol=1e-5, atol=1e-6 * clip_norm)
    assert first.plus(both).value is both.value  # holds both already: nothing is added again
    torch.testing.assert_close(both.value, whole.value, rtol=1e-5, atol=1e-6 * clip_norm)


def test_a_sum_of_another_bound_is_not_added_to():
    gradients = random_gradients(3)
    chunk = MaterialisedGradients(params_like(gradients), gradients, 1.0)
    before = bounded_sum(chunk, 0.5)
    for clip_norm, count_weight in ((0.4, 0.0), (0.5, 0.1), (math.inf, 0.0)):
        with pytest.raises(ValueError, match="different clip norms"):
            bounded_sum(chunk, clip_norm, count_weight, before)
