"""Bounds on tests of whether a record was used, against exact formulas and an explicit search."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from lightning_dp.accounting import (
    Gaussian,
    PoissonGaussian,
    StreamingRDPAccountant,
    TradeOff,
    epsilon,
    trade_off,
)

RATES = (0.0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0)


@pytest.mark.parametrize("z", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_of_a_gaussian_it_is_just_above_the_best_test(z, relation):
    mu = (1 if relation == "add_remove" else 2) / z
    tests = trade_off([(Gaussian(z), 1)], 1e-5, relation)

    for rate in RATES:
        best = float(norm.cdf(norm.ppf(rate) + mu))  # Neyman and Pearson
        found = tests.true_positive_rate(rate)
        assert best <= found <= min(1.0, 1.25 * best + 2e-5)
    assert tests.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-9)


def test_of_a_sampled_gaussian_no_threshold_test_does_better():
    z, q = 0.8, 0.2
    tests = trade_off([(PoissonGaussian(z, q), 1)], 1e-5)

    for threshold in np.linspace(-2, 6, 41):  # the likelihood ratio rises with the output
        without = float(norm.sf(threshold / z))
        with_it = (1 - q) * without + q * float(norm.sf((threshold - 1) / z))
        for rate, found in ((without, with_it), (1 - with_it, 1 - without)):
            assert tests.true_positive_rate(rate) >= found - 1e-12
            assert tests.advantage >= found - rate - 1e-12


@pytest.mark.parametrize("pair", [(0.0, 0.1), (1.0, 1e-5), (3.0, 0.01), (8.0, 0.0)])
def test_one_pair_gives_the_region_of_the_definition(pair):
    """The worst pair of distributions for (ε, δ) has four outcomes: every test is a choice of them."""
    eps, delta = pair
    p = np.array([delta, 0.0, 1 - delta, 1 - delta])
    q = np.array([0.0, delta, 1 - delta, 1 - delta])
    share = 1 / (1 + math.exp(-eps))
    p *= [1, 1, share, 1 - share]
    q *= [1, 1, 1 - share, share]
    tests = TradeOff((pair,))

    for outcomes in range(16):
        chosen = [bool(outcomes >> i & 1) for i in range(4)]
        rate, found = float(q[chosen].sum()), float(p[chosen].sum())
        assert tests.true_positive_rate(min(1.0, rate)) >= found - 1e-12
    corner = float(q[[0, 2]].sum()), float(p[[0, 2]].sum())
    assert tests.true_positive_rate(corner[0]) == pytest.approx(corner[1])
    assert tests.advantage == pytest.approx(corner[1] - corner[0])


def test_more_pairs_never_say_more():
    history = [(PoissonGaussian(1.2, 0.0465), 129)]
    alone = TradeOff(((epsilon(history, 1e-5), 1e-5),))

    for accountant in (None, StreamingRDPAccountant()):
        tests = trade_off(history, 1e-5, accountant=accountant)
        for rate in RATES:
            assert rate <= tests.true_positive_rate(rate) <= alone.true_positive_rate(rate) + 0.01
    assert trade_off(history, 1e-5).advantage < alone.advantage / 2


def test_without_noise_and_without_steps():
    assert trade_off([(Gaussian(0.0), 1)], 1e-5).advantage == 1.0
    assert trade_off([(Gaussian(0.0), 1)], 1e-5).true_positive_rate(0.0) == 1.0
    nothing = trade_off([], 1e-5)
    assert nothing.advantage <= 1e-5 and nothing.true_positive_rate(0.25) <= 0.25 + 1e-5


def test_a_huge_epsilon_allows_all():
    tests = TradeOff(((800.0, 0.0),))

    assert tests.true_positive_rate(1e-9) == tests.advantage == 1.0
    assert tests.true_positive_rate(0.0) == 0.0
