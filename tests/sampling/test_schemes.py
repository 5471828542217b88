"""One contract for all sampling schemes, and the plan of full batches."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

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
