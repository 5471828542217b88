"""When spot checks are made, and what is exchanged in them."""

from __future__ import annotations

import pytest
import torch

from lightning_dp.isolation.kinds import SyntheticKind, SyntheticKinds, Values
from lightning_dp.isolation.nesting import copied
from lightning_dp.isolation.spot_plan import SpotPlan

SEVENS = SyntheticKinds((SyntheticKind((Values(7, 7, 1), Values(7, 7, 1))),))


def batch(n=8):
    return torch.arange(3.0 * n).view(n, 3), torch.arange(n)


def steps(name, count=2000, epoch=200):
    plan, found = SpotPlan(name), []
    for step in range(count):
        if plan.is_due(step, len(found), begins_epoch=step % epoch == 0):
            found.append(step)
    return found


def test_it_is_a_function_of_the_runs_name():
    assert steps("a") == steps("a")
    assert steps("a") != steps("b")


def test_about_one_step_in_fifty_and_more_at_the_start():
    numbers = [len(steps(str(run))) for run in range(20)]
    assert min(numbers) >= 25
    assert max(numbers) <= 70
    assert {0, 1, 2, 4, 8, 16, 32} <= set(steps("a"))


def test_the_first_step_of_each_epoch():
    assert set(range(0, 2000, 200)) <= set(steps("a"))


def test_short_epochs_do_not_make_a_check_of_each_step():
    assert len(steps("a", epoch=1)) <= 120


def test_half_of_the_records_or_one_are_exchanged():
    plan = SpotPlan("a")
    sizes = [8 - len(plan.exchange(batch(), 0, made, SEVENS).others) for made in range(8)]
    assert sizes == [4, 4, 4, 1, 4, 4, 4, 1]


@pytest.mark.parametrize("made", range(4))
def test_the_others_stay_and_the_batch_too(made):
    given = batch()
    found = SpotPlan("a").exchange(given, 3, made, SEVENS)
    rows = list(found.others)
    assert torch.equal(given[0], batch()[0])
    assert torch.equal(found.batch[0][rows], given[0][rows])
    assert torch.equal(found.batch[1][rows], given[1][rows])
    changed = [row for row in range(8) if row not in rows]
    assert not (found.batch[0][changed] == given[0][changed]).all(1).any()


def test_a_single_record_is_exchanged_for_a_synthetic_one():
    found = SpotPlan("a").exchange(batch(1), 0, 1, SEVENS)
    assert found.others == ()
    assert found.batch[0].tolist() == [[7.0, 7.0, 7.0]]


def test_further_attempts_exchange_other_records():
    plan = SpotPlan("a")
    others = {plan.exchange(batch(), 0, 0, SEVENS, attempt).others for attempt in range(6)}
    assert len(others) > 1


def test_places_are_sorted_distinct_and_inside():
    places = SpotPlan("a").places(5, [100, 1, 50], 2, 32)
    assert torch.equal(places, places.unique())
    assert places[0] >= 0
    assert places[-1] < 151
    assert len(places) <= 64


def test_copies_share_nothing():
    given = {"x": torch.zeros(2), "list": [torch.zeros(2)], "text": "a"}
    new = copied(given)
    new["x"] += 1
    new["list"][0] += 1
    new["list"].append(1)
    assert not given["x"].any()
    assert not given["list"][0].any()
    assert len(given["list"]) == 1
