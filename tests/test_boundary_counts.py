"""Clipped records are counted beside the gradient as one Gaussian: its exact shift, and its cost."""

from __future__ import annotations

import itertools
import math

import pytest
import scipy.stats
import torch

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.boundary import BoundedSum, Query, Term, add_noise, bounded_sum
from lightning_dp.gradients.materialised import MaterialisedGradients

C, KAPPA, Z, SIZE = 0.7, 0.1, 1.3, 6
CLIPPED = 50 * torch.eye(SIZE)[0]
SHORT = 0.01 * torch.eye(SIZE)[1]
AT_THE_NORM = C * torch.eye(SIZE)[2]
OTHERS = [SHORT, CLIPPED, AT_THE_NORM, -CLIPPED]


def total_of(records, kappa=KAPPA):
    gradients = torch.stack(records) if records else torch.zeros(0, SIZE)
    return bounded_sum(MaterialisedGradients([torch.zeros(SIZE)], [gradients], 1.0), C, kappa)


def shift(before, after):
    """Distance of the two releases' means, in standard deviations of their noise: 1/z at most."""
    a, b = total_of(before), total_of(after)
    assert a.clip_norm == b.clip_norm
    moved = float((a.value.double() - b.value.double()).norm())
    return moved / add_noise(a, Z, NoiseSource(0), World()).noise_std


def exact_delta(mu, epsilon):
    normal = scipy.stats.norm.cdf
    return normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)


def test_a_record_moves_gradient_and_count_together_by_exactly_the_gaussian_that_is_charged():
    # The worst record is clipped, or has just the length C: both parts are as long as they can be.
    for worst in (CLIPPED, AT_THE_NORM):
        mu = shift(OTHERS, [*OTHERS, worst])
        assert mu == pytest.approx(1 / Z, rel=1e-5)
        epsilon = PLDAccountant().epsilon([(PoissonGaussian(Z, 1.0), 1)], 1e-3)
        assert exact_delta(mu, epsilon) == pytest.approx(1e-3, rel=1e-2)


def test_no_record_moves_them_further():
    generator = torch.Generator().manual_seed(0)
    records = [
        torch.randn(SIZE, generator=generator) * 10.0**power for power in (-9, -2, -1, 0, 1, 20)
    ]
    for record in [*records, torch.zeros(SIZE)]:
        assert shift(OTHERS, [*OTHERS, record]) <= (1 + 1e-6) / Z
    for a, b in itertools.product([*records, CLIPPED, SHORT, AT_THE_NORM, -CLIPPED], repeat=2):
        assert shift([*OTHERS, a], [*OTHERS, b]) <= 2 * (1 + 1e-6) / Z


def test_noise_for_the_gradient_alone_would_be_too_little():
    difference = total_of([CLIPPED]).value.norm() / (Z * C)
    assert difference > 1.004 / Z  # the tests above would fail


def test_a_record_that_is_not_finite_counts_for_nothing():
    for value in (math.nan, math.inf, 1e36):
        broken = torch.full((SIZE,), value)
        torch.testing.assert_close(total_of([*OTHERS, broken]).value, total_of(OTHERS).value)


@pytest.mark.parametrize("clip_norm", [1e-12, 0.7, 1e9])
def test_the_count_is_of_clipped_records_less_the_others(clip_norm):
    lengths = [0.5, 0.999, 1.001, 3.0, 4.0]
    gradients = torch.eye(SIZE)[0] * clip_norm * torch.tensor(lengths).view(-1, 1)
    held = MaterialisedGradients([torch.zeros(SIZE)], [gradients], 1.0)
    total = bounded_sum(held, clip_norm, KAPPA)
    assert total.value.shape == (SIZE + 1,)
    assert float(total.value[-1]) == pytest.approx(KAPPA * clip_norm * (3 - 2), rel=1e-5)
    query = Query((Term(),), clip_norm, 0.0, count_weight=KAPPA)
    gradient, count = add_noise(total, 0.0, NoiseSource(0), World()).without_count(query)
    assert float(count.value) == pytest.approx(1.0, rel=1e-5)
    assert gradient.value.shape == (SIZE,)
    assert float(gradient.value[0]) == pytest.approx(clip_norm * (0.5 + 0.999 + 3), rel=1e-5)


def test_the_noise_of_both_is_that_of_the_longer_vector():
    query = Query((Term(),), C, Z, count_weight=KAPPA)
    assert query.sensitivity == pytest.approx(C * math.sqrt(1 + KAPPA**2), rel=1e-12)
    size = 20_000
    empty = BoundedSum.empty(query, [torch.zeros(size)])
    assert empty.value.shape == (size + 1,) == (query.size(size),)

    gradient, count = add_noise(empty, Z, NoiseSource(0), World()).without_count(query)

    std = Z * C * math.sqrt(1 + KAPPA**2)
    assert gradient.noise_std == pytest.approx(std, rel=1e-12)
    assert float(gradient.value.std()) == pytest.approx(std, rel=0.03)
    assert count.noise_std == pytest.approx(std / (KAPPA * C), rel=1e-12)


def test_without_a_count_nothing_is_longer():
    query = Query((Term(),), C, Z)
    assert query.sensitivity == C and query.size(SIZE) == SIZE
    assert total_of(OTHERS, kappa=0.0).value.shape == (SIZE,)
    release = add_noise(total_of(OTHERS, kappa=0.0), Z, NoiseSource(0), World())
    assert release.without_count(query) == (release, None)


@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_a_weight_that_means_nothing_is_refused(weight):
    with pytest.raises(ValueError, match=rf"Query\(count_weight={weight}\)"):
        Query((Term(),), C, Z, count_weight=weight)


def test_a_count_beside_coordinates_or_unclipped_gradients_is_refused():
    for query in ((C, Z, torch.tensor([0])), (math.inf, 0.0, None)):
        with pytest.raises(ValueError, match="counts clipped records next to a whole gradient"):
            Query((Term(),), *query, count_weight=KAPPA)
