"""Sampling: who is in a batch, with which probability, and how a batch is handed out."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.noise import random_generator
from lightning_dp.sampling import AbstractSampling, BatchPlan, FullBatch, Poisson
from lightning_dp.sampling.loader import Chunk, ChunkSampler, PrivateDataLoader

SAMPLINGS: dict[str, Callable[[], AbstractSampling]] = {"poisson": Poisson, "full": FullBatch}


@pytest.fixture(params=SAMPLINGS)
def sampling(request: pytest.FixtureRequest) -> AbstractSampling:
    return SAMPLINGS[request.param]()


def plan_of(sampling: AbstractSampling, **changes: int) -> BatchPlan:
    arguments = {
        "num_records": 1000,
        "batch_size": 50,
        "accumulate": 1,
        "world_size": 1,
        "loader_length": 20,
    }
    return sampling.plan(**{**arguments, **changes})


class TestContract:
    """What every sampling scheme promises."""

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

    def test_the_expected_batch_size_is_what_draws_have_on_average(self, sampling):
        plan, rng = plan_of(sampling), random_generator(0)
        sizes = [len(sampling.draw(1000, plan.sample_rate, rng)) for _ in range(400)]
        error = 4 * math.sqrt(plan.expected_batch_size * (1 - plan.sample_rate) / 400)
        assert abs(np.mean(sizes) - plan.expected_batch_size) <= error

    def test_the_event_has_the_rate_of_the_draw(self, sampling):
        plan = plan_of(sampling)
        assert sampling.event(1.3, plan.sample_rate).pair == (1.3, plan.sample_rate)

    def test_an_epoch_has_as_many_chunks_as_it_has_steps_times_chunks(self, sampling):
        plan = plan_of(sampling)
        assert plan.chunks_per_epoch == plan.steps_per_epoch * plan.chunks_per_step

    @pytest.mark.parametrize("size", [0, -1])
    def test_an_empty_training_set_or_batch_is_refused(self, sampling, size):
        with pytest.raises(ValueError, match=f"training set has {size} records"):
            plan_of(sampling, num_records=size)
        with pytest.raises(ValueError, match=f"batch_size={size} must be at least 1"):
            plan_of(sampling, batch_size=size)

    def test_the_repr_is_the_call_that_made_it(self, sampling):
        assert eval(repr(sampling)) == sampling


# -- Poisson -------------------------------------------------------------------------------------


def poisson_draws(records: int, rate: float, draws: int, seed: int = 0) -> np.ndarray:
    """Row t says who was in batch t."""
    rng, is_in = random_generator(seed), np.zeros((draws, records), dtype=bool)
    for row in is_in:
        row[Poisson().draw(records, rate, rng)] = True
    return is_in


def inclusion_p_value(is_in: np.ndarray, rate: float) -> float:
    draws, records = is_in.shape
    count = is_in.sum(0)
    statistic = ((count - draws * rate) ** 2 / (draws * rate * (1 - rate))).sum()
    return float(scipy.stats.chi2(records).sf(statistic))


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_every_record_is_in_a_batch_with_the_sample_rate(rate):
    assert inclusion_p_value(poisson_draws(60, rate, 4000), rate) > 0.01


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_another_inclusion_rate_would_be_noticed(factor):
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
def test_poisson_plan(changes, rate, chunks, steps):
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


# -- full batches --------------------------------------------------------------------------------


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
def test_full_batch_plan_has_one_step_per_epoch_in_as_many_chunks_as_needed(changes, chunks):
    assert plan_of(FullBatch(), **changes) == BatchPlan(1000, 1.0, chunks, 1)


def test_full_batch_contradicting_the_trainer_is_refused():
    with pytest.raises(
        ValueError, match=r"accumulate_grad_batches=3\) contradicts .* make 4 chunks"
    ):
        plan_of(FullBatch(), batch_size=300, accumulate=3)


# -- chunks --------------------------------------------------------------------------------------


def chunk_sampler(
    plan: BatchPlan,
    sampling: AbstractSampling | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    limit: int | None = None,
    seed: int | None = 0,
) -> ChunkSampler:
    return ChunkSampler(
        plan,
        Poisson() if sampling is None else sampling,
        rank=rank,
        world_size=world_size,
        limit=plan.chunks_per_epoch if limit is None else limit,
        seed=seed,
    )


def one_pass(sampler: ChunkSampler) -> list[tuple[Chunk, list[int]]]:
    """Every chunk of an epoch with the records that the loader would fetch for it."""
    found = []
    for indices in sampler:
        found.append((sampler.pending.popleft(), indices))
    return found


def logical_batches(chunks: list[tuple[Chunk, list[int]]]) -> list[list[tuple[Chunk, list[int]]]]:
    starts = [i for i, (chunk, _) in enumerate(chunks) if chunk.first] + [len(chunks)]
    assert starts[0] == 0
    return [chunks[a:b] for a, b in pairwise(starts)]


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.7])
def test_each_logical_batch_comes_in_the_planned_number_of_chunks_and_each_record_once(rate):
    plan = BatchPlan(num_records=200, sample_rate=rate, chunks_per_step=4, steps_per_epoch=30)

    chunks = one_pass(chunk_sampler(plan))

    assert [chunk.index for chunk, _ in chunks] == list(range(120))
    batches = logical_batches(chunks)
    assert len(batches) == 30
    for batch in batches:
        assert len(batch) == 4
        records = [i for chunk, indices in batch for i in indices[: chunk.size]]
        assert len(set(records)) == len(records)
        sizes = [chunk.size for chunk, _ in batch]
        assert max(sizes) - min(sizes) <= 1  # no chunk is larger than it must be


def test_an_empty_chunk_holds_one_stand_in_that_counts_for_nothing():
    plan = BatchPlan(num_records=200, sample_rate=0.004, chunks_per_step=3, steps_per_epoch=200)

    chunks = one_pass(chunk_sampler(plan))

    assert any(chunk.size == 0 for chunk, _ in chunks)
    assert any(chunk.size > 0 for chunk, _ in chunks)
    for chunk, indices in chunks:
        assert len(indices) == max(1, chunk.size)
        assert all(0 <= i < 200 for i in indices)


def test_inclusion_frequencies_over_an_epoch_are_the_sample_rate():
    plan = BatchPlan(num_records=60, sample_rate=0.1, chunks_per_step=2, steps_per_epoch=3000)

    is_in = np.zeros((3000, 60), dtype=bool)
    for row, batch in zip(is_in, logical_batches(one_pass(chunk_sampler(plan))), strict=True):
        row[[i for chunk, indices in batch for i in indices[: chunk.size]]] = True

    assert inclusion_p_value(is_in, 0.1) > 0.01
    assert inclusion_p_value(is_in, 0.2) < 1e-6


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("num_records", [21, 100])
def test_the_shards_of_the_ranks_are_a_partition_of_the_records(world_size, num_records):
    plan = BatchPlan(num_records, 1.0, chunks_per_step=2, steps_per_epoch=1)

    seen = Counter(
        i
        for rank in range(world_size)
        for chunk, indices in one_pass(chunk_sampler(plan, rank=rank, world_size=world_size))
        for i in indices[: chunk.size]
    )

    assert seen == Counter(range(num_records))


def test_ranks_draw_independently_with_the_same_seed():
    plan = BatchPlan(400, 0.5, chunks_per_step=1, steps_per_epoch=1)
    positions = [
        {i // 2 for i in one_pass(chunk_sampler(plan, rank=rank, world_size=2))[0][1]}
        for rank in range(2)
    ]
    assert positions[0] != positions[1]


@pytest.mark.parametrize("limit", [1, 4, 5, 6, 7, 8, 12])
def test_a_batch_cut_short_by_a_limit_is_whole_in_the_chunks_that_are_left(limit):
    plan = BatchPlan(50, 1.0, chunks_per_step=4, steps_per_epoch=3)

    used = one_pass(chunk_sampler(plan, FullBatch(), limit=limit))[:limit]

    batches = logical_batches(used)
    assert len(batches) == math.ceil(limit / 4)
    for batch in batches:
        assert sorted(i for _, indices in batch for i in indices) == list(range(50))


@pytest.mark.parametrize("resume_at", [1, 3, 4, 7, 11])
def test_a_batch_resumed_in_its_middle_is_a_new_whole_batch(resume_at):
    plan = BatchPlan(50, 1.0, chunks_per_step=4, steps_per_epoch=3)
    sampler = chunk_sampler(plan, FullBatch())
    sampler.resume_at = resume_at

    chunks = one_pass(sampler)

    assert [chunk.index for chunk, _ in chunks] == list(range(resume_at, 12))
    batches = logical_batches(chunks)
    assert [len(batch) for batch in batches][1:] == [4] * (len(batches) - 1)
    for batch in batches:
        assert sorted(i for _, indices in batch for i in indices) == list(range(50))
    assert len(one_pass(sampler)) == 12  # the next epoch is a whole one


def test_a_resume_and_a_limit_in_one_batch():
    plan = BatchPlan(50, 1.0, chunks_per_step=8, steps_per_epoch=2)
    sampler = chunk_sampler(plan, FullBatch(), limit=7)
    sampler.resume_at = 5

    chunks = one_pass(sampler)[:2]

    assert [chunk.index for chunk, _ in chunks] == [5, 6]
    assert [chunk.first for chunk, _ in chunks] == [True, False]
    assert sorted(i for _, indices in chunks for i in indices) == list(range(50))


@pytest.mark.parametrize("seed", [None, 0])
def test_every_pass_draws_afresh(seed):
    plan = BatchPlan(1000, 0.1, chunks_per_step=1, steps_per_epoch=2)
    sampler = chunk_sampler(plan, seed=seed)
    passes = [[indices for _, indices in one_pass(sampler)] for _ in range(3)]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert passes[0][0] != passes[0][1]


def test_a_seed_makes_batches_repeatable_and_without_it_they_are_not():
    plan = BatchPlan(1000, 0.1, chunks_per_step=2, steps_per_epoch=3)

    def draw(seed: int | None) -> list[tuple[Chunk, list[int]]]:
        torch.manual_seed(0)
        np.random.seed(0)
        return one_pass(chunk_sampler(plan, seed=seed))

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


def test_the_length_of_the_sampler_is_the_number_of_chunks():
    plan = BatchPlan(100, 0.1, chunks_per_step=2, steps_per_epoch=5)
    assert len(chunk_sampler(plan)) == len(one_pass(chunk_sampler(plan))) == 10


# -- the loader ----------------------------------------------------------------------------------


class Positions(Dataset[int]):
    """Each record is its own position."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


def private_loader(
    plan: BatchPlan,
    *,
    done: Callable[[], int] = lambda: 0,
    limit: int | None = None,
    **arguments: Any,
) -> PrivateDataLoader:
    loader: DataLoader[Any] = DataLoader(Positions(), batch_size=10, shuffle=True, **arguments)
    return PrivateDataLoader(loader, chunk_sampler(plan, limit=limit), done)


PLAN = BatchPlan(num_records=100, sample_rate=0.03, chunks_per_step=2, steps_per_epoch=15)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {
            "num_workers": 2,
            "prefetch_factor": 4,
            "persistent_workers": True,
            "multiprocessing_context": "fork",
        },
    ],
    ids=["none", "two", "persistent"],
)
def test_batches_come_in_order_and_as_they_are_flagged_with_any_workers(arguments):
    loader, expected = private_loader(PLAN, **arguments), chunk_sampler(PLAN)
    for epoch in range(2):
        flagged = [(loader.current, batch.tolist()) for batch in loader]
        assert flagged == one_pass(expected), f"epoch {epoch}"
        assert {chunk.size for chunk, _ in flagged} > {0, 1}


def test_an_epoch_left_early_does_not_shift_the_flags_of_the_next():
    """Workers have fetched ahead when Lightning leaves an epoch."""
    loader = private_loader(PLAN, num_workers=2, multiprocessing_context="fork")
    for position, _ in enumerate(loader):
        if position == 3:
            break

    for position, batch in enumerate(loader):
        assert loader.current is not None
        assert loader.current.index == position
        assert len(batch) == max(1, loader.current.size)


def test_the_users_collate_function_is_kept_with_strings():
    def collate(records: list[int]) -> dict[str, list[str]]:
        return {"text": [f"record {i}" for i in records]}

    loader = private_loader(PLAN, collate_fn=collate)
    batches = [batch["text"] for batch in loader]

    expected = [[f"record {i}" for i in indices] for _, indices in one_pass(chunk_sampler(PLAN))]
    assert batches == expected


def test_a_collate_function_that_returns_none_is_refused():
    loader = private_loader(PLAN, collate_fn=lambda records: None)
    with pytest.raises(TypeError, match="collate_fn of the training loader returned None"):
        next(iter(loader))


def test_the_users_loader_is_left_untouched():
    user: DataLoader[Any] = DataLoader(Positions(), batch_size=10)
    before = dict(vars(user))
    list(PrivateDataLoader(user, chunk_sampler(PLAN), lambda: 0))
    assert vars(user) == before


@pytest.mark.parametrize("done", [0, 1, 2, 7, 29])
def test_a_saved_position_resumes_at_the_next_chunk(done):
    state = private_loader(PLAN, done=lambda: done).state_dict()
    assert list(state) == ["chunks_done"]  # nothing about records

    resumed = private_loader(PLAN)
    resumed.load_state_dict(state)
    rest = [resumed.current for _ in resumed]

    assert [chunk.index for chunk in rest] == list(range(done, 30))
    assert rest[0].first
    assert [resumed.current.index for _ in resumed] == list(range(30))


@pytest.mark.parametrize(("limit", "done"), [(None, 30), (12, 12), (7, 7)])
def test_a_position_saved_at_the_end_of_an_epoch_is_the_start_of_the_next(limit, done):
    loader = private_loader(PLAN, limit=limit, done=lambda: done)
    assert loader.state_dict() == {"chunks_done": 0}
