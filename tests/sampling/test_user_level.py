"""Users are sampled, not rows: who is in a batch, with which rows, and how ids are given."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from lightning_dp import Poisson, UserLevel
from lightning_dp._world import World
from lightning_dp.sampling import BatchPlan
from lightning_dp.sampling.loader import ChunkSampler
from lightning_dp.sampling.repeats import digest_of_rows
from lightning_dp.sampling.units import RowsOfUnits
from lightning_dp.strategies.data import check_same_units


class Visits(Dataset):
    """Rows of patients."""

    def __init__(self, patients):
        self.patients = patients

    def __len__(self):
        return len(self.patients)

    def __getitem__(self, row):
        return torch.tensor(float(row))


class Table(Dataset):
    """Columns by name, as those of Hugging Face."""

    column_names = ("text", "writer")

    def __len__(self):
        return 4

    def __getitem__(self, key):
        return ["b", "a", "b", "c"] if key == "writer" else key


def grouped(rows):
    return {
        frozenset(rows.rows[a:b].tolist())
        for a, b in zip(rows.starts, rows.starts[1:], strict=False)
    }


FORMS = {
    "sequence": ["a", "b", "a", "c"],
    "numbers": [7, 2, 7, 5],
    "tensor": torch.tensor([7, 2, 7, 5]),
    "array": np.array(["a", "b", "a", "c"]),
    "function": lambda data: data.patients,
    "attribute": "patients",
    "mixed": [1, "1", 1.0, ("1",)],
    "tensors": [torch.tensor(user) for user in (7, 2, 7, 5)],  # each is equal to itself only
}


@pytest.mark.parametrize("ids", FORMS.values(), ids=FORMS)
def test_ids_come_in_many_forms(ids):
    rows = UserLevel(ids, most_rows=2).rows_of(Visits(list("abac")))
    assert grouped(rows) == {frozenset({0, 2}), frozenset({1}), frozenset({3})}
    assert len(rows) == 3


def test_ids_are_found_inside_of_subsets_and_joined_data_sets():
    inner = Visits(["x", "y", "x", "z"])
    data = ConcatDataset([Subset(inner, [3, 0, 2]), Visits(["y", "x"])])
    rows = UserLevel("patients", most_rows=9).rows_of(data)
    assert grouped(rows) == {frozenset({0}), frozenset({1, 2, 4}), frozenset({3})}
    column = UserLevel("writer", most_rows=9).rows_of(Subset(Table(), [0, 1, 2]))
    assert grouped(column) == {frozenset({0, 2}), frozenset({1})}


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, 2], "has 2 ids, and the training set has 4 rows"),
        ([1, None, 2, 3], "a row has no id"),
        ([1.0, float("nan"), 2.0, 3.0], "a row has no id"),
        (torch.tensor([1.0, float("nan"), 2.0, 3.0]), "a row has no id"),
        (torch.zeros(4, 1), "2 dimensions"),
        ([[], [], [], []], "cannot be compared"),
        ([object() for _ in range(4)], "cannot be compared"),
        ([("ward 1", torch.tensor(user)) for user in (7, 2, 7, 5)], "cannot be compared"),
        (list(torch.ones(4, 2)), "cannot be compared"),
        ("doctor", "Visits has no such attribute"),
    ],
)
def test_ids_that_name_no_users_are_refused(ids, text):
    with pytest.raises(ValueError, match=text) as refusal:
        UserLevel(ids, most_rows=2).rows_of(Visits(list("abcd")))
    assert refusal.value.topic == "user-level"


USERS = [0] * 5 + [1] + [2] * 3 + [3] * 30 + [4] * 2 + [5] * 4
DATA = Visits(USERS)


def chunks_of(passes, *, chunks=2, rate=0.5, k=3, augmentations=1, seed=3, **options):
    rows = UserLevel("patients", most_rows=k).rows_of(DATA, augmentations)
    plan = BatchPlan(len(rows), rate, chunks_per_step=chunks, steps_per_epoch=10)
    sampler = ChunkSampler(
        plan,
        Poisson(),
        limit=plan.chunks_per_epoch,
        seed=seed,
        units=rows,
        **{"rank": 0, "world_size": 1, **options},
    )
    for _ in range(passes):
        for records in sampler:
            chunk = sampler.pending.popleft()
            assert records == chunk.records
            yield chunk


def test_a_user_is_in_one_chunk_of_a_step_with_at_most_k_different_rows():
    met = set()
    for chunk in chunks_of(20):
        met = set() if chunk.first else met
        if not chunk.size:
            assert (chunk.records, chunk.rows, chunk.units) == ([0], 0, [[0]])
            continue
        assert chunk.rows == len(chunk.records) and len(chunk.units) == chunk.size
        for unit in chunk.units:
            (user,) = {USERS[row] for row in unit}
            assert user not in met
            assert len(set(unit)) == len(unit) == min(3, USERS.count(user))
            met.add(user)


def test_users_are_drawn_alike_however_many_rows_they_have():
    """And their rows as well; 5 standard deviations, for a fixed seed."""
    steps = 4000
    users, rows = Counter(), Counter()
    for chunk in chunks_of(steps // 10, chunks=1):
        for unit in chunk.units if chunk.size else ():
            users[USERS[unit[0]]] += 1
            rows.update(unit)
    for user in range(6):
        assert abs(users[user] - steps / 2) < 5 * (steps / 4) ** 0.5
    of_many = [row for row, user in enumerate(USERS) if user == 3]
    chance = 0.5 * 3 / 30
    assert all(abs(rows[row] - steps * chance) < 5 * (steps * chance) ** 0.5 for row in of_many)


def test_augmentations_read_each_row_again():
    for chunk in chunks_of(3, augmentations=4):
        for unit in chunk.units if chunk.size else ():
            assert set(Counter(unit).values()) == {4}
    single = RowsOfUnits.single(7, 3)
    drawn, owners = single.draw(np.array([6, 0]), np.random.default_rng(0))
    assert (drawn.tolist(), owners.tolist()) == ([6, 6, 6, 0, 0, 0], [0, 0, 0, 1, 1, 1])


def test_ranks_have_other_users():
    seen = [
        {USERS[unit[0]] for c in chunks_of(30, rank=r, world_size=2) if c.size for unit in c.units}
        for r in range(2)
    ]
    assert seen[0] == {0, 2, 4} and seen[1] == {1, 3, 5}


def test_sizes_and_rows_are_in_no_text():
    (chunk, *_) = chunks_of(1)
    assert "records" not in repr(chunk) and "owners" not in repr(chunk)
    rows = UserLevel("patients", most_rows=3).rows_of(DATA)
    assert repr(rows) == "RowsOfUnits(most_rows=3, augmentations=1)"


def test_ranks_whose_users_have_other_rows_are_refused():
    """hash() of a text differs from process to process, and numbers are sorted."""
    lead, same, other = (
        UserLevel(ids=np.array(ids), most_rows=1).rows_of(range(4))
        for ids in ([7, 7, 3, 9], [7, 7, 3, 9], [2, 2, 8, 5])
    )
    world = World(1, 2, broadcast=lambda _: (3, lead.digest, ""))
    check_same_units(range(4), same, 3, "user", world)
    with pytest.raises(ValueError, match="Rank 1 has other rows for the users"):
        check_same_units(range(4), other, 3, "user", world)


def chosen_by(way: str, seed: int) -> Any:
    """A training set that a script makes by a generator of its process."""
    generator, x = torch.Generator().manual_seed(seed), torch.arange(100.0)
    shuffled = TensorDataset(x[torch.randperm(100, generator=generator)])
    named = [str(i) for i in torch.randperm(100, generator=generator).tolist()]
    return {
        "split": random_split(range(100), [80, 20], generator)[0],
        "shuffled": shuffled,
        "part of shuffled": Subset(shuffled, range(80)),
        "named": Subset({str(i): i for i in range(100)}, named),
        "joined": ConcatDataset(random_split(range(100), [50, 50], generator)),
    }[way]


@pytest.mark.parametrize("way", ["split", "shuffled", "part of shuffled", "named", "joined"])
def test_ranks_that_chose_other_records_are_refused(way):
    """One could be in the shards of two ranks: twice in a batch, and twice as often in any."""
    lead = chosen_by(way, 0)
    world = World(1, 2, broadcast=lambda _: (len(lead), None, digest_of_rows(lead)))
    check_same_units(chosen_by(way, 0), None, len(lead), "record", world)
    with pytest.raises(ValueError, match="Rank 1 has other records in its training set"):
        check_same_units(chosen_by(way, 1), None, len(lead), "record", world)
