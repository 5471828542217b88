"""One contract for every accountant, over random histories."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus_accountants import OpacusPRVAccountant, OpacusRDPAccountant

from lightning_dp.accounting import (
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    epsilon_text,
)
from lightning_dp.accounting.base import EpsilonCache, float32_above
from lightning_dp.accounting.events import PoissonRound

HISTORY = [(PoissonGaussian(1.1, 0.02), 150), (PoissonGaussian(0.9, 0.01), 200)]
OPACUS = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:(Optimal order is|divide by zero)")]

every_accountant = pytest.mark.parametrize(
    "accountant",
    [
        PLDAccountant(),
        StreamingRDPAccountant(),
        pytest.param(OpacusRDPAccountant(), marks=OPACUS),
        pytest.param(OpacusPRVAccountant(eps_error=0.05), marks=OPACUS),
    ],
    ids=lambda accountant: type(accountant).__name__,
)

examples = partial(settings, deadline=None, derandomize=True)
noises = st.floats(0.6, 20.0)
rates = st.one_of(st.floats(1e-3, 0.5), st.just(1.0))
steps = st.builds(PoissonGaussian, noises, rates)
histories = st.lists(st.tuples(steps, st.integers(1, 300)), min_size=1, max_size=3)


def error_of(accountant):
    """The relative error that an accountant may make either way."""
    return 0.2 if isinstance(accountant, OpacusPRVAccountant) else 1e-3


@pytest.mark.few(1)
@every_accountant
@examples(max_examples=7)
@given(history=histories, z=st.floats(1.0, 1.5), q=st.floats(0.3, 1.0), at=st.floats(-9, -3))
def test_less_noise_larger_rates_more_steps_and_smaller_deltas_cost_more(
    accountant, history, z, q, at
):
    delta = 10**at
    most = accountant.epsilon(history, delta) * (1 + error_of(accountant)) + 1e-9
    noisier = [(PoissonGaussian(z * e.noise_multiplier, e.sample_rate), n) for e, n in history]
    rarer = [(PoissonGaussian(e.noise_multiplier, q * e.sample_rate), n) for e, n in history]
    fewer = [(event, count // 2) for event, count in history]
    for other in (noisier, rarer, fewer, history[1:]):
        assert 0 <= accountant.epsilon(other, delta) <= most
    assert accountant.epsilon(history, 3 * delta) <= most


@pytest.mark.few(1)
@every_accountant
@examples(max_examples=7)
@given(history=histories, at=st.floats(-9, -3))
def test_delta_inverts_epsilon_and_falls(accountant, history, at):
    epsilon = accountant.epsilon(history, 10**at)
    if epsilon > 0.05 and not isinstance(accountant, OpacusPRVAccountant):
        assert accountant.delta(history, epsilon) == pytest.approx(10**at, rel=0.05)
        assert accountant.delta(history, 1.1 * epsilon) < accountant.delta(history, 0.9 * epsilon)
    assert type(epsilon) is type(accountant.delta(history, 1.0)) is float


@every_accountant
@examples(max_examples=7)
@given(history=histories, order=st.randoms(use_true_random=False))
def test_order_and_counting_have_no_meaning(accountant, history, order):
    """(e, n) is n times (e, 1), and a round on one sample is its pair."""
    apart = [(event, 1) for event, count in history for _ in range(count)]
    order.shuffle(apart)
    rounds = [
        (PoissonRound((2 * e.noise_multiplier,) * 4, e.sample_rate), n) for e, n in history[::-1]
    ]
    wanted = pytest.approx(accountant.epsilon(history, 1e-5), rel=1e-9, abs=1e-9)
    assert accountant.epsilon(apart, 1e-5) == wanted
    assert accountant.epsilon(rounds, 1e-5) == wanted


@every_accountant
def test_nothing_costs_nothing_and_no_noise_is_no_privacy(accountant):
    assert accountant.name
    for history in ([], [(Gaussian(1.0), 0)]):
        assert accountant.epsilon(history, 1e-5) == accountant.delta(history, 1.0) == 0.0
    for event in (Gaussian(0.0), PoissonGaussian(0.0, 0.01)):
        assert accountant.epsilon([*HISTORY, (event, 1)], 1e-5) == math.inf
        assert accountant.delta([*HISTORY, (event, 1)], 1.0) == 1.0


@pytest.fixture(scope="module")
def bracket(oracle):
    """Lower and upper bounds of dp_accounting for HISTORY."""
    pairs = [(event.pair, count) for event, count in HISTORY]
    return [oracle.dp_accounting_epsilons([1e-5], pairs, 1e-4, up)[0] for up in (False, True)]


@pytest.mark.few(1)
@every_accountant
def test_never_below_the_lower_oracle_nor_far_above_the_upper(accountant, bracket):
    low, high = bracket
    assert low < accountant.epsilon(HISTORY, 1e-5) < high * 1.35
    # Second oracle: Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu) = 1e-5 at mu = 1.
    assert 4.37717 <= accountant.epsilon([(Gaussian(2.0), 4)], 1e-5) < 4.37717 * 1.15


@every_accountant
def test_replacing_costs_more_than_removing_and_less_than_two_removals(accountant):
    doubled = accountant.epsilon([(Gaussian(1.0), 4)], 1e-5)
    assert accountant.epsilon([(Gaussian(2.0), 4)], 1e-5, "replace_one") == pytest.approx(doubled)
    if isinstance(accountant, OpacusRDPAccountant | OpacusPRVAccountant):
        with pytest.raises(ValueError, match="use PLDAccountant"):
            accountant.epsilon(HISTORY, 1e-5, "replace_one")
        return
    halved = [(PoissonGaussian(e.pair[0] / 2, e.pair[1]), n) for e, n in HISTORY]
    costs = [accountant.epsilon(HISTORY, 1e-5, r) for r in ("add_remove", "replace_one")]
    assert costs[0] < costs[1] < accountant.epsilon(halved, 1e-5)


@every_accountant
def test_illegal_arguments_are_refused_by_name(accountant):
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ValueError, match="delta="):
            accountant.epsilon(HISTORY, delta)
    for epsilon in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="epsilon="):
            accountant.delta(HISTORY, epsilon)
    for count in (-1, 1.5, math.nan, True, None):
        with pytest.raises(ValueError, match="count="):
            accountant.epsilon([(Gaussian(1.0), count)], 1e-5)
    for entry in (Gaussian(1.0), (1.0, 2), "ab", (Gaussian(1.0),)):
        with pytest.raises(ValueError, match=r"pairs \(event, count\)"):
            accountant.epsilon([entry], 1e-5)
    with pytest.raises(ValueError, match=r"relation=.* must be"):
        accountant.epsilon(HISTORY, 1e-5, "bounded")


@examples(max_examples=5)
@given(asked=st.lists(st.tuples(histories, st.sampled_from([1e-5, 1e-6])), min_size=1, max_size=4))
def test_a_cache_takes_no_value_for_another(asked):
    accountant = StreamingRDPAccountant()
    cache = EpsilonCache(accountant)
    for history, delta in [*asked, *asked]:
        for relation in ("add_remove", "replace_one"):
            assert cache.epsilon(history, delta, relation) == accountant.epsilon(
                history, delta, relation
            )


@examples(max_examples=200)
@given(st.floats(-9, 4))
def test_a_rounded_epsilon_is_never_below(log_epsilon):
    epsilon = 10.0**log_epsilon
    assert epsilon <= float(epsilon_text(epsilon)) <= epsilon * (1 + 1e-3) + 1e-15
    stored = np.float32(float32_above(epsilon))
    assert epsilon <= stored <= epsilon * (1 + 2e-7)


def test_a_budget_is_shown_as_it_was_given():
    for epsilon in (0.0, 0.1, 0.3, 1.0, 2.5, 3.0, 8.0, 10.0, 1234.0, 1e-5, math.inf):
        assert epsilon_text(epsilon) == f"{epsilon:g}"
    assert float32_above(math.inf) == math.inf


def test_accounting_works_where_torch_cannot_be_imported():
    """Accounting is numpy and scipy: it serves those who do not train here."""
    code = """
import sys
for name in ("torch", "lightning", "opacus", "torchmetrics", "flwr"):
    sys.modules[name] = None
import pkgutil, importlib
import lightning_dp.accounting as accounting
for module in pkgutil.iter_modules(accounting.__path__):
    importlib.import_module(f"lightning_dp.accounting.{module.name}")
history = [(accounting.PoissonGaussian(1.0, 0.01), 1000)]
print(round(accounting.epsilon(history, delta=1e-5), 2))
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "1.83\n"
