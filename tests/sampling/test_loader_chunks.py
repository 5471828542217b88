"""How a logical batch is handed out: in chunks, over ranks, limits and resumes."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_dp.sampling import BatchPlan, FullBatch
from lightning_dp.sampling.loader import Chunk


def logical_batches(chunks: list[tuple[Chunk, list[int]]]) -> list[list[tuple[Chunk, list[int]]]]:
    starts = [i for i, (chunk, _) in enumerate(chunks) if chunk.first] + [len(chunks)]
    assert starts[0] == 0
    return [chunks[a:b] for a, b in pairwise(starts)]


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.7])
def test_each_logical_batch_comes_in_the_planned_number_of_chunks_and_each_record_once(
    rate, chunk_sampler, one_pass
):
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


def test_an_empty_chunk_holds_one_stand_in_that_counts_for_nothing(chunk_sampler, one_pass):
    plan = BatchPlan(num_records=200, sample_rate=0.004, chunks_per_step=3, steps_per_epoch=200)

    chunks = one_pass(chunk_sampler(plan))

    assert any(chunk.size == 0 for chunk, _ in chunks)
    assert any(chunk.size > 0 for chunk, _ in chunks)
    for chunk, indices in chunks:
        assert len(indices) == max(1, chunk.size)
        assert all(0 <= i < 200 for i in indices)


def test_inclusion_frequencies_over_an_epoch_are_the_sample_rate(
    chunk_sampler, one_pass, inclusion_p_value
):
    plan = BatchPlan(num_records=60, sample_rate=0.1, chunks_per_step=2, steps_per_epoch=3000)

    is_in = np.zeros((3000, 60), dtype=bool)
    for row, batch in zip(is_in, logical_batches(one_pass(chunk_sampler(plan))), strict=True):
        row[[i for chunk, indices in batch for i in indices[: chunk.size]]] = True

    assert inclusion_p_value(is_in, 0.1) > 0.01
    assert inclusion_p_value(is_in, 0.2) < 1e-6


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("num_records", [21, 100])
def test_the_shards_of_the_ranks_are_a_partition_of_the_records(
    world_size, num_records, chunk_sampler, one_pass
):
    plan = BatchPlan(num_records, 1.0, chunks_per_step=2, steps_per_epoch=1)

    seen = Counter(
        i
        for rank in range(world_size)
        for chunk, indices in one_pass(chunk_sampler(plan, rank=rank, world_size=world_size))
        for i in indices[: chunk.size]
    )

    assert seen == Counter(range(num_records))


def test_ranks_draw_independently_with_the_same_seed(chunk_sampler, one_pass):
    plan = BatchPlan(400, 0.5, chunks_per_step=1, steps_per_epoch=1)
    positions = [
        {i // 2 for i in one_pass(chunk_sampler(plan, rank=rank, world_size=2))[0][1]}
        for rank in range(2)
    ]
    assert positions[0] != positions[1]


@pytest.mark.parametrize("limit", [1, 4, 5, 6, 7, 8, 12])
def test_a_batch_cut_short_by_a_limit_is_whole_in_the_chunks_that_are_left(
    limit, chunk_sampler, one_pass
):
    plan = BatchPlan(50, 1.0, chunks_per_step=4, steps_per_epoch=3)

    used = one_pass(chunk_sampler(plan, FullBatch(), limit=limit))[:limit]

    batches = logical_batches(used)
    assert len(batches) == math.ceil(limit / 4)
    for batch in batches:
        assert sorted(i for _, indices in batch for i in indices) == list(range(50))


@pytest.mark.parametrize("resume_at", [1, 3, 4, 7, 11])
def test_a_batch_resumed_in_its_middle_is_a_new_whole_batch(resume_at, chunk_sampler, one_pass):
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


def test_a_resume_and_a_limit_in_one_batch(chunk_sampler, one_pass):
    plan = BatchPlan(50, 1.0, chunks_per_step=8, steps_per_epoch=2)
    sampler = chunk_sampler(plan, FullBatch(), limit=7)
    sampler.resume_at = 5

    chunks = one_pass(sampler)[:2]

    assert [chunk.index for chunk, _ in chunks] == [5, 6]
    assert [chunk.first for chunk, _ in chunks] == [True, False]
    assert sorted(i for _, indices in chunks for i in indices) == list(range(50))


@pytest.mark.parametrize("seed", [None, 0])
def test_every_pass_draws_afresh(seed, chunk_sampler, one_pass):
    plan = BatchPlan(1000, 0.1, chunks_per_step=1, steps_per_epoch=2)
    sampler = chunk_sampler(plan, seed=seed)
    passes = [[indices for _, indices in one_pass(sampler)] for _ in range(3)]
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert passes[0][0] != passes[0][1]


def test_a_seed_makes_batches_repeatable_and_without_it_they_are_not(chunk_sampler, one_pass):
    plan = BatchPlan(1000, 0.1, chunks_per_step=2, steps_per_epoch=3)

    def draw(seed: int | None) -> list[tuple[Chunk, list[int]]]:
        torch.manual_seed(0)
        np.random.seed(0)
        return one_pass(chunk_sampler(plan, seed=seed))

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    assert draw(None) != draw(None)


def test_the_length_of_the_sampler_is_the_number_of_chunks(chunk_sampler, one_pass):
    plan = BatchPlan(100, 0.1, chunks_per_step=2, steps_per_epoch=5)
    assert len(chunk_sampler(plan)) == len(one_pass(chunk_sampler(plan))) == 10
