"""The influence estimators against exact influence, and the exponential fit against lstsq."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dynamic_noise_formulas import fit_exponential
from dynamic_noise_influence import quadratic_influence, retraining_influence

from lightning_dp.schedules import (
    Constant,
    Cosine,
    DynamicGD,
    Exponential,
    FromInfluence,
    Polynomial,
)

EIGENVALUES = [0.2, 1.0, 3.0]
RATE, STD = 0.3, 0.05


def expected_loss(noise_multipliers: list[float]) -> float:
    """E f(θ_(T+1)) of noisy descent on a quadratic, by carrying the second moments along."""
    curvature = torch.diag(torch.tensor(EIGENVALUES, dtype=torch.float64))
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    hessian = rotation @ curvature @ rotation.T
    start = rotation @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    moment = torch.outer(start, start)
    step = torch.eye(3, dtype=torch.float64) - RATE * hessian
    for sigma in noise_multipliers:
        moment = step @ moment @ step.T
        moment += (RATE * STD * sigma) ** 2 * torch.eye(3, dtype=torch.float64)
    return float(0.5 * torch.trace(hessian @ moment))


def test_quadratic_influence_is_the_exact_derivative_of_the_expected_loss():
    steps = 12
    stated = quadratic_influence(EIGENVALUES, learning_rate=RATE, steps=steps, noise_std=STD)
    base = [2.0] * steps
    for step in range(steps):
        more = [*base[:step], 3.0, *base[step + 1 :]]
        slope = (expected_loss(more) - expected_loss(base)) / (3.0**2 - 2.0**2)
        assert stated[step] == pytest.approx(slope, rel=1e-6)


def test_equal_eigenvalues_have_an_exponential_influence():
    influence = quadratic_influence([0.5] * 4, learning_rate=0.2, steps=30)
    ratios = np.divide(influence[1:], influence[:-1])
    np.testing.assert_allclose(ratios, (1 - 0.1) ** -2)


def test_retraining_finds_the_exact_influence_where_the_loss_is_exact():
    steps = 8
    fit = retraining_influence(expected_loss, [2.0] * steps, values=[1.0, 3.0, 9.0])
    exact = quadratic_influence(EIGENVALUES, learning_rate=RATE, steps=steps, noise_std=STD)
    np.testing.assert_allclose(fit.influence, exact, rtol=1e-6)
    assert fit.constant[0] == pytest.approx(expected_loss([0.0] + [2.0] * (steps - 1)))
    assert max(fit.standard_error) < 1e-8


def test_retraining_finds_the_influence_in_noise_within_its_standard_errors():
    rng = np.random.default_rng(0)
    steps, values = 4, [1.0, 20.0, 40.0]

    def train(sigmas: list[float]) -> float:
        point = np.array([1.0, -2.0, 0.5])
        for sigma in sigmas:
            gradient = np.array(EIGENVALUES) * point
            point = point - RATE * (gradient + STD * sigma * rng.standard_normal(3))
        return float(0.5 * np.dot(EIGENVALUES, point**2))

    fit = retraining_influence(train, [5.0] * steps, values=values, repeats=300, steps=[0, 3])
    exact = quadratic_influence(EIGENVALUES, learning_rate=RATE, steps=steps, noise_std=STD)
    assert fit.steps == (0, 3)
    for step, c2, error in zip(fit.steps, fit.influence, fit.standard_error, strict=True):
        assert abs(c2 - exact[step]) < 4 * error
        assert error < 0.2 * exact[step]  # so that a factor of two would be seen


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quadratic_influence([], learning_rate=0.1, steps=3), "eigenvalues"),
        (lambda: quadratic_influence([math.nan], learning_rate=0.1, steps=3), "eigenvalues"),
        (lambda: quadratic_influence([-1.0], learning_rate=0.1, steps=3), "eigenvalues"),
        (lambda: quadratic_influence([0.0], learning_rate=0.1, steps=3), "not positive"),
        (lambda: quadratic_influence([10.0], learning_rate=0.1, steps=3), "not positive"),
        (lambda: quadratic_influence([1.0], learning_rate=math.nan, steps=3), "rate=nan"),
        (lambda: quadratic_influence([1.0], learning_rate=0.1, steps=0), "steps=0"),
        (
            lambda: quadratic_influence([1.0], learning_rate=0.1, steps=3, noise_std=math.nan),
            "noise_std=nan",
        ),
        (lambda: retraining_influence(sum, [1.0], values=[1.0, 1.0]), "two different"),
        (lambda: retraining_influence(sum, [1.0], values=[1.0, math.nan]), "two different"),
        (lambda: retraining_influence(sum, [1.0], values=[1.0, 2.0], repeats=0), "repeats=0"),
        (lambda: retraining_influence(sum, [1.0], values=[1.0, 2.0], steps=[1]), "steps holds 1"),
        (
            lambda: retraining_influence(lambda s: math.nan, [1.0], values=[1.0, 2.0]),
            "not finite with the noise of step 0",
        ),
    ],
)
def test_a_bad_argument_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_retraining_changes_one_step_at_a_time_and_leaves_the_callers_list_alone():
    seen = []
    around = [1.0, 2.0, 3.0]
    retraining_influence(lambda s: seen.append(s) or 0.0, around, values=[8.0, 9.0], repeats=2)
    assert around == [1.0, 2.0, 3.0]
    assert len(seen) == 3 * 2 * 2
    for sigmas in seen:
        assert sum(a != b for a, b in zip(sigmas, around, strict=True)) == 1


@pytest.mark.parametrize("steps", [2, 7, 100])
@pytest.mark.parametrize("schedule", [Polynomial(100, 0.2), Cosine(60, 0.5), Constant()])
def test_the_fit_is_numpys_least_squares_line_through_the_logarithms(schedule, steps):
    design = np.stack([np.ones(steps), -np.arange(steps)], axis=1)
    logs = np.log([schedule(t) for t in range(steps)])
    (_, rate), *_ = np.linalg.lstsq(design, logs, rcond=None)
    assert fit_exponential(schedule, steps).rate == pytest.approx(rate, abs=1e-12)


def test_the_fit_of_an_exponential_is_itself():
    assert fit_exponential(Exponential(0.03), 80).rate == pytest.approx(0.03, rel=1e-9)
    assert fit_exponential(DynamicGD(9.0), 80).rate == pytest.approx(-math.log(8 / 9) / 4)
    doubling = FromInfluence(tuple(16.0**t for t in range(20)))  # the noise halves every step
    assert fit_exponential(doubling, 20).rate == pytest.approx(math.log(2), rel=1e-9)


def test_the_fit_to_one_step_is_constant_and_to_none_is_refused():
    assert fit_exponential(Exponential(0.5), 1) == Exponential(0.0)
    with pytest.raises(ValueError, match=r"fit_exponential\(steps=0\)"):
        fit_exponential(Constant(), 0)
