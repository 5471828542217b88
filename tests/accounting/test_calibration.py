"""From budgets to noise: never above, hardly below."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_dp._refusals import PrivacyWarning
from lightning_dp.accounting import (
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    calibrate,
    epsilon,
)
from lightning_dp.accounting.base import AbstractAccountant
from lightning_dp.accounting.calibration import affordable_steps, alike, calibrate_steps
from lightning_dp.accounting.steps import CheckedHistory

relations = st.sampled_from(["add_remove", "replace_one"])
targets = st.floats(-3, 1.7).map(lambda x: 10**x)
deltas = st.floats(-9, -5).map(lambda x: 10**x)
RDP = StreamingRDPAccountant()


def constant(_: int) -> float:
    return 1.0


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.floats(0.3, 4.0), min_size=1, max_size=5),
    q=st.one_of(st.floats(1e-3, 0.5), st.just(1.0)),
    repeats=st.integers(1, 200),
    target=targets,
    at=deltas,
    relation=relations,
)
def test_a_scale_uses_the_budget_and_never_more(shape, q, repeats, target, at, relation):
    scale = calibrate(shape * repeats, q, len(shape) * repeats, target, at, relation)
    assert scale == calibrate(
        lambda t: shape[t % len(shape)], lambda t: q, len(shape) * repeats, target, at, relation
    )
    value = epsilon([(PoissonGaussian(scale * each, q), repeats) for each in shape], at, relation)
    assert target * (1 - 1e-3) <= value <= target


class Plain(AbstractAccountant):
    """An accountant of the required methods alone."""

    name = "plain"

    def epsilon(self, history, delta, relation="add_remove"):
        return RDP.epsilon(history, delta, relation)

    def delta(self, history, epsilon, relation="add_remove"):
        return RDP.delta(history, epsilon, relation)


SPENT = [(PoissonGaussian(1.0, 0.01), 300), (Gaussian(9.0), 1)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("accountant", "spent"),
    [(PLDAccountant(), []), (PLDAccountant(), SPENT), (RDP, []), (Plain(), SPENT)],
)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(last=st.floats(0.1, 8.0), steps=st.integers(33, 300), target=st.floats(2.0, 10.0))
def test_many_distinct_values_after_others_use_the_budget(accountant, spent, last, steps, target):
    shape = np.geomspace(1.0, last, steps).tolist()
    scale = calibrate(shape, 0.01, steps, target, 1e-6, accountant=accountant, spent=spent)
    plan = [(PoissonGaussian(scale * value, 0.01), 1) for value in shape]
    assert target * (1 - 1e-3) <= accountant.epsilon([*spent, *plan], 1e-6) <= target


@pytest.mark.few(1)
@pytest.mark.parametrize(("last", "scale"), [(1.0, 0.8138), (0.25, 2.535), (1 / 30, 17.77)])
def test_schedules_from_the_documents(last, scale):
    found = calibrate(lambda t: last ** (t / 999), 0.01, 1000, 3.0, 1e-5)
    assert found == pytest.approx(scale, rel=3e-3)


def test_a_budget_below_delta_is_met_by_the_noise_of_the_central_limit():
    start = time.thread_time()
    mu, at = 0.1 * math.sqrt(100) / calibrate(constant, 0.1, 100, 1e-6, 1e-5), 1e-6
    assert time.thread_time() - start < 10
    delta = stats.norm.cdf(mu / 2 - at / mu) - math.exp(at) * stats.norm.cdf(-mu / 2 - at / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("q", [1.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_budget_that_no_noise_meets_is_refused_with_the_least_there_is(q):
    least = RDP.epsilon([(PoissonGaussian(1e12, q), 100)], 1e-8)
    message = rf"no noise keeps the steps within epsilon=1e-06 at delta=1e-08: .* {least:.6g}"
    with pytest.raises(ValueError, match=message):
        calibrate(constant, q, 100, 1e-6, 1e-8, accountant=RDP)
    scale = calibrate(constant, q, 100, 1.01 * least, 1e-8, accountant=RDP)
    assert RDP.epsilon([(PoissonGaussian(scale, q), 100)], 1e-8) <= 1.01 * least


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"steps": 10**12}, "steps"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": 1e-300}, r"epsilon=1e-300 is below 1e-09.*Raise epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"shape": [1.0, 1.0]}, "2 values for 3 steps"),
        ({"shape": [1.0, 0.0, 1.0]}, "finite and positive"),
        ({"shape": [1.0, math.nan, 1.0]}, "finite and positive"),
        ({"shape": None}, "shape"),
        ({"shape": np.array(1.0)}, "shape"),
        ({"spent": 3}, "spent"),
        ({"spent": [3]}, "spent"),
        ({"spent": [(Gaussian(1.0), 10)]}, "nothing is left"),
        ({"accountant": "PLD"}, "accountant"),
        ({"accountant": PLDAccountant}, "accountant"),
        ({"relation": np.ones(3)}, "relation"),
        ({"sample_rate": 1e-6}, "no smallest noise"),
    ],
)
def test_illegal_arguments_are_refused_by_name(arguments, match):
    good = {"shape": constant, "sample_rate": 0.1, "steps": 3, "epsilon": 1.0, "delta": 1e-5}
    with pytest.raises((ValueError, TypeError), match=match):
        calibrate(**{**good, **arguments})


def test_a_delta_above_the_sample_rate_is_a_warning():
    with pytest.warns(PrivacyWarning, match="not below the sample rate 0.05"):
        calibrate([1.0] * 10, 0.05, 10, 2.0, 0.06)


def test_long_schedules_are_calibrated_with_few_evaluations(monkeypatch):
    sizes, full = [], PLDAccountant.epsilon

    def observed(self, history, *args):
        sizes.append(CheckedHistory.of(history).steps.counts.size)
        return full(self, history, *args)

    monkeypatch.setattr(PLDAccountant, "epsilon", observed)
    calibrate(np.exp(-2e-4 * np.arange(10_000)).tolist(), 0.01, 10_000, 3.0, 1e-6)
    assert sum(size > 100 for size in sizes) <= 4 and len(sizes) <= 20


@pytest.mark.parametrize(
    ("q", "steps", "target", "at", "relation"),
    [
        (1e-6, 100_000, 1e-9, 1e-12, "replace_one"),  # 5e7 points: losses of 1e-11
        (1e-9, 1, 1e-6, 1e-300, "add_remove"),
        (0.1, 1, 1e-9, 1e-12, "add_remove"),  # an estimate of 0
        (0.125, 16, 1e-6, 1e-5, "add_remove"),  # orders up to 65,536
    ],
)
def test_tiny_budgets_are_met_in_seconds(q, steps, target, at, relation):
    began = time.process_time()
    scale = calibrate_steps(alike(q, steps), target, at, relation)
    assert target * 0.5 <= epsilon([(PoissonGaussian(scale, q), steps)], at, relation) <= target
    assert time.process_time() - began < 20


@pytest.mark.parametrize("steps", [10**6, 10**18])
def test_steps_that_are_alike_cost_nothing_however_many(steps):
    scale = calibrate_steps(alike(1e-4, steps), 3.0, 1e-5)
    assert epsilon([(PoissonGaussian(scale, 1e-4), steps)], 1e-5) <= 3.0
    few = [1.0] * 100
    assert calibrate(few, 0.1, 100, 3.0, 1e-5) == calibrate_steps(alike(0.1, 100), 3.0, 1e-5)


# -- steps -------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    z=st.floats(0.8, 6.0),
    q=st.one_of(st.floats(0.01, 0.3), st.just(1.0)),
    growth=st.floats(0.0, 0.01),
    target=st.floats(0.3, 8.0),
    limit=st.integers(0, 1500),
)
def test_the_last_affordable_step_is_the_last(z, q, growth, target, limit):
    def plan(step: int) -> PoissonGaussian:
        return PoissonGaussian(z * (1 + growth * (step // 10)), q)

    n = affordable_steps(plan, limit, target, 1e-5)
    costs = [epsilon([plan(t) for t in range(m)], 1e-5) for m in (n, n + 1)]
    assert 0 <= n <= limit and costs[0] <= target
    assert n == limit or target < costs[1]
    if growth == 0 and n < limit:
        assert affordable_steps(plan(0), 10**9, target, 1e-5) == n


def test_what_was_spent_leaves_fewer_steps():
    event, spent = PoissonGaussian(1.0, 0.01), [(PoissonGaussian(1.0, 0.01), 1000)]
    both = affordable_steps(event, 10**6, 3.0, 1e-5)
    assert affordable_steps(event, 10**6, 3.0, 1e-5, spent=spent) == both - 1000
    for noise in (0.0, 0.1):
        assert affordable_steps(Gaussian(noise), 10, 1.0, 1e-5) == 0
    assert affordable_steps(event, 10, 1.0, 1e-5, spent=[(Gaussian(1.0), 100)]) == 0
    beyond = affordable_steps(Gaussian(1e12), 10**30, 1.0, 1e-5)  # floats have no such numbers
    assert beyond == pytest.approx(
        1e20 * affordable_steps(Gaussian(100.0), 10**30, 1.0, 1e-5), rel=1e-3
    )
    for limit in (-1, math.nan):
        with pytest.raises(ValueError, match="limit"):
            affordable_steps(Gaussian(1.0), limit, 1.0, 1e-5)
