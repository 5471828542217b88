"""The dynamic-noise paper's formulas against its lemmas, and what its minibatch budget really costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dynamic_noise_formulas import (
    paper_alpha,
    paper_dynamic_gd_noise,
    paper_noise,
    paper_subsampled_budget,
    paper_uniform_noise,
    paper_uniform_steps,
)

from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.schedules import DynamicGD, FromInfluence

INFLUENCE = tuple(1.0 + (7 * t) % 13 for t in range(200))


@pytest.mark.parametrize("influence", [[1.0, 2.0], [5.0, 1.0, 0.3], [0.1, 1.0, 10.0, 30.0, 2.0]])
def test_lemma_4_1_is_the_schedule_made_from_the_influence(influence):
    """That its shape is the minimum is tested with the schedule."""
    stated = paper_noise(influence, budget=0.3927)
    shape = [FromInfluence(tuple(influence))(step) for step in range(len(influence))]
    np.testing.assert_allclose(np.array(shape) * stated[0], stated, rtol=1e-12)
    value = sum(q * sigma**2 for q, sigma in zip(influence, stated, strict=True))
    assert value == pytest.approx(sum(math.sqrt(q) for q in influence) ** 2 / 0.3927)


def test_the_gain_over_constant_noise_is_the_variance_of_the_root():
    """T Σ q - (Σ √q)² = T² Var(√q), Lemma 4.1."""
    q = np.array(INFLUENCE)
    constant = sum(q * np.square(paper_uniform_noise(len(q), budget=1.0)))
    best = sum(q * np.square(paper_noise(INFLUENCE, budget=1.0)))
    assert constant - best == pytest.approx(len(q) ** 2 * np.var(np.sqrt(q)))


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


def test_alpha_turns_the_noise_into_the_bound_of_theorem_4_1():
    """R q_t σ_t² with q_t = α γ^(T-t) is (M d / 2) (G σ_t / (M N))² over the first excess."""
    budget, smoothness, n, d, clip, excess, sigma = 0.4, 3.0, 500, 20, 2.0, 0.7, 5.0
    alpha = paper_alpha(
        budget=budget,
        smoothness=smoothness,
        num_records=n,
        dimension=d,
        clip_norm=clip,
        initial_excess=excess,
    )
    noise_term = smoothness * d / 2 * (clip * sigma / (smoothness * n)) ** 2
    assert budget * alpha * sigma**2 == pytest.approx(noise_term / excess)


@pytest.mark.parametrize(("kappa", "alpha"), [(5.0, 1e-3), (20.0, 1e-5)])
def test_the_uniform_t_is_of_the_order_of_the_best_one(kappa, alpha):
    recommended = paper_uniform_steps(kappa, alpha)
    assert recommended == math.ceil(kappa * math.log(1 + 1 / (kappa * alpha)))
    # Theorem 4.2 holds up to a constant factor; the values here are within 1.6.
    gamma = 1 - 1 / kappa

    def bound(steps: int) -> float:
        """Theorem 4.1 with constant noise."""
        return gamma**steps + alpha * steps * float(np.sum(gamma ** np.arange(steps)))

    assert recommended / 1.6 < min(range(1, 3000), key=bound) < recommended * 1.6
    assert paper_uniform_steps(kappa, 10 * alpha) < recommended


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paper_noise([1.0, math.nan], 1.0), r"influence=nan"),
        (lambda: paper_uniform_noise(5, math.nan), r"budget=nan"),
        (lambda: paper_subsampled_budget(1.0, math.nan), r"sample_rate=nan"),
        (lambda: paper_uniform_steps(math.nan, 0.1), r"kappa=nan"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_papers_subsampled_budget_is_far_from_private():
    """18.99 where 4 is claimed, for q = .01 and T = 1000 (dp-accounting's PLD)."""
    budget = paper_subsampled_budget(0.3927, sample_rate=0.01)
    sigma = paper_uniform_noise(1000, budget)[0]
    true = epsilon([(PoissonGaussian(sigma, 0.01), 1000)], delta=1e-8)
    assert true == pytest.approx(18.99, rel=0.01)
