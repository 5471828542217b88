"""Declared guarantees: against dp-accounting, closed forms and what they must dominate."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import common, privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
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
from lightning_dp.accounting.events import event_from_dict
from lightning_dp.accounting.external import Declared
from lightning_dp.accounting.guards import GDPGuard, RDPGuard
from lightning_dp.accounting.pld import epsilon_curve

PLD, RDP = PLDAccountant(), StreamingRDPAccountant()
STEPS = (PoissonGaussian(1.0, 0.02), 100)


def approximate(epsilon, delta=0.0, relation="add_remove", what="a table"):
    return ApproximateDP(epsilon, delta, relation=relation, what=what)


def zcdp(rho, relation="add_remove", what="the census"):
    return ZCDP(rho, relation=relation, what=what)


def dp_accounting_epsilon(guarantees, steps, delta, h=1e-3):
    """Google's PLD of (ε, δ) guarantees with their counts, and subsampled Gaussians."""
    parts = [
        privacy_loss_distribution.from_privacy_parameters(
            common.DifferentialPrivacyParameters(*each), value_discretization_interval=h
        ).self_compose(n)
        for each, n in guarantees
    ]
    parts += [
        privacy_loss_distribution.from_gaussian_mechanism(
            event.pair[0], value_discretization_interval=h, sampling_prob=event.pair[1]
        ).self_compose(n)
        for event, n in steps
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total.compose(part)
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
def test_beside_steps_it_costs_what_dp_accounting_says(guarantees):
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


@pytest.mark.parametrize("t", [0.3, 1.0, 2.5])
def test_beside_full_batches_it_is_the_sum_over_all_answers(t):
    history = [(Gaussian(2.0), 1), (approximate(0.4, 1e-4), 2), (approximate(0.9), 1)]
    exact = 2e-4 - 1e-8 + (1 - 1e-4) ** 2 * yes_no([0.4, 0.4, 0.9], t, gaussian_delta(0.5))
    assert exact <= PLD.delta(history, t) <= exact * 1.002
    assert t <= PLD.epsilon(history, exact) <= t * 1.001


@pytest.mark.parametrize("t", [0.0, 0.3, 1.1, 2.4])
def test_alone_it_is_the_sum_over_all_answers(t):
    epsilons, deltas = [0.3, 0.8, 1.4], [1e-3, 0.0, 2e-3]
    history = [(approximate(e, d), 1) for e, d in zip(epsilons, deltas, strict=True)]
    lost = 1 - math.prod(1 - d for d in deltas)
    exact = lost + (1 - lost) * yes_no(epsilons, t)
    assert exact <= PLD.delta(history, t) <= exact * 1.001 + 1e-9
    assert PLD.epsilon(history, exact) == pytest.approx(t, abs=2e-3)
    assert RDP.delta(history, t) >= exact


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
    ours = Declared.of(entries, "add_remove").divergence(np.array(orders))
    np.testing.assert_allclose(ours, theirs._rdp, rtol=1e-9)


SOME_RHO = [
    pytest.param(0.003, marks=pytest.mark.slow),
    0.1,
    pytest.param(1.0, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("rho", SOME_RHO)
@pytest.mark.parametrize("steps", [[], [STEPS]], ids=["alone", "beside steps"])
def test_zcdp_costs_no_less_than_anything_that_is_zcdp(rho, steps):
    """Gaussians and yes-no questions that are ρ-zCDP: it dominates them, and not by far."""
    value = PLD.epsilon([*steps, (zcdp(rho), 1)], 1e-5)
    gaussian = PLD.epsilon([*steps, (Gaussian(1 / math.sqrt(2 * rho)), 1)], 1e-5)
    question = PLD.epsilon([*steps, (approximate(math.sqrt(2 * rho)), 1)], 1e-5)
    assert max(gaussian, question) < value < 1.35 * gaussian
    assert value <= RDP.epsilon([*steps, (zcdp(rho), 1)], 1e-5)
    for t in (0.01, 2.0):
        ours = PLD.delta([*steps, (zcdp(rho), 1)], t)
        assert ours >= PLD.delta([*steps, (Gaussian(1 / math.sqrt(2 * rho)), 1)], t)


def test_rho_adds_up():
    assert PLD.epsilon([(zcdp(0.01), 10)], 1e-5) == pytest.approx(
        PLD.epsilon([(zcdp(0.1), 1)], 1e-5)
    )
    known = 0.1 + 2 * math.sqrt(0.1 * math.log(1e5))  # Bun and Steinke, Proposition 1.3
    assert 0.7 * known < PLD.epsilon([(zcdp(0.1), 1)], 1e-5) < known


# -- the relation ------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", [PLD, RDP], ids=["PLD", "RDP"])
def test_two_changes_cost_what_group_privacy_says(accountant):
    doubled = [
        (approximate(1.0, 1e-7 * (1 + math.exp(0.5)), "replace_one"), 1),
        (zcdp(0.2, "replace_one"), 1),
        STEPS,
    ]
    stated = [(approximate(0.5, 1e-7), 1), (zcdp(0.05), 1), STEPS]
    assert accountant.epsilon(stated, 1e-5, "replace_one") == pytest.approx(
        accountant.epsilon(doubled, 1e-5, "replace_one"), rel=1e-9
    )


@pytest.mark.parametrize("accountant", [PLD, RDP], ids=["PLD", "RDP"])
@pytest.mark.parametrize("make", [approximate, zcdp])
def test_a_guarantee_of_exchange_says_nothing_about_removal(accountant, make):
    history = [STEPS, (make(0.5, relation="replace_one"), 1)]
    assert 0 < accountant.epsilon(history, 1e-5, "replace_one") < math.inf
    for ask in (accountant.epsilon, accountant.delta):
        with pytest.raises(ValueError, match="nothing about adding or removing"):
            ask(history, 1e-5, "add_remove")


# -- budgets -----------------------------------------------------------------------------------

SPENT = [(approximate(0.5, 1e-7), 1), (zcdp(0.02), 1)]


@pytest.mark.parametrize("shape", [lambda t: 1.0, lambda t: 1.0 + t % 4], ids=["one", "four"])
@pytest.mark.parametrize("accountant", [PLD, RDP], ids=["PLD", "RDP"])
def test_calibration_leaves_room_for_what_was_spent(shape, accountant):
    z = calibrate(shape, 0.02, 200, 3.0, 1e-5, accountant=accountant, spent=SPENT)
    plan = [(PoissonGaussian(z * shape(t), 0.02), 1) for t in range(200)]
    assert 0.999 * 3.0 <= accountant.epsilon([*SPENT, *plan], 1e-5) <= 3.0
    assert z > 1.05 * calibrate(shape, 0.02, 200, 3.0, 1e-5, accountant=accountant)


def test_nothing_is_left_beside_a_guarantee_that_takes_all_of_delta():
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
        with pytest.raises(ValueError, match="no Gaussian release"):
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


# -- as data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("event", [approximate(0.5, 1e-7), zcdp(0.1, "replace_one")], ids=repr)
def test_it_is_read_as_it_was_written(event):
    assert event_from_dict(json.loads(json.dumps(event.to_dict()))) == event


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: approximate(math.nan), "epsilon=nan"),
        (lambda: approximate(math.inf), "epsilon=inf"),
        (lambda: approximate(-0.1), "epsilon=-0.1"),
        (lambda: approximate(1.0, 1.0), "delta=1.0"),
        (lambda: approximate(1.0, math.nan), "delta=nan"),
        (lambda: zcdp(math.nan), "rho=nan"),
        (lambda: zcdp(-1.0), "rho=-1.0"),
        (lambda: zcdp(0.1, "zero_out"), "relation='zero_out'"),
        (lambda: zcdp(0.1, what=" "), "what=' '"),
        (lambda: approximate(0.1, what="two\nlines"), "one line"),
    ],
)
def test_what_is_no_guarantee_is_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


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
