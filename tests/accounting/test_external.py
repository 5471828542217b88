"""Declared guarantees: against dp-accounting, closed forms and what they must dominate."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import common, privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, ndtr

from lightning_dp.accounting import (
    ZCDP,
    ApproximateDP,
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    calibrate,
)
from lightning_dp.accounting.calibration import affordable_steps
from lightning_dp.accounting.external import Declared
from lightning_dp.accounting.guards import GDPGuard, RDPGuard
from lightning_dp.accounting.pld import epsilon_curve
from lightning_dp.accounting.rdp import declared_divergence

PLD, RDP = PLDAccountant(), StreamingRDPAccountant()
STEPS = (PoissonGaussian(1.0, 0.02), 100)
each_accountant = pytest.mark.parametrize("accountant", [PLD, RDP], ids=["PLD", "RDP"])


def approximate(epsilon, delta=0.0, relation="add_remove", what="a table"):
    return ApproximateDP(epsilon, delta, relation=relation, what=what)


def zcdp(rho, relation="add_remove", what="the census"):
    return ZCDP(rho, relation=relation, what=what)


def dp_accounting_epsilon(guarantees, steps, delta, h=1e-3):
    """Google's PLD of (ε, δ) guarantees with their counts, and subsampled Gaussians."""
    total = privacy_loss_distribution.identity(value_discretization_interval=h)
    for each, n in guarantees:
        parameters = common.DifferentialPrivacyParameters(*each)
        part = privacy_loss_distribution.from_privacy_parameters(
            parameters, value_discretization_interval=h
        )
        total = total.compose(part.self_compose(n))
    for event, n in steps:
        part = privacy_loss_distribution.from_gaussian_mechanism(
            event.pair[0], value_discretization_interval=h, sampling_prob=event.pair[1]
        )
        total = total.compose(part.self_compose(n))
    return total.get_epsilon_for_delta(delta)


@pytest.mark.parametrize(
    "guarantees",
    [
        [((0.5, 1e-7), 1)],
        [((2.0, 0.0), 1)],
        [((0.1, 1e-7), 20), ((0.7, 0.0), 2)],
        [((0.0, 3e-6), 2)],
    ],
    ids=["one", "pure", "many", "nothing but delta"],
)
def test_next_to_steps_it_costs_as_dp_accounting_computes(guarantees):
    history = [STEPS, *((approximate(*each), n) for each, n in guarantees)]
    value = PLD.epsilon(history, 1e-5)
    assert value == pytest.approx(dp_accounting_epsilon(guarantees, [STEPS], 1e-5), rel=2e-3)
    assert value <= RDP.epsilon(history, 1e-5) < 1.4 * value


def yes_no(epsilons, t, rest=lambda t: max(0.0, -math.expm1(t))):
    """delta at t of several yes-no questions by all of their answers, and of ``rest``."""
    total = 0.0
    for answers in itertools.product((1, -1), repeat=len(epsilons)):
        mass = np.prod([expit(a * e) for a, e in zip(answers, epsilons, strict=True)])
        total += mass * rest(t - sum(a * e for a, e in zip(answers, epsilons, strict=True)))
    return total


def gaussian_delta(mu):
    """delta(t) of one Gaussian release, also for t < 0."""
    return lambda t: ndtr(mu / 2 - t / mu) - math.exp(t) * ndtr(-mu / 2 - t / mu)


guarantees = st.lists(
    st.tuples(st.floats(0.05, 1.5), st.one_of(st.just(0.0), st.floats(1e-6, 3e-3))),
    min_size=1,
    max_size=4,
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(guarantees=guarantees, t=st.floats(0.0, 3.0), z=st.one_of(st.none(), st.floats(1.0, 5.0)))
def test_it_is_the_sum_over_all_answers(guarantees, t, z):
    """Alone, and next to full batches."""
    history = [(approximate(e, d), 1) for e, d in guarantees]
    epsilons, lost = [e for e, _ in guarantees], 1 - math.prod(1 - d for _, d in guarantees)
    if z is None:
        pure = yes_no(epsilons, t)
    else:
        history.append((Gaussian(z), 1))
        pure = yes_no(epsilons, t, gaussian_delta(1 / z))
    exact = lost + (1 - lost) * pure
    assert exact * (1 - 1e-9) <= PLD.delta(history, t) <= exact * 1.004 + 1e-7
    assert RDP.delta(history, t) >= exact * (1 - 1e-9)
    if pure > 1e-5:
        assert t * (1 - 1e-9) <= PLD.epsilon(history, exact) <= t * 1.001 + 3e-3


def test_a_single_guarantee_is_what_it_says():
    event = approximate(0.5, 1e-6)
    assert PLD.epsilon([(event, 1)], 1e-6) == 0.5
    assert PLD.delta([(event, 1)], 0.5) == pytest.approx(1e-6)
    assert PLD.epsilon([(event, 1)], 9e-7) == math.inf
    assert PLD.epsilon([(event, 3)], 3e-6) == pytest.approx(1.5)


def test_renyi_divergences_are_those_of_dp_accounting():
    orders = [1.5, 2.0, 8.0, 64.0]
    exchange = rdp_privacy_accountant.NeighborRel.REPLACE_ONE
    theirs = rdp_privacy_accountant.RdpAccountant(orders, exchange)
    theirs.compose(dp_event.ZCDpEvent(0.1), 3)
    for epsilon, count in ((0.3, 2), (1e-4, 1), (3.0, 1)):
        # with k = 2 answers and noise parameter p, the truth is told with probability 1 - p / 2
        theirs.compose(dp_event.RandomizedResponseDpEvent(2 * expit(-epsilon), 2), count)
    entries = [(zcdp(0.1), 3), (approximate(0.3), 2), (approximate(1e-4), 1), (approximate(3.0), 1)]
    ours = declared_divergence(Declared.of(entries, "add_remove"), "add_remove", np.array(orders))
    np.testing.assert_allclose(ours, theirs._rdp, rtol=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("steps", [[], [STEPS]], ids=["alone", "next to steps"])
@settings(max_examples=3, deadline=None, derandomize=True)
@given(log_rho=st.floats(-2.5, 0))
def test_zcdp_costs_no_less_than_anything_that_is_zcdp(steps, log_rho):
    """Gaussians and yes-no questions that are ρ-zCDP: it dominates them, and not by far."""
    rho = 10**log_rho
    entry, like = (zcdp(rho), 1), (Gaussian(1 / math.sqrt(2 * rho)), 1)
    value = PLD.epsilon([*steps, entry], 1e-5)
    gaussian = PLD.epsilon([*steps, like], 1e-5)
    question = PLD.epsilon([*steps, (approximate(math.sqrt(2 * rho)), 1)], 1e-5)
    assert max(gaussian, question) < value < 1.35 * gaussian
    assert value <= RDP.epsilon([*steps, entry], 1e-5)
    for t in (0.01, 2.0):
        assert PLD.delta([*steps, entry], t) >= PLD.delta([*steps, like], t)


@pytest.mark.parametrize("step", [Gaussian(5.0), PoissonGaussian(1.0, 0.01)], ids=str)
@pytest.mark.parametrize("number", [0.01, 0.1, 1.0])
def test_guarantees_of_one_number_are_not_taken_for_each_other(step, number):
    together = PLD.epsilon([(step, 1), (zcdp(number), 1), (approximate(number), 1)], 1e-5)
    beside = approximate(number * (1 + 1e-9))
    assert together == pytest.approx(PLD.epsilon([(step, 1), (zcdp(number), 1), (beside, 1)], 1e-5))
    alone = PLD.epsilon([(step, 1), (zcdp(number), 1)], 1e-5)
    assert alone < together < alone + 1.001 * number + 1e-9


@pytest.mark.parametrize("step", [Gaussian(1e160), PoissonGaussian(1e300, 0.5)])
def test_any_noise_may_be_next_to_a_guarantee(step):
    table = (approximate(0.5, 1e-7), 1)
    alone = PLD.epsilon([table], 1e-5)
    assert PLD.epsilon([table, (step, 3)], 1e-5) == pytest.approx(alone, rel=1e-9)
    assert 1e-7 <= PLD.delta([table, (step, 3)], 0.5) < 4e-7
    assert epsilon_curve(step, [0, 3], 1e-5, spent=[table, STEPS])[1] < 3.0


def test_where_only_delta_is_declared_it_is_all_that_is_spent():
    lost = [(approximate(0.0, 1e-8), 2)]
    assert PLD.epsilon(lost, 1e-5) == 0 and PLD.epsilon(lost, 1e-8) == math.inf
    assert PLD.profile(lost, (0.0, 1.0)) == pytest.approx([2e-8, 2e-8], rel=1e-7)
    assert affordable_steps(Gaussian(10.0), 100, 1.0, 1e-5, spent=lost) == 7


def test_rho_adds_up():
    ten, one = (PLD.epsilon([entry], 1e-5) for entry in ((zcdp(0.01), 10), (zcdp(0.1), 1)))
    assert ten == pytest.approx(one)
    known = 0.1 + 2 * math.sqrt(0.1 * math.log(1e5))  # Bun and Steinke, Proposition 1.3
    assert 0.7 * known < one < known


@each_accountant
def test_two_changes_cost_what_group_privacy_says(accountant):
    doubled = [
        (approximate(1.0, 1e-7 * (1 + math.exp(0.5)), "replace_one"), 1),
        (zcdp(0.2, "replace_one"), 1),
        STEPS,
    ]
    stated = [(approximate(0.5, 1e-7), 1), (zcdp(0.05), 1), STEPS]
    wanted = pytest.approx(accountant.epsilon(doubled, 1e-5, "replace_one"), rel=1e-9)
    assert accountant.epsilon(stated, 1e-5, "replace_one") == wanted


@each_accountant
@pytest.mark.parametrize("make", [approximate, zcdp])
def test_a_guarantee_of_exchange_says_nothing_about_removal(accountant, make):
    history = [STEPS, (make(0.5, relation="replace_one"), 1)]
    assert 0 < accountant.epsilon(history, 1e-5, "replace_one") < math.inf
    for ask in (accountant.epsilon, accountant.delta):
        with pytest.raises(ValueError, match="holds for replacing a record only"):
            ask(history, 1e-5, "add_remove")


# -- budgets -----------------------------------------------------------------------------------

SPENT = [(approximate(0.5, 1e-7), 1), (zcdp(0.02), 1)]


@pytest.mark.parametrize("shape", [lambda t: 1.0, lambda t: 1.0 + t % 4], ids=["one", "four"])
@each_accountant
def test_calibration_leaves_room_for_what_was_spent(shape, accountant):
    z = calibrate(shape, 0.02, 200, 3.0, 1e-5, accountant=accountant, spent=SPENT)
    plan = [(PoissonGaussian(z * shape(t), 0.02), 1) for t in range(200)]
    assert 0.999 * 3.0 <= accountant.epsilon([*SPENT, *plan], 1e-5) <= 3.0
    assert z > 1.05 * calibrate(shape, 0.02, 200, 3.0, 1e-5, accountant=accountant)


def test_nothing_is_left_by_a_guarantee_that_takes_all_of_delta():
    with pytest.raises(ValueError, match="nothing is left"):
        calibrate([1.0], 0.02, 1, 3.0, 1e-5, spent=[(approximate(0.1, 1e-5), 1)])


def test_steps_are_counted_to_the_last_that_fits():
    event = PoissonGaussian(2.0, 0.2)
    n = affordable_steps(event, 10**6, 3.0, 1e-5, spent=SPENT)
    costs = [PLD.epsilon([*SPENT, (event, each)], 1e-5) for each in (n, n + 1)]
    assert costs[0] <= 3.0 < costs[1]


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_a_curve_starts_with_what_was_spent(relation):
    event, lengths = PoissonGaussian(1.0, 0.02), [0, 1, 30, 300]
    curve = epsilon_curve(event, lengths, 1e-5, relation, spent=SPENT)
    alone = [PLD.epsilon([*SPENT, (event, n)], 1e-5, relation) for n in lengths]
    np.testing.assert_allclose(curve, alone, rtol=2e-3)
    assert curve[0] == alone[0] > 1.0


def test_the_gdp_guard_refuses_what_it_cannot_hold():
    for spent in SPENT:
        with pytest.raises(ValueError, match="must be a Gaussian release"):
            GDPGuard(3.0, 1e-5, "add_remove", [spent])


@pytest.mark.parametrize("event", [PoissonGaussian(1.0, 0.02), Gaussian(20.0)], ids=str)
def test_the_rdp_guard_stops_where_renyi_accounting_does(event):
    guard = RDPGuard(3.0, 1e-5, "add_remove", SPENT, [(event, 150)])
    steps = 0
    while guard.fits(lambda: event):
        guard.book(event)
        steps += 1
    spent, more = ([*SPENT, (event, n)] for n in (steps, math.ceil(steps * 1.1)))
    assert RDP.epsilon(spent, 1e-5) <= 3.0 * (1 + 1e-9) < RDP.epsilon(more, 1e-5)
    assert guard.claim(1e-5) == pytest.approx(3.0)


def test_its_words_state_no_less_than_was_declared():
    numbers = approximate(1.2345644, 1.2345644e-7), zcdp(0.12345644)
    assert [each.declared for each in numbers] == [
        "a table: (1.23457, 1.23457e-07)-DP (add_remove)",
        "the census: 0.123457-zCDP (add_remove)",
    ]


def test_it_counts_once_wherever_it_is_declared(books, tmp_path):
    paths = []
    for _ in range(2):
        ledger = books.ledger_with(None)
        ledger.declare(approximate(0.5))
        ledger.declare(approximate(0.5))
        ledger.end()
        ledger.begin("fit", tmp_path)
        ledger.charge(Gaussian(5.0))
        ledger.end()
        assert ledger.steps == 1 and books.counts(ledger)[approximate(0.5)] == 1
        paths.append(books.journal_of(ledger))
    merged = books.ledger_with(None)
    for path in paths:
        state = {"id": path.stem, "journal": str(path), "runs": {}}
        merged.merge(books.restored(state, tmp_path).runs)
    assert dict(merged.runs.external) == {approximate(0.5): 1}
    merged.declare(approximate(0.5, what="another table"))
    merged.declare(approximate(0.6))
    assert len(merged.runs.external) == 3
