"""From budgets to noise: never above, hardly below."""

import math
import time

import numpy as np
import pytest
from scipy import stats

from lightning_dp._warnings import PrivacyWarning
from lightning_dp.accounting import (
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    calibrate,
    epsilon,
)
from lightning_dp.accounting.calibration import affordable_steps, alike, calibrate_steps


def constant(_: int) -> float:
    return 1.0


def delta_of_mu(mu: float, at: float) -> float:
    """Delta of two normal distributions that lie mu apart, at an epsilon."""
    return stats.norm.cdf(mu / 2 - at / mu) - math.exp(at) * stats.norm.cdf(-mu / 2 - at / mu)


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("target", [1e-3, 0.1, 1.0, 8.0, 50.0])
@pytest.mark.parametrize(
    ("q", "steps", "at"), [(0.01, 1000, 1e-5), (1.0, 50, 1e-6), (0.5, 3, 1e-9)]
)
def test_scale_uses_the_budget_and_never_more(q, steps, at, target, relation):
    scale = calibrate(constant, q, steps, target, at, relation)
    value = epsilon([(PoissonGaussian(scale, q), steps)], at, relation)
    assert target * (1 - 1e-3) <= value <= target


@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        (constant, 0.8138),
        (lambda t: 0.25 ** (t / 999), 2.535),
        (lambda t: (1 / 30) ** (t / 999), 17.77),
    ],
)
def test_schedules_from_the_documents(shape, scale):
    assert calibrate(shape, 0.01, 1000, 3.0, 1e-5) == pytest.approx(scale, rel=3e-3)


def test_sequence_and_function_agree():
    values = [1.0, 0.9, 0.8, 0.7]
    by_function = calibrate(values.__getitem__, 0.2, 4, 1.0, 1e-5)
    assert calibrate(values, 0.2, 4, 1.0, 1e-5) == by_function


def test_spent_budget_is_taken_into_account():
    spent = [(PoissonGaussian(1.0, 0.01), 500)]
    scale = calibrate(constant, 0.01, 500, 2.0, 1e-5, spent=spent)
    value = epsilon([*spent, (PoissonGaussian(scale, 0.01), 500)], 1e-5)
    assert 2.0 * (1 - 1e-3) <= value <= 2.0
    assert scale > calibrate(constant, 0.01, 500, 2.0, 1e-5)


def test_other_accountants_calibrate_too():
    accountant = StreamingRDPAccountant()
    scale = calibrate(constant, 0.01, 1000, 3.0, 1e-5, accountant=accountant)
    value = accountant.epsilon([(PoissonGaussian(scale, 0.01), 1000)], 1e-5)
    assert 3.0 * (1 - 1e-3) <= value <= 3.0
    assert scale > 0.8138


def test_a_budget_below_delta_is_met_by_the_noise_of_the_central_limit():
    start = time.thread_time()
    scale = calibrate(constant, 0.1, 100, 1e-6, 1e-5)
    assert time.thread_time() - start < 10  # 0.8 s; the search had no end
    mu = 0.1 * math.sqrt(100) / scale
    assert delta_of_mu(mu, 1e-6) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("q", [1.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_budget_that_no_noise_meets_is_refused_with_the_least_there_is(q):
    accountant = StreamingRDPAccountant()
    least = accountant.epsilon([(PoissonGaussian(1e12, q), 100)], 1e-8)
    message = rf"no noise keeps the steps within epsilon=1e-06 at delta=1e-08: .* {least:.6g}"
    with pytest.raises(ValueError, match=message):
        calibrate(constant, q, 100, 1e-6, 1e-8, accountant=accountant)
    scale = calibrate(constant, q, 100, 1.01 * least, 1e-8, accountant=accountant)
    assert accountant.epsilon([(PoissonGaussian(scale, q), 100)], 1e-8) <= 1.01 * least


def test_exhausted_budget_is_refused():
    with pytest.raises(ValueError, match="nothing is left"):
        calibrate(constant, 0.01, 10, 1.0, 1e-5, spent=[(Gaussian(1.0), 10)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((constant, 0.01, 0, 1.0, 1e-5), "steps"),
        ((constant, 0.01, 1.5, 1.0, 1e-5), "steps"),
        ((constant, 0.01, 10, 0.0, 1e-5), "epsilon"),
        ((constant, 0.01, 10, math.nan, 1e-5), "epsilon"),
        ((constant, 0.01, 10, 1.0, 0.0), "delta"),
        ((constant, 0.0, 10, 1.0, 1e-5), "sample_rate"),
        (([1.0, 1.0], 0.01, 3, 1.0, 1e-5), "2 values for 3 steps"),
        (([1.0, 0.0], 0.01, 2, 1.0, 1e-5), "finite and positive"),
        (([1.0, math.nan], 0.01, 2, 1.0, 1e-5), "finite and positive"),
    ],
)
def test_illegal_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        calibrate(*arguments)


@pytest.mark.parametrize(
    ("event", "target"),
    [(PoissonGaussian(1.0, 0.01), 3.0), (Gaussian(30.0), 2.0), (PoissonGaussian(5.0, 0.3), 0.9)],
)
def test_last_affordable_step_is_the_last(event, target):
    n = affordable_steps(event, 10**9, target, 1e-5)
    assert epsilon([(event, n)], 1e-5) <= target < epsilon([(event, n + 1)], 1e-5)


def test_affordable_steps_of_a_changing_plan():
    def plan(step: int) -> PoissonGaussian:
        return PoissonGaussian(1.0 + 1 / (1 + step // 10), 0.02)

    n = affordable_steps(plan, 10**9, 1.5, 1e-5)
    costs = [epsilon([plan(t) for t in range(m)], 1e-5) for m in (n, n + 1)]
    assert costs[0] <= 1.5 < costs[1]


def test_limit_bounds_the_steps():
    assert affordable_steps(PoissonGaussian(1.0, 0.01), 100, 3.0, 1e-5) == 100
    assert affordable_steps(PoissonGaussian(1.0, 0.01), 0, 3.0, 1e-5) == 0


def test_nothing_is_affordable():
    assert affordable_steps(Gaussian(0.0), 10, 3.0, 1e-5) == 0
    assert affordable_steps(Gaussian(0.1), 10, 1.0, 1e-5) == 0
    spent = [(Gaussian(1.0), 100)]
    assert affordable_steps(PoissonGaussian(9.0, 0.01), 10, 1.0, 1e-5, spent=spent) == 0


def test_spent_budget_leaves_fewer_steps():
    event, spent = PoissonGaussian(1.0, 0.01), [(PoissonGaussian(1.0, 0.01), 1000)]
    whole = affordable_steps(event, 10**6, 3.0, 1e-5)
    assert affordable_steps(event, 10**6, 3.0, 1e-5, spent=spent) == whole - 1000


def test_illegal_limit_is_refused():
    with pytest.raises(ValueError, match="limit"):
        affordable_steps(Gaussian(1.0), -1, 1.0, 1e-5)
    with pytest.raises(ValueError, match="limit"):
        affordable_steps(Gaussian(1.0), math.nan, 1.0, 1e-5)


def test_calibration_with_many_distinct_values():
    shape = [0.3 ** (t / 1999) for t in range(2000)]
    scale = calibrate(shape, 0.01, 2000, 2.0, 1e-5)
    history = [(PoissonGaussian(scale * value, 0.01), 1) for value in shape]
    assert 2.0 * (1 - 1e-3) <= PLDAccountant().epsilon(history, 1e-5) <= 2.0


def test_a_delta_above_the_sample_rate_is_said():
    with pytest.warns(PrivacyWarning, match="not below the sample rate 0.05"):
        calibrate([1.0] * 10, 0.05, 10, 2.0, 0.06)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_delta_above_the_probability_to_take_part_is_refused(steps):
    with pytest.raises(ValueError, match="no smallest noise"):
        calibrate([1.0] * steps, 1e-6, steps, 1.0, 1e-5)


def test_long_schedules_are_calibrated_with_few_evaluations(monkeypatch):
    asked = []
    full = PLDAccountant.epsilon_of

    def counted(self, *args):
        asked.append(self)
        return full(self, *args)

    monkeypatch.setattr(PLDAccountant, "epsilon_of", counted)
    shape = np.exp(-2e-4 * np.arange(10_000)).tolist()
    scale = calibrate(shape, 0.01, 10_000, 3.0, 1e-6)
    assert len(asked) <= 5  # one of them is of what was spent before
    history = [(PoissonGaussian(scale * s, 0.01), 1) for s in shape]
    assert 3.0 * (1 - 1e-3) <= PLDAccountant().epsilon(history, 1e-6) <= 3.0


@pytest.mark.slow
@pytest.mark.parametrize("shape", [lambda t: math.exp(-2e-5 * t), lambda t: 1 + t / 1e5])
def test_a_hundred_thousand_distinct_steps_are_calibrated_at_once(shape):
    values = [shape(t) for t in range(100_000)]
    start = time.thread_time()
    calibrate(values, 0.01, 100_000, 3.0, 1e-6)
    assert time.thread_time() - start < 2.5  # .6 s on a machine that does nothing else


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
    value = epsilon([(PoissonGaussian(scale, q), steps)], at, relation)
    assert target * 0.5 <= value <= target
    assert time.process_time() - began < 20


def test_budgets_below_all_use_are_refused():
    with pytest.raises(ValueError, match=r"epsilon=1e-300 is below 1e-09.*Raise epsilon"):
        calibrate(constant, 0.1, 10, 1e-300, 1e-5)


@pytest.mark.parametrize("steps", [10**6, 10**18])
def test_steps_that_are_alike_cost_nothing_however_many(steps):
    scale = calibrate_steps(alike(1e-4, steps), 3.0, 1e-5)
    assert epsilon([(PoissonGaussian(scale, 1e-4), steps)], 1e-5) <= 3.0
    few = [1.0] * 100
    assert calibrate(few, 0.1, 100, 3.0, 1e-5) == calibrate_steps(alike(0.1, 100), 3.0, 1e-5)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"shape": None}, "shape"),
        ({"shape": np.array(1.0)}, "shape"),
        ({"spent": 3}, "spent"),
        ({"spent": [3]}, "spent"),
        ({"accountant": "PLD"}, "accountant"),
        ({"accountant": PLDAccountant}, "accountant"),
        ({"relation": np.ones(3)}, "relation"),
        ({"steps": 10**12}, "steps"),
    ],
)
def test_arguments_that_are_no_numbers_are_refused_by_name(arguments, name):
    good = {"shape": constant, "sample_rate": 0.1, "steps": 3, "epsilon": 1.0, "delta": 1e-5}
    with pytest.raises((ValueError, TypeError), match=rf"\b{name}\b"):
        calibrate(**{**good, **arguments})
