"""The reporting accountant against closed forms, brackets, and the numbers in our documents."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
from scipy.stats import norm

from lightning_dp.accounting import (
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    delta,
    epsilon,
    gdp_delta,
    gdp_epsilon,
)
from lightning_dp.accounting import pmf as pmf_module

P = PoissonGaussian
PAIRS = [(1.0, 0.01), (0.5, 0.3), (3.0, 0.9), (0.347, 1e-4), (20.0, 0.1), (1.0, 1 - 1e-9)]


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("z", "q"), PAIRS)
@pytest.mark.parametrize("at", [0.01, 0.5, 2.0])
def test_one_step_is_the_integral(z, q, at, relation, profile_by_integration):
    exact = profile_by_integration(z, q, at, relation)
    value = delta(P(z, q), at, relation)
    assert exact * (1 - 1e-6) - 1e-14 <= value <= exact * 1.005 + 1e-12


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_one_step_would_notice_a_sensitivity_off_by_two(factor, profile_by_integration):
    exact = profile_by_integration(1.0, 0.01, 0.5)
    assert not exact * (1 - 1e-6) <= delta(P(factor, 0.01), 0.5) <= exact * 1.005


BRACKETED = [
    ([(P(1.0, 0.01), 1000)], 1e-5, 1e-4),
    ([(P(0.8, 0.02), 500)], 1e-9, 1e-4),
    ([(P(1.2, 0.01), 300), (P(1.0, 0.02), 300), (P(0.9, 0.005), 400)], 1e-5, 1e-4),
    ([(P(3.0, 0.5), 100), (P(5.0, 0.9), 10), (Gaussian(4.0), 5)], 1e-6, 1e-4),
    ([(P(0.5, 1e-3), 1000)], 1e-5, 1e-4),
]


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("history", "at", "h"), BRACKETED)
def test_composition_is_inside_the_brackets(history, at, h, relation, dp_accounting_brackets):
    low, high = dp_accounting_brackets(history, at, h, relation)
    assert low <= epsilon(history, at, relation) <= high * 1.001


@pytest.mark.parametrize("steps", [1, 10, 20_000])
@pytest.mark.parametrize("z", [0.7, 30.0, 400.0])
def test_full_batch_is_exact_gdp(z, steps):
    mu = math.sqrt(steps) / z
    e = epsilon([(Gaussian(z), steps)], 1e-6)
    if e > 0:
        exact = norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu))
        assert exact == pytest.approx(1e-6, rel=1e-6)
    else:
        assert 2 * norm.cdf(mu / 2) - 1 <= 1e-6
    assert e == epsilon([(P(z, 1.0), steps)], 1e-6)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_grid_agrees_with_gdp_when_nearly_all_take_part(relation):
    exact = epsilon([(Gaussian(20.0), 1000)], 1e-6, relation)
    assert epsilon([(P(20.0, 1 - 1e-12), 1000)], 1e-6, relation) == pytest.approx(exact, rel=5e-4)


@pytest.mark.parametrize(
    ("history", "at", "value"),
    [
        ([(P(1.0, 0.01), 1000)], 1e-5, 1.829),
        ([(P(0.8, 0.02), 500)], 1e-5, 4.668),
        ([(P(2.0, 0.1), 200)], 1e-6, 3.806),
        ([(Gaussian(1.0), 10)], 1e-5, 17.857),
        ([(P(1.2, 0.01), 300), (P(1.0, 0.01), 300), (P(0.9, 0.01), 400)], 1e-5, 1.945),
        ([(P(0.347, 1e-4), 40_000)], 1e-5, 9.16),
        ([(P(1.5 / math.sqrt(5), 0.01), 1000)], 1e-5, 5.25),
        ([(P(3.0 / math.sqrt(10), 0.01), 1000)], 1e-5, 2.05),
    ],
)
def test_values_from_the_documents(history, at, value):
    assert epsilon(history, at) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize(
    ("target", "add_remove", "replace_one"),
    [(0.1, 11.04, 22.0), (0.2, 5.89, 11.7), (0.3, 4.10, 8.05)],
)
def test_logistic_regression_table(target, add_remove, replace_one):
    q, steps = 128 / 50_000, 19_550
    assert epsilon([(P(add_remove, q), steps)], 1e-5) == pytest.approx(target, rel=5e-3)
    assert epsilon([(P(replace_one, q), steps)], 1e-5, "replace_one") == pytest.approx(
        target, rel=5e-3
    )


def test_zcdp_budget_table():
    # (4, 1e-8) is rho = 0.1963 by the loose conversion; mu^2 = 2 rho costs 3.456 exactly, and
    # (4, 1e-8) allows mu^2 = 0.5134; replace-one doubles mu.
    assert gdp_epsilon(math.sqrt(2 * 0.1963), 1e-8) == pytest.approx(3.456, rel=1e-3)
    assert gdp_epsilon(math.sqrt(0.5134), 1e-8) == pytest.approx(4.0, rel=1e-3)
    assert gdp_epsilon(2 * math.sqrt(2 * 0.1963), 1e-8) == pytest.approx(7.44, rel=1e-3)


def test_federated_reference():
    rate = [min(1.0, (16 + math.ceil(1.322 * i)) / 10_000) for i in range(183)]
    assert epsilon([P(8.0, q) for q in rate], 5.5e-8) == pytest.approx(0.1145, rel=5e-3)
    assert epsilon([P(1.423, q) for q in rate], 5.5e-8) == pytest.approx(1.0, rel=5e-3)
    assert epsilon([(P(0.837, 16e-4), 1563)], 5.5e-8) == pytest.approx(1.0, rel=5e-3)
    assert epsilon([(P(1.293, 137e-4), 183)], 5.5e-8) == pytest.approx(1.0, rel=5e-3)


def test_grid_is_not_a_trap_for_many_small_steps():
    # A fixed grid gives 0.0305 (h = 1e-4) or 0.100 (h = 1e-3) where 0.0257 is true.
    assert epsilon([(P(37.8, 0.00256), 19_550)], 1e-5) == pytest.approx(0.02563, rel=2e-3)


@pytest.mark.parametrize("at", [1e-3, 1e-8, 1e-12])
@pytest.mark.parametrize(
    ("z", "q", "steps"), [(1.0, 0.01, 1000), (100.0, 1e-3, 10**6), (2.0, 0.5, 20), (0.6, 1e-3, 100)]
)
def test_delta_inverts_epsilon_down_to_tiny_delta(z, q, steps, at):
    e = epsilon([(P(z, q), steps)], at)
    if e > 0:
        assert delta([(P(z, q), steps)], e) == pytest.approx(at, rel=0.02)


@pytest.mark.parametrize(
    ("z", "q", "steps", "low", "high"),
    [(200.0, 0.001, 100, 0.5e-4, 3e-4), (0.5, 0.1, 3000, 300.2, 301.9)],
)
def test_tiny_and_large_epsilon(z, q, steps, low, high):
    history = [(P(z, q), steps)]
    e = epsilon(history, 1e-6)
    assert low < e < high
    rdp = StreamingRDPAccountant().epsilon(history, 1e-6)
    assert 0.7 * rdp < e < rdp or e < 1e-3


def test_million_steps():
    e = epsilon([(P(10.0, 0.001), 10**6)], 1e-5)
    # Central limit: mu^2 = T q^2 (e^(1/z^2) - 1).
    mu = math.sqrt(10**6 * 1e-6 * math.expm1(1 / 100))
    assert e == pytest.approx(gdp_epsilon(mu, 1e-5), rel=5e-3)


def test_many_distinct_steps_are_never_below_and_hardly_above_the_exact_composition():
    rng = np.random.default_rng(0)
    steps = [P(rng.uniform(0.8, 2), rng.uniform(0.005, 0.02)) for _ in range(400)]
    exact = PLDAccountant(spacing=1e-3).epsilon([(s, 1) for s in steps], 1e-5)
    grouped = PLDAccountant(spacing=0.1).epsilon([(s, 1) for s in steps], 1e-5)
    assert exact * (1 - 1e-4) <= grouped <= exact * 1.02
    assert exact < grouped  # it is grouped at all


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    ("range_z", "range_q"), [((0.4, 1.0), (1e-3, 1e-3)), ((5, 50), (0.1, 0.9))]
)
def test_interpolation_is_pessimistic_over_wide_ranges(range_z, range_q, relation):
    rng = np.random.default_rng(1)
    z, q = rng.uniform(*range_z, 300), rng.uniform(*range_q, 300)
    history = [(P(a, b), 1) for a, b in zip(z, q, strict=True)]
    exact = PLDAccountant(spacing=1e-3).epsilon(history, 1e-5, relation)
    grouped = PLDAccountant(spacing=0.25).epsilon(history, 1e-5, relation)
    assert exact * (1 - 3e-4) <= grouped <= exact * 1.2


def test_ten_thousand_distinct_schedule():
    z = np.geomspace(3.0, 1.0, 10_000)
    value = epsilon([P(float(a), 0.01) for a in z], 1e-5)
    fine = PLDAccountant(spacing=0.01).epsilon([(P(float(a), 0.01), 1) for a in z], 1e-5)
    assert fine * (1 - 2e-4) <= value <= fine * 1.005


@pytest.mark.parametrize("direction", [False, True])
@pytest.mark.parametrize(("z", "q"), PAIRS)
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_pmf_dominates_its_profile(z, q, direction, relation):
    h, log_tail = 0.01, -40.0
    pmf = pmf_module.discretise(z, q, h, log_tail, relation, direction)
    x = (pmf.start + np.arange(pmf.probabilities.size)) * h
    profile = pmf_module.backward_profile if direction else pmf_module.forward_profile
    for at in (0.0, 0.005, 0.1, 0.333, 1.0):
        true, _ = profile(np.array([at]), z, q, relation)
        shown = pmf.infinity + np.sum(pmf.probabilities * np.maximum(-np.expm1(at - x), 0))
        assert shown >= true[0] * (1 - 1e-12)
    assert pmf.probabilities.sum() + pmf.infinity >= 1 - 1e-12
    assert pmf.probabilities.sum() + pmf.infinity <= 1 + 1e-7


def test_pmf_with_a_limit_still_dominates():
    h = 0.01
    pmf = pmf_module.discretise(0.5, 0.1, h, -40.0, "add_remove", False, limit=2.0)
    x = (pmf.start + np.arange(pmf.probabilities.size)) * h
    assert x.max() <= 2.0 + h
    for at in (0.1, 1.0, 2.5):
        true, _ = pmf_module.forward_profile(np.array([at]), 0.5, 0.1, "add_remove")
        shown = pmf.infinity + np.sum(pmf.probabilities * np.maximum(-np.expm1(at - x), 0))
        assert shown >= true[0]


def test_replacement_pair_is_the_worst_of_many_directions(profile_by_integration):
    # Records of any length and angle: Monte-Carlo-free, on a two-dimensional grid.
    z, q, at = 0.8, 0.2, 0.5
    t = np.linspace(-6, 6, 601)
    x, y = np.meshgrid(t, t)

    def density(a, b):
        return np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * z * z)) / (2 * np.pi * z * z)

    worst = profile_by_integration(z, q, at, "replace_one")
    for size, other, angle in [(1, 1, 3.1), (1, 0.5, 3.14), (1, 1, 2), (0.7, 1, 3.14), (1, 0, 0)]:
        new = (1 - q) * density(0, 0) + q * density(size, 0)
        old = (1 - q) * density(0, 0) + q * density(
            other * math.cos(angle), other * math.sin(angle)
        )
        value = np.maximum(new - math.exp(at) * old, 0).sum() * (t[1] - t[0]) ** 2
        assert value <= worst * (1 + 1e-4)


def test_gdp_functions_invert_each_other():
    for mu in (0.01, 0.5, 3.0, 30.0):
        for at in (1e-3, 1e-6, 1e-12):
            e = gdp_epsilon(mu, at)
            if e > 0:
                assert gdp_delta(mu, e) == pytest.approx(at, rel=1e-6)
                assert gdp_delta(mu, e) <= at


@pytest.mark.parametrize("mu", [-1.0, math.nan])
def test_illegal_mu_is_refused(mu):
    with pytest.raises(ValueError, match="mu must be"):
        gdp_delta(mu, 1.0)


def test_gdp_limits():
    assert gdp_delta(0.0, 1.0) == 0.0
    assert gdp_delta(math.inf, 1.0) == 1.0
    assert gdp_epsilon(math.inf, 0.1) == math.inf
    assert gdp_epsilon(1e-9, 0.1) == 0.0


def test_accountant_is_frozen_configuration():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLDAccountant().rtol = 1.0
    assert PLDAccountant() == PLDAccountant()


@pytest.mark.slow
def test_random_histories_are_below_rdp_and_invert():
    rng = np.random.default_rng(7)
    for _ in range(100):
        history = [
            (
                P(10 ** rng.uniform(-0.4, 2), 10 ** rng.uniform(-4, -0.1)),
                int(10 ** rng.uniform(0, 4)),
            )
            for _ in range(3)
        ]
        at = 10 ** rng.uniform(-10, -3)
        e = epsilon(history, at)
        assert e <= StreamingRDPAccountant().epsilon(history, at) * (1 + 1e-9) + 1e-7
        if e > 1e-4:
            assert delta(history, e) == pytest.approx(at, rel=0.1)
