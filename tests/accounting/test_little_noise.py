"""So little noise, or so many steps, that no grid of losses fits: bounds without one, never below."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lightning_dp.accounting import (
    ZCDP,
    ApproximateDP,
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
)
from lightning_dp.accounting._grid import GridSearch, Target
from lightning_dp.accounting._pmf import forward_profile
from lightning_dp.accounting.base import AbstractAccountant
from lightning_dp.accounting.gdp import LittleNoise, gdp_delta, gdp_epsilon
from lightning_dp.accounting.guards import GDPGuard
from lightning_dp.accounting.steps import merge

LOTS, TINY = 10**15, PoissonGaussian(1e-6, 0.01)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("z", "q"), [(0.03, 0.2), (0.09, 0.01)])
def test_a_step_is_bounded_closely_by_the_chance_to_take_part(z, q, relation):
    found = LittleNoise.of(merge([(PoissonGaussian(z, q), 1)]), relation)
    for share in (0.2, 0.9, 1.0, 1.3):
        epsilon = share * 0.5 / z**2
        exact = float(forward_profile(np.array([epsilon]), z, q, relation)[0][0])
        assert exact <= found.delta(epsilon) * (1 + 1e-9)
        if share < 0.5:
            assert found.delta(epsilon) <= 1.01 * exact


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_many_steps_are_bounded_a_little_above_the_grid(relation):
    steps = merge([(PoissonGaussian(0.05, 0.01), 100), (PoissonGaussian(0.06, 0.004), 50)])
    on_grid = GridSearch(2.5e-4, 0.04).worst_direction(
        steps, Target(log_delta=math.log(1e-5)), relation, math.inf
    )
    bound = LittleNoise.of(steps, relation).epsilon(1e-5)
    factor = 1.0 if relation == "add_remove" else 4.0  # Gaussians at twice the distance
    assert on_grid <= bound <= 1.5 * factor * on_grid


@pytest.mark.parametrize("accountant", [PLDAccountant(), StreamingRDPAccountant()])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    "history",
    [
        [(TINY, 100)],
        [(PoissonGaussian(1e-30, 0.01), 100)],
        [(Gaussian(1e-60), 3), (PoissonGaussian(1.0, 0.01), 1000)],
        [(PoissonGaussian(1e-3, 1e-9), 10)],
        [(PoissonGaussian(1.0, 0.01), LOTS)],
        [(PoissonGaussian(1e200, 0.01), 10)],
        [(TINY, 10), (ApproximateDP(1.0, 1e-6, relation="add_remove", what="a table"), 1)],
        [(TINY, 10), (ZCDP(1e8, relation="add_remove", what="a census"), 1)],
        [
            (PoissonGaussian(1.0, 0.01), 9),
            (ApproximateDP(1e8, 0.0, relation="add_remove", what="x"), 1),
        ],
    ],
)
def test_an_answer_is_finite_and_quick_where_no_grid_fits(
    accountant: AbstractAccountant, relation: str, history: list
) -> None:
    epsilon = accountant.epsilon(history, 1e-5, relation)
    assert 0 <= epsilon < math.inf
    assert 0 <= accountant.delta(history, 5.0, relation) <= 1
    lengths = np.array([1, 3])
    values = accountant.curve(TINY, lengths, 1e-5, relation, history)
    assert epsilon <= values[0] <= values[1] < math.inf


def test_epsilon_of_next_to_no_noise_is_that_of_the_largest_probable_number_of_releases() -> None:
    found = PLDAccountant().epsilon([(TINY, 100)], 1e-5)
    # P(more than 7 of 100 at rate 0.01) = 8e-6, P(more than 8) = 8e-7.
    assert 7 * 0.5e12 < found < 8.01 * 0.5e12


def test_noise_whose_square_would_underflow_counts_as_none() -> None:
    for z in (1e-160, 1e-310):
        assert PLDAccountant().epsilon([(PoissonGaussian(z, 0.01), 1)], 1e-5) == math.inf
        assert StreamingRDPAccountant().delta([(Gaussian(z), 1)], 9.0) == 1.0
        guard = GDPGuard(1.0, 1e-5, "add_remove", [])
        assert not guard.fits(lambda z=z: Gaussian(z))


def test_large_mu_is_rounded_up_and_its_two_formulas_agree() -> None:
    for mu in (2e6, 1e12, 1e40):
        epsilon = gdp_epsilon(mu, 1e-5)
        assert epsilon >= mu * mu / 2
        assert epsilon <= mu * (mu / 2 + 4.3) * (1 + 1e-14)
        assert gdp_delta(mu, epsilon) <= 1e-5
        assert gdp_delta(mu, 0.4 * mu * mu) == 1.0
    assert gdp_epsilon(1.0001e6, 1e-5) == pytest.approx(gdp_epsilon(0.9999e6, 1e-5), rel=5e-4)
