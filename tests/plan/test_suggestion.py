"""The suggestion is what its principle says, found by looking at all plans.

Hundreds of plans are made, so their noise is that of the central limit, which takes no time.
"""

from __future__ import annotations

import math

import pytest

from lightning_dp.plan import plan_training, suggest
from lightning_dp.plan.suggestion import ENOUGH, LEAST_STEPS, best_plan, default_delta

pytestmark = pytest.mark.usefixtures("quick")


def by_looking_at_all(n, most_epochs):
    """Fewest doubled epochs, then smallest batch, with 100 steps and at most 1.5 times the noise."""
    for epochs in (1, 2, 4, 8, 16, 32, 64, 128):
        sizes = [2**power for power in range(20) if 2**power < n] + [n]
        fitting = [size for size in sizes if math.ceil(n / size) * epochs >= 100]
        plans = [
            plan_training(n, size, epochs=epochs, target_epsilon=3.0, target_delta=1e-5)
            for size in fitting
        ]
        enough = [each for each in plans if each.excess <= 1.5]
        if enough:
            return enough[0]
        if epochs == most_epochs:
            return plans[-1]
    raise AssertionError("full batches are enough")


@pytest.mark.parametrize(
    ("n", "most"), [(1000, 128), (1000, 2), (22_000, 128), (10**6, 128), (10**6, 1)]
)
def test_it_is_the_best_of_all(n, most):
    found = best_plan(n, 3.0, target_delta=1e-5, gradients=most * n)
    assert found == by_looking_at_all(n, most)


def test_epochs_are_doubled_from_those_at_hand():
    for least, epochs in ((1, 8), (3, 6), (7, 7)):
        found = best_plan(22_000, 3.0, target_delta=1e-5, least_epochs=least)
        assert found.epochs == epochs and found.excess <= ENOUGH and found.steps >= LEAST_STEPS


def test_time_limits_the_epochs():
    long = suggest(1000, 3.0, records_per_second=50, seconds=3600)
    short = suggest(1000, 3.0, records_per_second=50, seconds=70)  # 3.5 epochs

    assert not long.is_short_of_time
    assert short.is_short_of_time
    assert short.best.epochs == 3
    assert short.best.excess > long.best.excess
    assert max(each.epochs for row in short.table for each in row) == 3
    assert short.best.seconds(50) <= 70


def test_the_table_has_each_batch_with_each_number_of_epochs():
    found = suggest(1000, 3.0)
    epochs = [each.epochs for each in found.table[0]]
    assert len(set(epochs)) == len(epochs) <= 5
    for row in found.table:
        assert [each.epochs for each in row] == epochs
        assert {each.batch_size for each in row} == {row[0].batch_size}
        assert {each.target_delta for each in row} == {1e-4}
    assert found.table[-1][0].batch_size == 1000
    assert found.best in [each for row in found.table for each in row]


@pytest.mark.parametrize("n", [1, 2, 99, 100, 101, 10**6])
def test_the_default_delta_is_a_power_of_ten_below_a_tenth_of_one_record(n):
    delta = default_delta(n)
    assert delta <= 1 / (10 * n) * (1 + 1e-12)
    assert math.log10(delta) == pytest.approx(round(math.log10(delta)))
    if n > 1:
        assert delta * 10 > 1 / (10 * n) * (1 + 1e-12)
