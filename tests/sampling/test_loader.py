"""The loader in the place of the user's: workers, collate functions and saved positions."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_dp.sampling import BatchPlan, FullBatch, Poisson, TruncatedPoisson
from lightning_dp.sampling.loader import Chunk, ChunkSampler, PrivateDataLoader, read_at_once


class Positions(Dataset[int]):
    """Each record is its own position."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture
def private_loader(chunk_sampler: Callable[..., ChunkSampler]) -> Callable[..., PrivateDataLoader]:
    """The loader of a plan over records that are their own positions, in batches of 10 by default."""

    def make(
        plan: BatchPlan,
        *,
        position: Callable[[], int] = lambda: 0,
        limit: int | None = None,
        **arguments: Any,
    ) -> PrivateDataLoader:
        loader: DataLoader[Any] = DataLoader(Positions(), batch_size=10, shuffle=True, **arguments)
        return PrivateDataLoader(loader, chunk_sampler(plan, limit=limit), position)

    return make


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
def test_batches_come_in_order_and_as_they_are_flagged_with_any_workers(
    arguments, chunk_sampler, one_pass, private_loader
):
    loader, expected = private_loader(PLAN, **arguments), chunk_sampler(PLAN)
    for epoch in range(2):
        flagged = [(loader.current, batch.tolist()) for batch in loader]
        assert flagged == one_pass(expected), f"epoch {epoch}"
        assert {chunk.size for chunk, _ in flagged} > {0, 1}


def test_an_epoch_left_early_does_not_shift_the_flags_of_the_next(private_loader):
    """Workers have fetched ahead when Lightning leaves an epoch."""
    loader = private_loader(PLAN, num_workers=2, multiprocessing_context="fork")
    for position, _ in enumerate(loader):
        if position == 3:
            break

    for position, batch in enumerate(loader):
        assert loader.current is not None
        assert loader.current.index == position
        assert len(batch) == max(1, loader.current.size)


def test_the_users_collate_function_is_kept_with_strings(chunk_sampler, one_pass, private_loader):
    def collate(records: list[int]) -> dict[str, list[str]]:
        return {"text": [f"record {i}" for i in records]}

    loader = private_loader(PLAN, collate_fn=collate)
    batches = [batch["text"] for batch in loader]

    expected = [[f"record {i}" for i in indices] for _, indices in one_pass(chunk_sampler(PLAN))]
    assert batches == expected


def test_a_collate_function_that_returns_none_is_refused(private_loader):
    loader = private_loader(PLAN, collate_fn=lambda records: None)
    with pytest.raises(TypeError, match="collate_fn of the training loader returned None"):
        next(iter(loader))


@pytest.mark.parametrize("position", [0, 1, 2, 7, 29])
def test_a_pass_begins_where_the_trainer_is_when_its_first_chunk_is_asked_for(
    position, private_loader
):
    places = iter([position, 0])
    loader = private_loader(PLAN, position=lambda: next(places))
    assert loader.state_dict() == {}  # nothing about records
    loader.load_state_dict({"chunks_done": 13})  # as older versions saved it
    iter(loader)  # asks for no chunk, so it begins no pass

    rest = [loader.current for _ in loader]

    assert [chunk.index for chunk in rest] == list(range(position, 30))
    assert rest[0].first
    assert [loader.current.index for _ in loader] == list(range(30))


@pytest.mark.parametrize(("limit", "position"), [(None, 30), (12, 12), (7, 7), (7, 8)])
def test_a_pass_behind_the_epochs_last_chunk_has_whole_batches_of_one_chunk(
    limit, position, private_loader
):
    """Lightning steps on the one batch that it fetches there."""
    loader = private_loader(PLAN, limit=limit, position=lambda: position)
    next(iter(loader))
    assert (loader.current.index, loader.current.first) == (position, True)
    chunks = [loader.current for _ in loader]
    assert all(chunk.first for chunk in chunks)


# -- how a logical batch is handed out: in chunks, over ranks, limits and resumes ----------------


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


@pytest.mark.parametrize("sampling", [Poisson(), TruncatedPoisson(20)], ids=str)
def test_no_record_decides_the_chunk_of_another_unless_their_sizes_are_limited(
    sampling, chunk_sampler, one_pass
):
    """In equal chunks two records would never meet: each would have the place that the other leaves."""
    plan = BatchPlan(2, 1.0, chunks_per_step=2, steps_per_epoch=1000)
    met = [chunk.size != 1 for chunk, _ in one_pass(chunk_sampler(plan, sampling)) if chunk.first]
    assert len(met) == 1000
    assert sum(met) == pytest.approx(0 if sampling.cuts_by_place else 500, abs=80)


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


# -- batches of very large data sets take the memory of a batch, not of the data set -------------


RECORDS = 10**8


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that Python and NumPy had at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_batch_of_many_records_takes_memory_for_the_batch():
    rng = np.random.default_rng(0)
    batches = []
    peak = peak_of(lambda: batches.append(Poisson().draw(RECORDS, 256 / RECORDS, rng)))
    assert 150 < len(batches[0]) < 400
    assert len(np.unique(batches[0])) == len(batches[0])
    assert peak < 64 * 1024


# -- tensor data sets are read batch by batch, and give the batches that torch's loader gives ----


N = 30
TENSORS = {
    "images and labels": (torch.randn(N, 3, 4, 4), torch.arange(N)),
    "numbers": (torch.randn(N),),
    "half and truth": (torch.randn(N, 2).bfloat16(), torch.rand(N, 3) > 0.5),
    "columns": (torch.randn(5, N).T, torch.randn(N, 8)[:, ::2]),
    "nothing in a record": (torch.randn(N, 0), torch.randn(N, 2)),
}
BATCHES = [[3, 1, 2], [0], list(range(N)), [29, 29, 5]]
SUBSETS: dict[str, Any] = {
    "whole": lambda data: data,
    "list": lambda data: Subset(data, [*range(N - 1, -1, -1)]),
    "array": lambda data: Subset(data, np.arange(N)),
    "tensor": lambda data: Subset(data, torch.arange(N)),
    "from the end": lambda data: Subset(data, np.arange(N) - N),
    "bytes": lambda data: Subset(data, np.arange(N, dtype=np.uint8)),
    "nested from the end": lambda data: Subset(
        Subset(data, [*range(-N, 0)]), [*range(-1, -N - 1, -1)]
    ),
    "nested": lambda data: Subset(Subset(data, [*range(N - 1, -1, -1)]), [*range(N)]),
}


@pytest.mark.parametrize("chosen", SUBSETS)
@pytest.mark.parametrize("name", TENSORS)
def test_batches_are_those_of_torchs_loader(name, chosen):
    user = DataLoader(SUBSETS[chosen](TensorDataset(*TENSORS[name])), batch_sampler=BATCHES)
    at_once = read_at_once(user)
    assert at_once is not None
    for want, got in zip(user, at_once, strict=True):
        assert type(got) is type(want) is list
        for one, other in zip(want, got, strict=True):
            assert one.dtype == other.dtype and one.is_contiguous() and other.is_contiguous()
            assert torch.equal(one, other)
            assert not one.numel() or one.data_ptr() != other.data_ptr()


class Own(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class OwnSubset(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def collate(records: list[Any]) -> Any:
    return default_collate(records)


X = torch.randn(N, 2)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Own(X), {}),
        (OwnSubset(TensorDataset(X), range(N)), {}),
        (Subset(Own(X), range(N)), {}),
        (TensorDataset(X.clone().requires_grad_()), {}),
        (TensorDataset(X.to_sparse()), {}),
        (TensorDataset(torch.nn.Parameter(X)), {}),
        ([1.0, 2.0], {}),
        (TensorDataset(X), {"collate_fn": collate}),
        (TensorDataset(X), {"num_workers": 1}),
    ],
)
def test_all_else_is_read_record_by_record(dataset, options):
    assert read_at_once(DataLoader(dataset, batch_sampler=BATCHES, **options)) is None
