"""Streaming RDP against integration and Opacus."""

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant
from opacus.accountants.analysis.rdp import compute_rdp
from scipy import integrate
from scipy.stats import norm

from lightning_dp.accounting import Gaussian, PoissonGaussian, StreamingRDPAccountant
from lightning_dp.accounting.rdp import renyi_divergence, total_divergence
from lightning_dp.accounting.steps import Steps


@pytest.mark.parametrize("order", [1.05, 1.5, 2.0, 3.0, 16.0, 40.0])
@pytest.mark.parametrize(("z", "q"), [(1.0, 0.01), (0.5, 0.3), (4.0, 0.9)])
def test_divergence_is_opacus(z, q, order):
    (value,) = np.atleast_1d(compute_rdp(q=q, noise_multiplier=z, steps=1, orders=[order]))
    assert renyi_divergence(z, q, order) == pytest.approx(float(value), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("order", [1.2, 2.0, 5.0])
def test_divergence_is_the_integral(order):
    z, q = 0.8, 0.2

    def integrand(x):
        ratio = (1 - q) + q * math.exp((2 * x - 1) / (2 * z * z))
        return norm.pdf(x, 0, z) * ratio**order

    exact = math.log(integrate.quad(integrand, -10, 20, limit=500)[0]) / (order - 1)
    assert renyi_divergence(z, q, order) == pytest.approx(exact, rel=1e-7)


def test_full_batch_divergence_is_the_gaussian_one():
    assert renyi_divergence(3.0, 1.0, 7.0) == pytest.approx(7 / 18)
    assert renyi_divergence(3.0, 1.0, 7.0, "replace_one") == pytest.approx(4 * 7 / 18)


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0])
def test_replacement_divergence_bounds_the_integral_closely(order):
    z, q = 1.0, 0.1

    def integrand(x):
        base = (1 - q) * norm.pdf(x, 0, z)
        new, old = base + q * norm.pdf(x, 1, z), base + q * norm.pdf(x, -1, z)
        return old * (new / old) ** order

    exact = math.log(integrate.quad(integrand, -15, 25, limit=500)[0]) / (order - 1)
    assert exact * (1 - 1e-9) <= renyi_divergence(z, q, order, "replace_one") <= exact * 1.001


@pytest.mark.parametrize("order", [4096, 512.0])
def test_large_orders_do_not_overflow(order):
    assert 0 < renyi_divergence(50.0, 0.01, order) < math.inf


def test_orders_are_extended_for_small_epsilon():
    # Opacus stops at order 63 and cannot show less than about 0.1.
    assert StreamingRDPAccountant().epsilon([(PoissonGaussian(50.0, 1e-3), 100)], 1e-5) < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 0.1, 1.0), "order"),
        ((1.0, 0.1, math.nan), "order"),
        ((0.0, 0.1, 2.0), "noise_multiplier"),
        ((math.nan, 0.1, 2.0), "noise_multiplier"),
        ((1.0, 0.0, 2.0), "sample_rate"),
        ((1.0, math.nan, 2.0), "sample_rate"),
    ],
)
def test_illegal_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        renyi_divergence(*arguments)


def test_many_distinct_steps():
    history = [(PoissonGaussian(float(z), 0.01), 1) for z in np.geomspace(1, 3, 3000)]
    assert 1.0 < StreamingRDPAccountant().epsilon(history, 1e-5) < 5.0


def test_full_batch_is_above_exact_gdp():
    assert StreamingRDPAccountant().epsilon([(Gaussian(1.0), 10)], 1e-5) > 17.857


@pytest.mark.parametrize("delta", [1e-8, 1e-5])
@pytest.mark.parametrize(
    ("z", "q", "steps"),
    [(0.4, 0.01, 100), (0.5, 0.1, 30), (0.6, 1e-3, 1000), (0.8, 0.05, 500), (1.0, 0.3, 100)],
)
def test_where_small_orders_are_best_epsilon_is_not_above_dp_accountings(z, q, steps, delta):
    orders = np.concatenate((np.arange(1.4, 11.0, 0.1), np.arange(11.0, 64.0)))
    theirs = rdp_privacy_accountant.RdpAccountant(orders=orders)
    theirs.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), steps)
    ours = StreamingRDPAccountant().epsilon([(PoissonGaussian(z, q), steps)], delta)
    assert ours <= 1.001 * theirs.get_epsilon(delta)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("order", [1.3, 4.0, 40.0])
def test_the_sum_over_many_distinct_steps_is_a_close_upper_bound(order, relation):
    noise = np.geomspace(0.7, 5, 400)
    rates = np.geomspace(0.001, 0.3, 400)[::-1]
    together = total_divergence(Steps(noise, rates, np.ones(400)), relation, np.array([order]))
    pairs = zip(noise, rates, strict=True)
    one_by_one = math.fsum(renyi_divergence(z, q, order, relation) for z, q in pairs)
    assert (1 - 1e-14) * one_by_one <= together[0] <= 1.01 * one_by_one  # up to rounding


@pytest.mark.parametrize("order", [512, 4096, 65_536])
@pytest.mark.parametrize("q", [1e-9, 1e-3, 0.3, 0.99])
@pytest.mark.parametrize("z", [0.5, 30.0, 3e4, 1e6])
def test_a_few_terms_of_a_large_order_are_all_of_them(z, q, order, monkeypatch):
    few = renyi_divergence(z, q, order)
    monkeypatch.setattr("lightning_dp.accounting.rdp._MANY", math.inf)
    monkeypatch.setattr("lightning_dp.accounting.rdp._SMALL", 0.0)
    every = renyi_divergence(z, q, order)
    assert every * (1 - 1e-9) <= few <= every * (1 + 1e-5)
