"""ε has one rounding, and it is never below the value."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_dp.accounting import epsilon_text
from lightning_dp.accounting.rounding import float32_above


def test_text_is_never_below_and_at_most_one_unit_of_its_last_digit_above():
    rng = np.random.default_rng(0)
    for epsilon in 10.0 ** rng.uniform(-9, 4, size=2000):
        shown = float(epsilon_text(epsilon))
        assert epsilon <= shown <= epsilon * (1 + 1e-3) + 1e-15


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.3, 1.0, 2.5, 3.0, 8.0, 10.0, 1234.0, 1e-5])
def test_a_budget_is_shown_as_it_was_given(epsilon):
    assert epsilon_text(epsilon) == f"{epsilon:g}"


def test_infinity_has_no_digits():
    assert epsilon_text(math.inf) == "inf"


def test_what_is_stored_in_32_bits_is_never_below():
    rng = np.random.default_rng(1)
    for epsilon in 10.0 ** rng.uniform(-9, 4, size=2000):
        stored = np.float32(float32_above(epsilon))
        assert epsilon <= stored <= epsilon * (1 + 2e-7)
    assert float32_above(math.inf) == math.inf
