"""The paper example as a user runs it, and its hand-made gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dynamic_noise_formulas import (
    fit_exponential,
    paper_dynamic_gd_noise,
    paper_noise,
    paper_subsampled_budget,
    paper_uniform_noise,
)
from dynamic_noise_influence import quadratic_influence, retraining_influence

from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.schedules import (
    Constant,
    Cosine,
    DynamicGD,
    FromInfluence,
    Polynomial,
)


@pytest.fixture
def model(import_paper: Callable[[str], Any]) -> Any:
    return import_paper("dynamic_noise_model")


@pytest.fixture
def run(import_paper: Callable[[str], Any]) -> Any:
    return import_paper("dynamic_noise_run")


@pytest.mark.parametrize("loss", ["squared", "logistic", "network", "digits"])
def test_the_hand_made_gradients_are_autograds(model, loss):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    y = torch.tensor([1.0, -1.0, 1.0] * 3, dtype=torch.float64)
    if loss == "digits":
        y = torch.tensor([0, 9, 4] * 3)
    problem = model.Problem(loss, model.Records(x, y))
    params = [p + 0.1 for p in problem.start(3)]
    found = problem.gradients(params)
    for i in range(9):
        alone = model.Problem(loss, model.Records(x[i : i + 1], y[i : i + 1]))
        leaves = [p.clone().requires_grad_() for p in params]
        output, _ = alone._forward(leaves)
        margin = y[i] * output[0, 0]
        value = (margin - 1) ** 2 / 2 if loss == "squared" else torch.log1p(torch.exp(-margin))
        if loss == "digits":
            value = output.logsumexp(1)[0] - output[0, y[i]]
        assert alone.value(params) == pytest.approx(value.item())
        exact = torch.cat([g.flatten() for g in torch.autograd.grad(value, leaves)])
        one = torch.zeros(9, dtype=torch.float64)
        one[i] = 1
        torch.testing.assert_close(found.weighted_sum(one), exact)
        torch.testing.assert_close(found.norms()[i], exact.norm())


def test_every_plan_spends_its_budget(run):
    influence = np.geomspace(1, 100, 100)
    assert run.exact_budget() == pytest.approx(0.5134, abs=5e-5)
    for budget, value in (("paper", 0.3927), ("exact", run.exact_budget())):
        for shape in run.shapes(influence, 30).values():
            plan = run.plan_of(shape, 30, budget)
            spent = sum(plan.noise_multiplier(step) ** -2 for step in range(30))
            assert 0.998 * value < spent <= value * (1 + 1e-9)


@pytest.mark.parametrize("beta", [None, 0.9, 0.5])
def test_both_forms_of_the_influence_are_the_sums_that_they_abbreviate(import_paper, beta):
    minibatches, steps, decay = import_paper("dynamic_noise_minibatches"), 12, 0.94
    found = minibatches.influenced(steps, decay, *([] if beta is None else [beta])).influence
    expected = []
    for i in range(1, steps + 1):
        later = range(i, i + 1 if beta is None else steps + 1)
        expected.append(sum(decay ** (steps - t) * (beta or 1.0) ** (2 * (t - i)) for t in later))
    np.testing.assert_allclose(found, np.array(expected) / max(expected), rtol=1e-9)


def test_the_network_with_momentum_takes_any_number_of_digits(import_paper, mnist_folder, run):
    data, figures = import_paper("dynamic_noise_data"), import_paper("dynamic_noise_figures")
    for records in (300, 1500):
        digits = data.ten_digits(str(mnist_folder), 10.0, records)
        assert len(digits.x) == len(digits.y) == records
        assert float(digits.x.norm(dim=1).max()) == pytest.approx(10.0)
    figures.MAX_STEPS = 5
    losses = [
        figures.momentum_run(str(mnist_folder), records, 10.0, shape, 3)
        for records in (100, 3000)
        for shape in (None, figures.Constant())
    ]
    few, many = (abs(noisy - plain) for plain, noisy in (losses[:2], losses[2:]))
    assert 0 < 10 * many < few  # the noise in the mean is 30 times less


def test_a_fit_with_momentum_and_a_form_of_the_influence_spends_its_budget(
    import_paper, mnist_folder
):
    minibatches = import_paper("dynamic_noise_minibatches")
    base = minibatches.Run(str(mnist_folder), "logistic regression", 1.0, 1.0, 1.0, 0, 600, 2)
    schedule = minibatches.influenced(base.steps, 0.7)
    runs = [
        minibatches.fit(minibatches.replace(base, momentum=momentum, schedule=schedule))
        for momentum in (0.0, 0.9)
    ]
    assert runs[0][0] != runs[1][0]
    for *_, spent in runs:
        assert 0.99 < spent <= 1


@pytest.mark.slow
def test_the_quick_run_prints_its_tables_and_draws_its_pictures(run_paper, mnist_folder, tmp_path):
    done = run_paper("dynamic_noise.py", "--quick", "--output", "pictures", data=mnist_folder)
    assert done.returncode == 0, done.stderr
    for words in (
        "(3.456, 1e-08)-DP exactly",
        "allows R = 0.5134",
        "### squared: final training loss",
        "### network: final training loss",
        "The claim dynamic <= exponential <= uniform (exact budget",
        "## 2. Poisson minibatches",
        "small CNN",
        "## 3. Two curvatures",
        "## 4. Momentum 0.9",
        "## 5. Momentum 0.9 on minibatches",
    ):
        assert words in done.stdout
    spent = [float(x) for x in re.findall(r"\| 1 \| (?:constant|to 1/4) \| ([\d.]+) ", done.stdout)]
    assert len(spent) == 4
    assert all(0.99 < epsilon <= 1 for epsilon in spent)
    for name in ("full_batch.png", "schedules.png", "curvatures.png"):
        assert (tmp_path / "pictures" / name).stat().st_size > 20_000


# -- the dynamic-noise paper's formulas against its lemmas, and what its minibatch budget rea ----


INFLUENCE = tuple(1.0 + (7 * t) % 13 for t in range(200))


@pytest.mark.parametrize("influence", [[1.0, 2.0], [5.0, 1.0, 0.3], [0.1, 1.0, 10.0, 30.0, 2.0]])
def test_lemma_4_1_is_the_schedule_made_from_the_influence(influence):
    """That its shape is the minimum is tested with the schedule."""
    stated = paper_noise(influence, budget=0.3927)
    shape = [FromInfluence(tuple(influence))(step) for step in range(len(influence))]
    np.testing.assert_allclose(np.array(shape) * stated[0], stated, rtol=1e-12)
    value = sum(q * sigma**2 for q, sigma in zip(influence, stated, strict=True))
    assert value == pytest.approx(sum(math.sqrt(q) for q in influence) ** 2 / 0.3927)


@pytest.mark.parametrize("steps", [1, 2, 30, 100])
def test_the_papers_noise_spends_exactly_the_budget(steps):
    budget = 0.3927
    for noise in (
        paper_noise(INFLUENCE[:steps], budget),
        paper_uniform_noise(steps, budget),
        paper_dynamic_gd_noise(kappa=7.0, steps=steps, budget=budget),
    ):
        assert len(noise) == steps
        assert sum(sigma**-2 for sigma in noise) == pytest.approx(budget, rel=1e-12)


@pytest.mark.parametrize(("kappa", "steps"), [(1.5, 5), (10.0, 40), (300.0, 100)])
def test_theorem_4_3_is_lemma_4_1_with_the_influence_of_theorem_4_1(kappa, steps):
    gamma = 1 - 1 / kappa
    by_lemma = paper_noise([gamma ** (steps - t) for t in range(1, steps + 1)], budget=0.5)
    by_theorem = paper_dynamic_gd_noise(kappa, steps, budget=0.5)
    shape = DynamicGD(kappa)

    np.testing.assert_allclose(by_theorem, by_lemma, rtol=1e-9)
    np.testing.assert_allclose([by_theorem[0] * shape(t) for t in range(steps)], by_lemma)


def test_the_papers_subsampled_budget_is_far_from_private():
    """18.99 where 4 is claimed, for q = .01 and T = 1000 (dp-accounting's PLD)."""
    budget = paper_subsampled_budget(0.3927, sample_rate=0.01)
    sigma = paper_uniform_noise(1000, budget)[0]
    true = epsilon([(PoissonGaussian(sigma, 0.01), 1000)], delta=1e-8)
    assert true == pytest.approx(18.99, rel=0.01)


# -- the influence estimators against exact influence, and the exponential fit against lstsq -----


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


@pytest.mark.parametrize("steps", [2, 7, 100])
@pytest.mark.parametrize("schedule", [Polynomial(100, 0.2), Cosine(60, 0.5), Constant()])
def test_the_fit_is_numpys_least_squares_line_through_the_logarithms(schedule, steps):
    design = np.stack([np.ones(steps), -np.arange(steps)], axis=1)
    logs = np.log([schedule(t) for t in range(steps)])
    (_, rate), *_ = np.linalg.lstsq(design, logs, rcond=None)
    assert fit_exponential(schedule, steps).rate == pytest.approx(rate, abs=1e-12)
