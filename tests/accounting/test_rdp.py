"""Streaming RDP against integration, Opacus and dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis.rdp import compute_rdp
from scipy.stats import norm

from lightning_dp.accounting import Gaussian, PoissonGaussian, StreamingRDPAccountant
from lightning_dp.accounting.rdp import total_divergence
from lightning_dp.accounting.steps import Steps

EPSILON = StreamingRDPAccountant().epsilon


def divergence(z: float, q: float, order: float, relation: str = "add_remove") -> float:
    step = Steps(np.array([z]), np.array([q]), np.ones(1))
    return float(total_divergence(step, relation, np.array([order]))[0])


def integral(z: float, q: float, order: float, relation: str) -> float:
    """The Rényi divergence by the definition."""
    x = np.linspace(-12 * z - 1, 12 * z + 2 * order, 200_001)
    base = (1 - q) * norm.pdf(x, 0, z)
    new, old = (base + q * norm.pdf(x, at, z) for at in (1, 0 if relation == "add_remove" else -1))
    values = np.exp(order * np.log(new) - (order - 1) * np.log(old))
    return math.log(values.sum() * (x[1] - x[0])) / (order - 1)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.floats(0.7, 3.0), st.floats(0.01, 0.9), st.floats(1.2, 6.0))
def test_a_divergence_is_the_integral(z, q, order):
    for relation in ("add_remove", "replace_one"):
        exact = integral(z, q, order, relation)
        found = divergence(z, q, order, relation)
        assert exact * (1 - 1e-6) - 1e-9 <= found <= exact * 1.001 + 1e-9


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.floats(0.5, 4.0), st.floats(0.01, 0.9), st.one_of(st.floats(1.05, 40), st.integers(2, 40))
)
def test_a_divergence_is_that_of_opacus(z, q, order):
    (value,) = np.atleast_1d(compute_rdp(q=q, noise_multiplier=z, steps=1, orders=[float(order)]))
    assert divergence(z, q, float(order)) == pytest.approx(float(value), rel=1e-5, abs=1e-9)


def test_full_batches_and_large_orders():
    assert divergence(3.0, 1.0, 7.0) == pytest.approx(7 / 18)
    assert divergence(3.0, 1.0, 7.0, "replace_one") == pytest.approx(4 * 7 / 18)
    assert EPSILON([(Gaussian(1.0), 10)], 1e-5) > 17.857
    # Opacus stops at order 63 and cannot show less than about 0.1.
    assert EPSILON([(PoissonGaussian(50.0, 1e-3), 100)], 1e-5) < 0.01


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.floats(0.4, 1.0), st.floats(1e-3, 0.3), st.integers(30, 1000), st.sampled_from([1e-8, 1e-5])
)
def test_where_small_orders_are_best_epsilon_is_not_above_dp_accountings(z, q, steps, delta):
    orders = np.concatenate((np.arange(1.4, 11.0, 0.1), np.arange(11.0, 64.0)))
    theirs = rdp_privacy_accountant.RdpAccountant(orders=orders)
    theirs.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), steps)
    assert EPSILON([(PoissonGaussian(z, q), steps)], delta) <= 1.002 * theirs.get_epsilon(delta)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("order", [1.3, 4.0, 40.0])
def test_the_sum_over_many_distinct_steps_is_a_close_upper_bound(order, relation):
    noise = np.geomspace(0.7, 5, 400)
    rates = np.geomspace(0.001, 0.3, 400)[::-1]
    together = total_divergence(Steps(noise, rates, np.ones(400)), relation, np.array([order]))
    pairs = zip(noise, rates, strict=True)
    one_by_one = math.fsum(divergence(z, q, order, relation) for z, q in pairs)
    assert (1 - 1e-14) * one_by_one <= together[0] <= 1.01 * one_by_one  # up to rounding


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.floats(-0.3, 6), st.floats(-9, -0.01), st.sampled_from([512, 4096, 65_536]))
def test_a_few_terms_of_a_large_order_are_all_of_them(log_z, log_q, order):
    z, q = 10**log_z, 10**log_q
    few = divergence(z, q, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_dp.accounting.rdp._MANY", math.inf)
        patch.setattr("lightning_dp.accounting.rdp._SMALL", 0.0)
        every = divergence(z, q, order)
    assert every * (1 - 1e-9) <= few <= every * (1 + 1e-5) < math.inf
