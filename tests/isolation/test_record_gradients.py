"""Which gradients moved, and which differences are rounding."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dp.gradients.materialised import MaterialisedGradients
from lightning_dp.isolation.record_gradients import Glimpse, Movement, Tolerance, glimpse, moved

N, D = 8, 400
EVERYONE = tuple(range(N))


def gradients(seed=0):
    return torch.randn(N, D, generator=torch.Generator().manual_seed(seed))


def seen(rows):
    return Glimpse(rows.norm(dim=1).double(), rows[:, ::4].double(), 0.25)


def test_a_glimpse_holds_norms_and_entries():
    rows = gradients()
    places = torch.tensor([0, 7, 399])
    found = glimpse(MaterialisedGradients([torch.zeros(D)], [rows], 2.0), places, D)
    torch.testing.assert_close(found.norms, 2 * rows.double().norm(dim=1))
    torch.testing.assert_close(found.entries, 2 * rows[:, places].double())
    assert found.share == 3 / D


def test_what_moves():
    rows = gradients()
    longer, turned = rows.clone(), rows.clone()
    longer[3] *= 1.05
    turned[3] = rows[3].flip(0)
    for other in (longer, turned):
        assert moved(seen(rows), seen(other), EVERYONE, Tolerance(scale=math.inf))
        assert not moved(seen(rows), seen(other), (0, 1, 2), Tolerance(scale=math.inf))


def test_other_numbers_of_records_have_moved():
    assert moved(seen(gradients()), seen(gradients()[:4]), (0,), Tolerance())


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e6])
def test_rounding_is_no_movement(size):
    rows = gradients() * size
    noisy = rows * (1 + 1e-3 * gradients(1).sign())
    assert not moved(seen(rows), seen(noisy), EVERYONE, Tolerance())


def test_tiny_gradients_beside_large_ones_may_be_rounding_alone():
    rows = gradients()
    rows[0] *= 1e-9
    noisy = rows.clone()
    noisy[0] = 1e-9 * gradients(1)[0]
    assert not moved(seen(rows), seen(noisy), EVERYONE, Tolerance())


def test_a_huge_gradient_hides_no_other():
    """What is left out follows the clip norm, which no record can raise."""
    rows = gradients()
    rows[0] *= 1e6
    other = rows.clone()
    other[1] *= 1.05
    assert moved(seen(rows), seen(other), EVERYONE, Tolerance(scale=1.0))


def test_gradients_that_are_not_finite_are_equal_to_each_other_only():
    rows = gradients()
    nan, inf = rows.clone(), rows.clone()
    nan[2], inf[2] = torch.nan, torch.inf
    assert not moved(seen(nan), seen(inf), EVERYONE, Tolerance())
    assert moved(seen(rows), seen(nan), EVERYONE, Tolerance())


def test_one_in_many_may_move():
    rows = torch.randn(640, D)
    few, many = rows.clone(), rows.clone()
    few[:10] *= 2
    many[:11] *= 2
    everyone = tuple(range(640))
    assert not moved(seen(rows), seen(few), everyone, Tolerance())
    assert moved(seen(rows), seen(many), everyone, Tolerance())


def test_records_in_another_order_did_not_move():
    generator = torch.Generator().manual_seed(5)
    entries = torch.randn(12, 20, generator=generator, dtype=torch.float64)
    order = torch.randperm(12, generator=generator)
    other = entries.clone()
    other[6:] = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    rows, tolerance = tuple(range(6)), Tolerance()

    def seen(gradients):
        return Glimpse(gradients.norm(dim=1), gradients, 1.0)

    assert moved(seen(entries), seen(other), rows, tolerance) == Movement.NONE
    assert moved(seen(entries), seen(other[order]), rows, tolerance) == Movement.ORDER
    assert moved(seen(entries[order]), seen(other[order]), rows, tolerance) == Movement.ORDER
    assert moved(seen(entries), seen(other * 1.1), rows, tolerance) == Movement.MOVED
    assert moved(seen(entries), seen(other[order] * 1.1), rows, tolerance) == Movement.MOVED
