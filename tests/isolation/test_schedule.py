"""When comparisons are made, and with which samples: public, and known before the first charge."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left

import pytest

from lightning_dp.isolation.check import Schedule


def steps(name, count=2000, epoch=200):
    schedule, found = Schedule(name), []
    for step in range(count):
        if schedule.is_due(step, len(found), begins_epoch=step % epoch == 0):
            found.append(step)
    return found


def test_it_is_a_function_of_the_runs_name_alike_on_all_ranks():
    assert steps("a") == steps("a")
    assert steps("a") != steps("b")
    ranks = [Schedule("a") for _ in range(2)]
    for ask in (
        lambda s: s.samples(5, 1, 64),
        lambda s: s.kept(5, 1, 64, 2),
        lambda s: s.chunk(5, 7),
    ):
        assert ask(ranks[0]) == ask(ranks[1])


def test_the_early_steps_are_always_looked_at():
    for name in map(str, range(20)):
        assert {0, 1, 2, 4, 5, 8, 11, 16, 23, 32} <= set(steps(name, epoch=10**9))


def test_one_in_sixty_besides():
    numbers = [len(steps(str(run), 6000, 10**9)) - 10 for run in range(20)]
    assert 100 * 0.85 <= sum(numbers) / 20 <= 100 * 1.15
    assert min(numbers) > 60
    assert max(numbers) < 150


def test_the_first_step_of_each_epoch():
    assert set(range(0, 2000, 200)) <= set(steps("a"))
    assert {0, 4, 8, 12, 16} <= set(steps("a", 20, 4))


def test_short_epochs_do_not_make_a_comparison_of_each_step():
    assert len(steps("a", epoch=1)) <= 24 + 2 * 2000 / 60 + 60


def test_all_samples_are_looked_at_in_turn_with_a_few():
    schedule = Schedule("a")
    assert schedule.samples(1, 1, 64) == list(range(64))
    assert len(schedule.samples(0, 0, 64)) == 16
    assert schedule.samples(0, 0, 12) == list(range(12))


def test_at_least_one_is_kept_and_one_exchanged():
    for look, n in itertools.product(range(8), (2, 3, 16, 64, 512)):
        kept = Schedule("a").kept(3, look, n)
        assert 1 <= len(kept) < n, (look, n)
        assert kept == sorted(set(kept))
        assert set(kept) <= set(range(n))
        share = look // 2 % (4 if look in (0, 6) else 2)
        assert len(kept) == max(1, min(n - 1, -(-n // 2 ** (1 + share)))), (look, n)


def test_a_half_and_a_quarter_of_all_are_kept_and_less_of_a_few():
    schedule = Schedule("a")
    kept = {look: len(schedule.kept(3, look, 64)) for look in range(24)}
    assert [look for look in range(12) if schedule.takes_all(look)] == [1, 2, 3, 4, 5, 7, 9, 11]
    assert {kept[look] for look in range(24) if schedule.takes_all(look)} == {32, 16}
    assert {kept[look] for look in range(24) if not schedule.takes_all(look)} == {32, 16, 8, 4}


def test_the_first_and_the_last_place_are_exchanged_in_turn():
    kept = [Schedule("a").kept(step, step, 16) for step in range(40)]
    assert all(0 not in places for places in kept[::2])
    assert all(15 not in places for places in kept[1::2])
    assert any(0 in places for places in kept)
    assert any(15 in places for places in kept)


def test_further_attempts_keep_others():
    kept = {tuple(Schedule("a").kept(3, 0, 16, attempt)) for attempt in range(6)}
    assert len(kept) == 6


def test_chunks_are_chosen_evenly():
    chosen = [Schedule("a").chunk(step, 4) for step in range(400)]
    assert all(70 < chosen.count(chunk) < 130 for chunk in range(4))


@pytest.mark.parametrize(
    ("count", "is_permanent", "share"), [(40, False, 0.08), (16, False, 0.27), (40, True, 0.58)]
)
def test_an_odd_record_in_one_of_four_batches_is_missed_as_often_as_documented(
    count, is_permanent, share
):
    def misses(run):
        schedule, numbers = Schedule(str(run)), random.Random(run)
        compared = steps(str(run), count, 4)
        for step in range(count):
            size = sum(numbers.random() < 1 / 4 for _ in range(63)) + 1
            if numbers.random() < 1 / 4:  # its first one, where what it does is permanent
                odd, look = numbers.randrange(size), bisect_left(compared, step)
                few = schedule.samples(step, look, size) if step in compared else []
                if odd in few and few.index(odd) not in schedule.kept(step, look, len(few)):
                    return False
                if is_permanent:
                    return True
        return True

    assert sum(map(misses, range(2000))) / 2000 == pytest.approx(share, abs=0.025)
