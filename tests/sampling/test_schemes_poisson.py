"""Poisson batches: who is in, with which probability, and at which cost."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import scipy.stats

from lightning_dp._noise import random_generator
from lightning_dp.accounting import PoissonGaussian
from lightning_dp.sampling import BatchPlan, Poisson


def poisson_draws(records: int, rate: float, draws: int, seed: int = 0) -> np.ndarray:
    """Row t says who was in batch t."""
    rng, is_in = random_generator(seed), np.zeros((draws, records), dtype=bool)
    for row in is_in:
        row[Poisson().draw(records, rate, rng)] = True
    return is_in


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_every_record_is_in_a_batch_with_the_sample_rate(rate, inclusion_p_value):
    assert inclusion_p_value(poisson_draws(60, rate, 4000), rate) > 0.01


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_another_inclusion_rate_would_be_noticed(factor, inclusion_p_value):
    assert inclusion_p_value(poisson_draws(60, 0.1, 4000), 0.1 * factor) < 1e-6


def test_pairs_of_records_are_in_a_batch_independently():
    """Fixed-size batches would fail here: being in makes it less likely that others are."""
    records, rate, draws = 12, 0.3, 20_000
    is_in = poisson_draws(records, rate, draws).astype(float)
    together = (is_in.T @ is_in)[np.triu_indices(records, 1)]
    expected = draws * rate**2
    z = (together - expected) / math.sqrt(expected * (1 - rate**2))

    assert abs(z).max() < scipy.stats.norm.isf(0.005 / len(z))
    # Chi-square of the centred products, whose variance is exactly (q (1 - q))^2 per draw.
    products = ((is_in - rate).T @ (is_in - rate))[np.triu_indices(records, 1)]
    statistic = (products**2 / (draws * (rate * (1 - rate)) ** 2)).sum()
    assert 0.005 < scipy.stats.chi2(len(products)).sf(statistic) < 0.995


def test_batches_are_independent_of_each_other():
    is_in = poisson_draws(50, 0.3, 4000) - 0.3
    products = is_in[:-1] * is_in[1:]
    z = products.sum() / (0.3 * 0.7 * math.sqrt(products.size))
    assert abs(z) < 3


def test_batch_sizes_are_binomial():
    records, rate, draws = 40, 0.2, 5000
    sizes = poisson_draws(records, rate, draws).sum(1)
    binomial = scipy.stats.binom(records, rate)
    edges = list(range(4, 13))
    observed = [np.sum(sizes <= 4), *(np.sum(sizes == k) for k in edges[1:]), np.sum(sizes > 12)]
    expected = [binomial.cdf(4), *(binomial.pmf(k) for k in edges[1:]), binomial.sf(12)]

    p_value = scipy.stats.chisquare(observed, draws * np.array(expected)).pvalue

    assert p_value > 0.01


@pytest.mark.parametrize(
    ("changes", "rate", "chunks", "steps"),
    [
        ({}, 0.05, 1, 20),
        ({"accumulate": 4}, 0.2, 4, 5),
        ({"accumulate": 3}, 0.15, 3, 7),  # the last step of an epoch is a whole one
        ({"world_size": 2, "loader_length": 10}, 0.1, 1, 10),
        ({"world_size": 2, "accumulate": 2, "loader_length": 10}, 0.2, 2, 5),
        ({"batch_size": 300, "loader_length": 4}, 0.3, 1, 4),
        ({"batch_size": 300, "loader_length": 3}, 0.3, 1, 3),  # drop_last=True
        ({"batch_size": 5000, "loader_length": 1}, 1.0, 1, 1),
        ({"batch_size": 600, "accumulate": 2, "loader_length": 2}, 1.0, 2, 1),
    ],
)
def test_poisson_plan(changes, rate, chunks, steps, plan_of):
    plan = plan_of(Poisson(), **changes)

    assert plan == BatchPlan(1000, rate, chunks, steps)
    assert plan.expected_batch_size == pytest.approx(1000 * rate, rel=1e-12)


def test_poisson_names_a_subsampled_event():
    assert Poisson().event(1.1, 0.25) == PoissonGaussian(1.1, 0.25)


def test_drawing_256_of_10_million_takes_memory_for_256_only():
    rng = random_generator(0)
    Poisson().draw(10_000_000, 256 / 10_000_000, rng)
    tracemalloc.start()
    try:
        for _ in range(20):
            Poisson().draw(10_000_000, 256 / 10_000_000, rng)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 200_000  # a mask over the records would take 10 MB
