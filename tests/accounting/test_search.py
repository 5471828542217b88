"""A random number of runs, of which the best is released: against dp-accounting and brute force."""

from __future__ import annotations

import json
import math
from functools import cache

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.polynomial import polynomial
from opacus_accountants import OpacusRDPAccountant
from scipy import integrate, stats

from lightning_dp.accounting import (
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    RepeatAndSelect,
    StreamingRDPAccountant,
    calibrate_history,
    draw_number_of_runs,
)
from lightning_dp.accounting.calibration import affordable_steps
from lightning_dp.accounting.events import event_from_dict
from lightning_dp.accounting.guards import GDPGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.rdp import RenyiCurve
from lightning_dp.accounting.search import success_rate

RUN = [(PoissonGaussian(1.0, 0.01), 1000)]
ORDERS = np.array([1.5, 2.0, 3.0, 5.0, 8.0, 16.0, 32.0])
ACCOUNTANT = StreamingRDPAccountant()


@cache
def negative_binomial_pmf(mean, shape, most=1500):
    """P(K = 1), P(K = 2), ...: the definition, normalised by summing, its rate by bisection."""

    def pmf(gamma):
        k = np.arange(1.0, most)
        terms = np.concatenate(([0.0], np.cumsum(np.log((k + shape) / (k + 1)))))
        weights = np.exp(terms + np.arange(1, most + 1) * math.log1p(-gamma))
        return weights / weights.sum()

    low, high = 1e-4, 1 - 1e-9
    for _ in range(80):
        middle = (low + high) / 2
        is_rare = pmf(middle) @ np.arange(1, most + 1) > mean
        low, high = (middle, high) if is_rare else (low, middle)
    return pmf(low)


class Slope:
    """f'(x), f the probability generating function of K: the density of the best is f'(F) p."""

    def __init__(self, mean, shape):
        if shape == math.inf:
            self.none = math.exp(-mean)
            self.of = lambda x: mean * np.exp(mean * (x - 1))
        else:
            pmf = negative_binomial_pmf(mean, shape)
            self.none = 0.0
            self.of = lambda x: polynomial.polyval(x, pmf * np.arange(1, pmf.size + 1))


X = np.linspace(-12, 12, 2001)
ORDERINGS = {"larger": lambda F, S: F, "smaller": lambda F, S: S}


def best_of_gaussian_runs(z, slope, better):
    """Densities of the best output on the grid, for the sums 0 and 1 with noise z."""
    densities = []
    for mean in (0.0, 1.0):
        law = stats.norm(mean, z)
        worse = ORDERINGS[better](law.cdf(X * z), law.sf(X * z))
        densities.append(slope.of(worse) * law.pdf(X * z) * z)
    return densities


@pytest.mark.parametrize("better", ORDERINGS)
@pytest.mark.parametrize(
    ("mean", "shape"), [(4.0, 1.0), (4.0, 0.0), (4.0, -0.5), (4.0, 3.0), (4.0, math.inf), (1.5, 0)]
)
def test_the_bound_is_above_the_divergence_of_the_best_of_gaussian_runs(mean, shape, better):
    z, slope = 1.5, Slope(mean, shape)
    p, q = best_of_gaussian_runs(z, slope, better)
    bound = RenyiCurve.of([(RepeatAndSelect([(Gaussian(z), 1)], mean, shape), 1)], "add_remove")
    assert integrate.simpson(p, x=X) + slope.none == pytest.approx(1, abs=1e-6)
    for first, second in ((p, q), (q, p)):
        for order, value in zip(ORDERS, bound.at(ORDERS), strict=True):
            moment = integrate.simpson(first * (first / second) ** (order - 1), x=X) + slope.none
            exact = math.log(moment) / (order - 1)
            assert exact <= value


@pytest.mark.parametrize("shape", [1.0, 0.0, -0.5, math.inf])
def test_epsilon_is_above_the_exact_one_and_not_twice_it(shape):
    z, delta, slope = 2.0, 1e-5, Slope(4.0, shape)
    ours = ACCOUNTANT.epsilon([(RepeatAndSelect([(Gaussian(z), 1)], 4.0, shape), 1)], delta)

    pairs = [best_of_gaussian_runs(z, slope, better) for better in ORDERINGS]
    both = [pair for p, q in pairs for pair in ((p, q), (q, p))]

    def exact_delta(epsilon):
        return max(
            integrate.simpson(np.maximum(a - math.exp(epsilon) * b, 0.0), x=X) for a, b in both
        )

    assert exact_delta(ours) < delta < exact_delta(ours / 1.8)


@pytest.mark.parametrize("p", [0.55, 0.7, 0.9])
@pytest.mark.parametrize(("mean", "shape"), [(3.0, 1.0), (10.0, 0.0), (3.0, math.inf)])
def test_the_theorems_bound_the_best_of_randomised_responses(p, mean, shape):
    class Response:
        """The divergences of one run: outputs 0 and 1 with probability p and 1 - p, or reversed."""

        is_empty = has_noiseless = False

        def at(self, orders):
            logs = math.log(p), math.log(1 - p)
            terms = [orders * a + (1 - orders) * b for a, b in (logs, logs[::-1])]
            return np.logaddexp(*terms) / (orders - 1)

    event = RepeatAndSelect([(Gaussian(1.0), 1)], mean, shape)
    no_steps = RenyiCurve.of([], "add_remove").steps
    bound = RenyiCurve(no_steps, "add_remove", ((event, Response(), 1),)).at(ORDERS)

    k = np.arange(1, 1501)
    slope = Slope(mean, shape)
    weights = (
        stats.poisson(mean).pmf(k) if shape == math.inf else negative_binomial_pmf(mean, shape)
    )

    def best(zero):  # 1 beats 0: all runs have to give 0
        only_zeros = weights @ zero**k
        return np.array([slope.none, only_zeros, 1 - slope.none - only_zeros])

    for a, b in ((best(p), best(1 - p)), (best(1 - p), best(p))):
        present = a > 0
        for order, value in zip(ORDERS, bound, strict=True):
            moment = np.sum(a[present] ** order * b[present] ** (1 - order))
            assert math.log(moment) / (order - 1) <= value


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 5.0, math.inf])
@pytest.mark.parametrize(
    "mean",
    [pytest.param(2.0, marks=pytest.mark.slow), 10.0, pytest.param(100.0, marks=pytest.mark.slow)],
)
def test_epsilon_is_that_of_dp_accounting(mean, shape):
    orders = np.concatenate(([1.02, 1.05], np.arange(1.1, 11.0, 0.05), np.arange(11.0, 120.0)))
    run = dp_event.SelfComposedDpEvent(
        dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.0)), 1000
    )
    theirs = rdp_privacy_accountant.RdpAccountant(orders=orders)
    theirs.compose(dp_event.RepeatAndSelectDpEvent(run, mean, shape))
    theirs.compose(dp_event.GaussianDpEvent(5.0))
    ours = ACCOUNTANT.epsilon([(RepeatAndSelect(RUN, mean, shape), 1), (Gaussian(5.0), 1)], 1e-5)
    # Theirs leaves out the outputs of K = 0: e^-2 of the mass for the least mean.
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-2 if mean == 2 else 2e-3)


@pytest.mark.parametrize("shape", [-0.9, 0.0, 1.0, 7.0])
def test_one_run_for_sure_costs_one_run(shape):
    search = [(RepeatAndSelect(RUN, 1.0, shape), 1)]
    assert ACCOUNTANT.epsilon(search, 1e-5) == pytest.approx(ACCOUNTANT.epsilon(RUN, 1e-5))
    almost = [(RepeatAndSelect(RUN, 1 + 1e-9, shape), 1)]
    assert ACCOUNTANT.epsilon(almost, 1e-5) == pytest.approx(
        ACCOUNTANT.epsilon(RUN, 1e-5), rel=1e-4
    )


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_more_runs_cost_more_and_less_than_all_of_them_in_public(relation):
    costs = [
        ACCOUNTANT.epsilon([(RepeatAndSelect(RUN, mean, 0.0), 1)], 1e-5, relation)
        for mean in (1, 2, 10, 100)
    ]
    assert costs == sorted(costs)
    assert costs[-2] < ACCOUNTANT.epsilon([(RUN[0][0], 10_000)], 1e-5, relation)


def test_a_larger_shape_costs_more():
    costs = [
        ACCOUNTANT.epsilon([(RepeatAndSelect(RUN, 10, shape), 1)], 1e-5)
        for shape in (-0.5, 0.0, 0.5, 1.0, 3.0)
    ]
    assert costs == sorted(costs)


def test_searches_compose_with_each_other_and_with_steps():
    search = RepeatAndSelect(RUN, 10, 1)
    apart = RenyiCurve.of([(search, 1)], "add_remove").at(ORDERS)
    steps = RenyiCurve.of(RUN, "add_remove").at(ORDERS)
    together = RenyiCurve.of([(search, 2), *RUN, (search, 1)], "add_remove").at(ORDERS)
    assert together == pytest.approx(3 * apart + steps)


def test_a_search_of_searches_costs_more_than_either():
    inner = RepeatAndSelect(RUN, 3, 1)
    outer = RepeatAndSelect([(inner, 1)], 3, 1)
    costs = [ACCOUNTANT.epsilon([(e, 1)], 1e-5) for e in (inner, outer)]
    assert costs[0] < costs[1] < math.inf


@pytest.mark.parametrize("shape", [1.0, math.inf])
def test_limits_of_the_runs(shape):
    nothing = RepeatAndSelect([(Gaussian(1.0), 0)], 10, shape)
    noiseless = RepeatAndSelect([(Gaussian(0.0), 1)], 10, shape)
    assert ACCOUNTANT.epsilon([(nothing, 1)], 1e-5) == 0
    assert ACCOUNTANT.epsilon([(noiseless, 1)], 1e-5) == math.inf
    assert ACCOUNTANT.delta([(noiseless, 1)], 1.0) == 1
    search = [(RepeatAndSelect(RUN, 10, shape), 1)]
    epsilon = ACCOUNTANT.epsilon(search, 1e-5)
    assert ACCOUNTANT.delta(search, epsilon) == pytest.approx(1e-5, rel=1e-6)


def test_other_accountants_and_guards_refuse_and_name_the_cure():
    search = RepeatAndSelect(RUN, 10, 1)
    for accountant in (PLDAccountant(), OpacusRDPAccountant()):
        with pytest.raises(ValueError, match=r"use StreamingRDPAccountant\(\)"):
            accountant.epsilon([(search, 1)], 1e-5)
    with pytest.raises(ValueError, match=r"use StreamingRDPAccountant\(\)"):
        affordable_steps(search, 3, 8.0, 1e-5)
    with pytest.raises(ValueError, match=r"use StreamingRDPAccountant\(\)"):
        GDPGuard(8.0, 1e-5, "add_remove", spent=[(search, 1)])


def test_affordable_searches_are_counted_by_the_accountant_that_can():
    search = RepeatAndSelect(RUN, 10, 1)
    assert affordable_steps(search, 10, 10.0, 1e-5, accountant=ACCOUNTANT) == 3
    assert ACCOUNTANT.epsilon([(search, 3)], 1e-5) <= 10 < ACCOUNTANT.epsilon([(search, 4)], 1e-5)


def test_calibrated_noise_of_a_search_meets_the_budget():
    def search(z):
        return [(RepeatAndSelect([(PoissonGaussian(z, 0.02), 500)], 10, 0), 1)]

    z = calibrate_history(search, 3.0, 1e-6, accountant=ACCOUNTANT)
    assert 0.999 * 3 <= ACCOUNTANT.epsilon(search(z), 1e-6) <= 3


def test_calibration_refuses_what_no_noise_can_do():
    fixed = [(RepeatAndSelect(RUN, 10, 1), 1)]
    with pytest.raises(ValueError, match="no noise keeps history within epsilon=1 "):
        calibrate_history(lambda z: [*fixed, (Gaussian(z), 1)], 1.0, 1e-5, accountant=ACCOUNTANT)
    with pytest.raises(ValueError, match="epsilon=nan must be"):
        calibrate_history(lambda z: [(Gaussian(z), 1)], math.nan, 1e-5)


@pytest.mark.parametrize("shape", [0.0, -0.5, math.inf])
def test_the_event_survives_json_and_the_ledger(tmp_path, shape):
    event = RepeatAndSelect([(Gaussian(2.0), 3), (RepeatAndSelect(RUN, 2, 1), 1)], 10, shape)
    text = json.dumps(event.to_dict(), allow_nan=False)
    assert event_from_dict(json.loads(text)) == event

    ledger = Ledger()
    ledger.begin("search", tmp_path)
    ledger.charge(event)
    ledger.end()
    again = Ledger()
    again.restore(ledger.state_dict(), tmp_path)
    assert again.history() == [(event, 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"runs": 3}, "list of pairs"),
        ({"runs": [[1, 2, 3]]}, "list of pairs"),
        ({"runs": [[{"event": "Gaussian", "noise_multiplier": 1.0}, 1.5]]}, "count must be"),
        ({"mean": "10"}, "mean=.* must be a real number"),
        ({"shape": "poisson"}, "shape=.* must be a real number"),
        ({"extra": 1}, "unknown field .extra"),
    ],
)
def test_a_malformed_dictionary_is_refused(change, message):
    d = {**RepeatAndSelect(RUN, 10, 1).to_dict(), **change}
    with pytest.raises(ValueError, match=message):
        event_from_dict(d)


@pytest.mark.parametrize(
    ("mean", "shape", "message"),
    [
        (math.nan, 1, "mean must be finite and at least 1"),
        (math.inf, 1, "mean must be finite and at least 1"),
        (0.5, 1, "mean must be finite and at least 1"),
        (True, 1, "mean=.* must be a real number"),
        (10, math.nan, "shape must be above -1"),
        (10, -1, "shape must be above -1"),
        (10, "poisson", "shape=.* must be a real number"),
        (1e300, -0.9, "mean=1e.300 is too large"),
    ],
)
def test_an_illegal_distribution_is_refused(mean, shape, message):
    for make in (
        lambda: RepeatAndSelect(RUN, mean, shape),
        lambda: draw_number_of_runs(mean, shape),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("runs", [[Gaussian(1.0)], [(1.0, 2)], [(Gaussian(1.0), math.nan)]])
def test_illegal_runs_are_refused(runs):
    with pytest.raises(ValueError, match=r"pairs \(event, count\)|count must be"):
        RepeatAndSelect(runs, 10, 1)


@pytest.mark.parametrize(("mean", "shape"), [(3.0, 1.0), (3.0, 0.0), (3.0, -0.5), (3.0, 2.5)])
def test_the_rate_gives_the_mean(mean, shape):
    gamma = success_rate(mean, shape)
    slow = negative_binomial_pmf(mean, shape)
    assert slow[1] / slow[0] == pytest.approx((1 - gamma) * (1 + shape) / 2, rel=1e-6)
    if shape > 0:
        law = stats.nbinom(shape, gamma)
        assert law.mean() / law.sf(0) == pytest.approx(mean)


@pytest.mark.parametrize("mean", [1 + 1e-10, 1.0001, 1e3, 1e12, 1e60])
@pytest.mark.parametrize("shape", [-0.7, -1e-15, 0.0, 1e-300, 1.0, 50.0])
def test_the_rate_is_exact_over_many_orders_of_magnitude(mean, shape):
    gamma = success_rate(mean, shape)
    if shape == 1.0:
        assert gamma == pytest.approx(1 / mean)
    elif abs(shape) < 1e-9:
        assert (1 - gamma) / gamma / -math.log(gamma) == pytest.approx(mean, rel=1e-4)
    else:
        value = shape * (1 - gamma) / gamma / -math.expm1(shape * math.log(gamma))
        assert value == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("shape", [-0.5, 0.0, 1.0, 2.5, math.inf])
def test_numbers_of_runs_have_their_distribution_and_no_other(shape):
    mean, draws, classes = 4.0, 6000, 12
    drawn = np.array([draw_number_of_runs(mean, shape) for _ in range(draws)])

    def p_value(mean):
        if shape == math.inf:
            pmf, first = stats.poisson(mean).pmf(np.arange(classes)), 0
        else:
            pmf, first = negative_binomial_pmf(mean, shape)[:classes], 1
        observed = np.bincount(drawn - first, minlength=classes)[:classes]
        expected = np.append(pmf, 1 - pmf.sum()) * draws
        return stats.chisquare(np.append(observed, draws - observed.sum()), expected).pvalue

    assert p_value(mean) > 1e-6
    assert p_value(2 * mean) < 1e-6
    assert p_value(mean / 2) < 1e-6


def test_seeding_the_global_generators_does_not_make_the_number_known():
    drawn = set()
    for _ in range(20):
        np.random.seed(0)
        drawn.add(draw_number_of_runs(1e3, 1.0))
    assert len(drawn) > 1
