"""The statistics of audits against exact small cases, and their coverage over many runs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.audit.bounds import (
    StepKind,
    largest_noise_scale,
    least_misses_in_run,
    least_misses_in_steps,
    log_ratio,
    one_run_epsilon,
    one_run_p_value,
    step_threshold,
    upper_rate,
)


@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_without_delta_it_is_the_tail_of_randomized_response(epsilon):
    """Every one of 2^6 outcomes, weighed by hand."""
    accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
    outcomes = list(itertools.product([0, 1], repeat=6))
    for correct in range(7):
        exact = sum(
            accuracy ** sum(o) * (1 - accuracy) ** (6 - sum(o))
            for o in outcomes
            if sum(o) >= correct
        )
        assert one_run_p_value(20, 6, correct, epsilon, 0.0) == pytest.approx(exact)


def test_delta_adds_the_best_slope_to_the_tail():
    """m = r = v = 1, ε = 0: P[W >= 1] = 1/2, and α = P[W = 0] / 1 = 1/2: 1/2 + 2 δ / 2."""
    assert one_run_p_value(1, 1, 1, 0.0, 0.1) == pytest.approx(0.6)
    # r = v = 2: tail 1/4; α = max(P[W=1] / 1, P[W<=1] / 2) = max(1/2, 3/8); m = 2.
    assert one_run_p_value(2, 2, 2, 0.0, 0.1) == pytest.approx(0.25 + 2 * 2 * 0.1 * 0.5)


def test_guessing_with_total_failures_is_within_the_p_value():
    """The (0, δ) algorithm that publishes a coin with probability δ: exact against the bound."""
    m, delta = 8, 0.05
    right = delta + (1 - delta) / 2  # of each guess, the best one can do
    for correct in range(m + 1):
        exact = sum(
            math.comb(m, k) * right**k * (1 - right) ** (m - k) for k in range(correct, m + 1)
        )
        assert exact <= one_run_p_value(m, m, correct, 0.0, delta) + 1e-12


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_one_run_covers_randomized_response(epsilon):
    """Refutes the true ε in at most 5 % of the runs, and comes near it."""
    rng = np.random.default_rng(0)
    accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
    correct = rng.binomial(1000, accuracy, size=1000)
    bounds = {int(v): one_run_epsilon(1000, 1000, int(v), 0.0, 0.05) for v in set(correct)}
    found = np.array([bounds[int(v)] for v in correct])

    assert 0.01 < (found > epsilon).mean() <= 0.07  # it is nearly tight
    assert np.median(found) > 0.75 * epsilon


def test_the_bound_is_where_the_p_value_crosses():
    epsilon = one_run_epsilon(500, 100, 95, 1e-5, 0.05)

    assert one_run_p_value(500, 100, 95, epsilon - 1e-6, 1e-5) <= 0.05
    assert one_run_p_value(500, 100, 95, epsilon + 1e-6, 1e-5) > 0.05
    assert one_run_epsilon(500, 100, 50, 1e-5, 0.05) == 0.0


@pytest.mark.parametrize(
    "arguments", [(10, 11, 5, 1.0, 0.0), (10, 5, 6, 1.0, 0.0), (9, 9, 9, math.nan, 0.0)]
)
def test_what_cannot_be_is_refused(arguments):
    with pytest.raises(ValueError, match=r"must be 0 <=|must be at least 0"):
        one_run_p_value(*arguments)


def test_upper_rates_are_rarely_too_low():
    rng = np.random.default_rng(1)
    errors = rng.binomial(200, 0.1, size=4000)
    bounds = {int(k): upper_rate(int(k), 200, 0.05) for k in set(errors)}

    too_low = np.mean([bounds[int(k)] < 0.1 for k in errors])
    assert 0.02 < too_low <= 0.06
    assert upper_rate(5, 5, 0.05) == 1.0


@pytest.mark.parametrize("alarms", [1e-4, 0.05, 0.5, 0.9])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_the_curve_of_one_full_batch_step_is_that_of_two_normals(alarms, scale):
    exact = norm.cdf(norm.ppf(1 - alarms) - 1 / (2.0 * scale))

    kinds = [StepKind(2.0, 1.0, 7)]
    assert least_misses_in_steps(kinds, scale, alarms) == pytest.approx(exact, abs=1e-9)
    seven = norm.cdf(norm.ppf(1 - alarms) - math.sqrt(7) / (2.0 * scale))
    run = least_misses_in_run(lambda z, q: Gaussian(z), kinds, scale, alarms)
    assert run == pytest.approx(seven, abs=1e-9)


def test_the_curve_of_mixed_steps_is_below_every_test_and_reached_by_one():
    """Any thresholds per kind are a test; none may be better, the best must be as good."""
    kinds = [StepKind(0.7, 0.2, 1), StepKind(1.5, 0.2, 1)]
    best: dict[float, float] = {}
    grid = np.linspace(-1, 4, 2500)
    for y in grid:
        first = norm.sf(y / 0.7), 0.8 * norm.sf(y / 0.7) + 0.2 * norm.sf((y - 1) / 0.7)
        second = norm.sf(grid / 1.5), 0.8 * norm.sf(grid / 1.5) + 0.2 * norm.sf((grid - 1) / 1.5)
        alarms, misses = (first[0] + second[0]) / 2, 1 - (first[1] + second[1]) / 2
        for target in (0.05, 0.2):
            near = np.abs(alarms - target) < 2e-4
            if near.any():
                best[target] = min(best.get(target, 1.0), misses[near].min())
    for target, misses in best.items():
        assert least_misses_in_steps(kinds, 1.0, target) == pytest.approx(misses, abs=1e-3)


def test_the_curve_of_a_poisson_run_is_below_what_an_attacker_reaches():
    rng = np.random.default_rng(2)
    z, q, steps, n = 0.6, 0.1, 20, 40_000
    noise = z * rng.standard_normal((n, steps))
    outside = log_ratio(noise, z, q).sum(1)
    inside = log_ratio(noise + (rng.random((n, steps)) < q), z, q).sum(1)
    kinds = [StepKind(z, q, steps)]
    for cut in (0.0, 1.0, 3.0):
        alarms, misses = (outside > cut).mean(), (inside <= cut).mean()
        least = least_misses_in_run(PoissonGaussian, kinds, 1.0, float(alarms))
        assert 0.7 * misses < least <= misses + 0.01


def test_the_threshold_of_a_full_batch_is_half_way():
    assert step_threshold([StepKind(1.0, 1.0, 5)]) == pytest.approx(0.0, abs=0.06)
    assert step_threshold([StepKind(1.0, 0.1, 5)]) > 0.5


def test_the_noise_scale_is_found_from_above():
    assert largest_noise_scale(lambda scale: scale > 0.5, 100.0) == pytest.approx(0.5, rel=1e-3)
    assert largest_noise_scale(lambda scale: scale > 0.5, 100.0) >= 0.5
    assert largest_noise_scale(lambda scale: False, 3.0) == 3.0
    assert largest_noise_scale(lambda scale: True, 3.0) == 0.0


def test_the_noise_scale_of_a_gaussian_covers_the_truth():
    """Through errors, rates and curve: true noise 1, too large a bound on ε in at most 5 %."""
    rng = np.random.default_rng(3)
    kinds, n = [StepKind(1.0, 1.0, 1)], 5000
    wrong, found = 0, []
    for _ in range(200):
        alarms = upper_rate(int(rng.binomial(n, norm.sf(0.5))), n, 0.025)
        misses = upper_rate(int(rng.binomial(n, norm.sf(0.5))), n, 0.025)
        wrong += misses < least_misses_in_steps(kinds, 1.0, alarms)
        found.append(
            largest_noise_scale(
                lambda s, a=alarms, m=misses: m < least_misses_in_steps(kinds, s, a), 10.0
            )
        )
    assert wrong / 200 <= 0.05
    assert 1.0 < np.median(found) < 1.15
