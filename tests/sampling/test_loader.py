"""The loader in the place of the user's: workers, collate functions and saved positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_dp.sampling import BatchPlan
from lightning_dp.sampling.loader import ChunkSampler, PrivateDataLoader


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


def test_the_users_loader_is_left_untouched(chunk_sampler):
    user: DataLoader[Any] = DataLoader(Positions(), batch_size=10)
    before = dict(vars(user))
    list(PrivateDataLoader(user, chunk_sampler(PLAN), lambda: 0))
    assert vars(user) == before


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
