"""One contract for all sampling schemes, and the plan of full batches."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats

from lightning_dp._noise import random_generator
from lightning_dp.accounting import Gaussian
from lightning_dp.sampling import AbstractSampling, BatchPlan, FullBatch, Poisson

SAMPLINGS: dict[str, Callable[[], AbstractSampling]] = {"poisson": Poisson, "full": FullBatch}


@pytest.fixture(params=SAMPLINGS)
def sampling(request: pytest.FixtureRequest) -> AbstractSampling:
    return SAMPLINGS[request.param]()


class TestContract:
    """The promises of every sampling scheme."""

    @pytest.mark.parametrize("shard_size", [0, 1, 2, 313])
    @pytest.mark.parametrize("rate", [0.001, 0.3, 1.0])
    def test_a_batch_holds_each_record_at_most_once_and_only_records(
        self, sampling, shard_size, rate
    ):
        rng = random_generator(0)
        for _ in range(20):
            drawn = sampling.draw(shard_size, rate, rng)
            assert drawn.dtype == np.int64
            assert len(set(drawn.tolist())) == len(drawn)
            assert all(0 <= position < shard_size for position in drawn.tolist())

    def test_the_same_generator_draws_the_same_batch(self, sampling):
        draws = [sampling.draw(100, 0.2, random_generator(4)).tolist() for _ in range(2)]
        assert draws[0] == draws[1]

    def test_at_rate_1_everybody_is_in_and_the_event_is_not_amplified(self, sampling):
        assert sorted(sampling.draw(17, 1.0, random_generator(0)).tolist()) == list(range(17))
        assert sampling.event(1.3, 1.0) == Gaussian(1.3)

    def test_the_expected_batch_size_is_what_draws_have_on_average(self, sampling, plan_of):
        plan, rng = plan_of(sampling), random_generator(0)
        sizes = [len(sampling.draw(1000, plan.sample_rate, rng)) for _ in range(400)]
        error = 4 * math.sqrt(plan.expected_batch_size * (1 - plan.sample_rate) / 400)
        assert abs(np.mean(sizes) - plan.expected_batch_size) <= error

    def test_the_event_has_the_rate_of_the_draw(self, sampling, plan_of):
        plan = plan_of(sampling)
        assert sampling.event(1.3, plan.sample_rate).pair == (1.3, plan.sample_rate)

    def test_an_epoch_has_as_many_chunks_as_it_has_steps_times_chunks(self, sampling, plan_of):
        plan = plan_of(sampling)
        assert plan.chunks_per_epoch == plan.steps_per_epoch * plan.chunks_per_step

    @pytest.mark.parametrize("size", [0, -1])
    def test_an_empty_training_set_or_batch_is_refused(self, sampling, size, plan_of):
        with pytest.raises(ValueError, match=f"training set has {size} records"):
            plan_of(sampling, num_records=size)
        with pytest.raises(ValueError, match=f"batch_size={size} must be at least 1"):
            plan_of(sampling, batch_size=size)

    def test_the_repr_is_the_call_that_made_it(self, sampling):
        assert eval(repr(sampling)) == sampling


# -- full batches: one step per epoch ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, 20),
        ({"batch_size": 300}, 4),
        ({"batch_size": 5000}, 1),
        ({"batch_size": 300, "accumulate": 4}, 4),
        ({"batch_size": 300, "world_size": 2}, 2),
        ({"batch_size": 100, "world_size": 3}, 4),  # shards of 334, 333, 333
    ],
)
def test_full_batch_plan_has_one_step_per_epoch_in_as_many_chunks_as_needed(
    changes, chunks, plan_of
):
    assert plan_of(FullBatch(), **changes) == BatchPlan(1000, 1.0, chunks, 1)


def test_full_batch_contradicting_the_trainer_is_refused(plan_of):
    with pytest.raises(
        ValueError, match=r"accumulate_grad_batches=3\) contradicts .* make 4 chunks"
    ):
        plan_of(FullBatch(), batch_size=300, accumulate=3)


# -- poisson batches: who is in, with which probability, and at which cost -----------------------


def poisson_draws(records: int, rate: float, draws: int, seed: int = 0) -> np.ndarray:
    """Row t says who was in batch t."""
    rng, is_in = random_generator(seed), np.zeros((draws, records), dtype=bool)
    for row in is_in:
        row[Poisson().draw(records, rate, rng)] = True
    return is_in


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_every_record_is_in_a_batch_with_the_sample_rate(rate, inclusion_p_value):
    assert inclusion_p_value(poisson_draws(60, rate, 4000), rate) > 0.01


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


# -- smaller physical batches: q stays exactly --------------------------------------------------


@pytest.mark.parametrize("num_records", [1000, 1437, 60_001])
def test_every_factorisation_has_the_same_plan_but_for_its_chunks(num_records):
    plans = [
        Poisson().plan(
            num_records=num_records,
            batch_size=b,
            accumulate=a,
            world_size=3,
            loader_length=math.ceil(math.ceil(num_records / 3) / b),
        )
        for b, a in ((each, 120 // each) for each in (120, 60, 40, 8, 1))
    ]
    assert {plan.sample_rate for plan in plans} == {360 / num_records}
    assert len({plan.steps_per_epoch for plan in plans}) == 1
