"""Smaller physical batches: q stays exactly, chunks stay below their bound."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_dp.sampling import Poisson
from lightning_dp.sampling.loader import ChunkSampler
from lightning_dp.sampling.schemes import factorisations, largest_chunk


@pytest.mark.parametrize("logical", [1, 7, 12, 256, 1000])
def test_factorisations_are_all_products(logical):
    found = factorisations(logical)
    pairs = [
        (b, a) for b in range(1, logical + 1) for a in range(1, logical + 1) if b * a == logical
    ]
    assert sorted(found) == sorted(pairs)
    assert found[0] == (logical, 1)


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
        for b, a in factorisations(120)
    ]
    assert {plan.sample_rate for plan in plans} == {360 / num_records}
    assert len({plan.steps_per_epoch for plan in plans}) == 1


@pytest.mark.parametrize(("accumulate", "world_size"), [(1, 1), (4, 1), (8, 2)])
def test_chunks_are_larger_than_the_bound_as_often_as_it_says(accumulate, world_size):
    num_records, logical, chance = 2000, 64, 0.01
    bound = largest_chunk(logical, accumulate, world_size, num_records, chance=chance)
    plan = Poisson().plan(
        num_records=num_records,
        batch_size=logical // accumulate,
        accumulate=accumulate,
        world_size=world_size,
        loader_length=4000 * accumulate,
    )
    sampler = ChunkSampler(plan, Poisson(), rank=0, world_size=world_size, limit=10**9, seed=3)
    sizes = np.array([len(chunk) for chunk in sampler]).reshape(-1, accumulate).max(axis=1)
    assert np.mean(sizes > bound) <= 1.6 * chance
    assert np.mean(sizes > 0.7 * bound) > 5 * chance


def test_restarts_with_larger_batches_have_larger_chunks():
    usual = largest_chunk(64, 1, 1, 10_000)
    assert 4 * usual > largest_chunk(64, 1, 1, 10_000, relative_rate=4.0) > 2 * usual
    assert largest_chunk(64, 1, 1, 100, relative_rate=4.0) == 100


@pytest.mark.parametrize("size", [0, -3, 2.5, math.nan, True])
def test_an_illegal_logical_batch_is_refused(size):
    with pytest.raises(ValueError, match="logical_batch_size="):
        factorisations(size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chance": 0.0}, "chance="),
        ({"chance": math.nan}, "chance="),
        ({"relative_rate": math.nan}, "relative_rate="),
        ({"accumulate": 0}, "accumulate=0"),
        ({"world_size": 0}, "world_size=0"),
        ({"num_records": 0}, "0 records"),
        ({"logical_batch_size": math.nan}, "batch_size=nan"),
    ],
)
def test_illegal_arguments_are_refused(change, message):
    usual = {"logical_batch_size": 64, "accumulate": 1, "world_size": 1, "num_records": 1000}
    with pytest.raises(ValueError, match=message):
        largest_chunk(**{**usual, **change})
