"""The schedules of a paper against brute force, their definitions and their limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lightning_dp.postprocessing import Momentum
from lightning_dp.schedules import DynamicGD, DynamicMomentum, FromInfluence

# -- Lemma 4.1 ---------------------------------------------------------------------------------


def brute_force(influence: list[float], budget: float) -> np.ndarray:
    """argmin Σ q_t σ_t² under Σ 1/σ_t² = R, over free log-shares of the budget."""

    def sigmas_squared(logits: np.ndarray) -> np.ndarray:
        shares = np.exp(logits - logits.max())
        return shares.sum() / (budget * shares)

    result = minimize(
        lambda logits: float(np.log(np.dot(influence, sigmas_squared(logits)))),
        np.zeros(len(influence)),
        method="BFGS",
        options={"gtol": 1e-9},
    )
    return np.sqrt(sigmas_squared(result.x))


@pytest.mark.parametrize("influence", [[1.0, 2.0], [5.0, 1.0, 0.3], [0.1, 1.0, 10.0, 30.0, 2.0]])
def test_lemma_4_1_is_the_minimum_found_by_brute_force(influence):
    found = brute_force(influence, budget=0.3927)
    shape = [FromInfluence(tuple(influence))(step) for step in range(len(influence))]
    np.testing.assert_allclose(shape, found / found[0], rtol=1e-4)


# -- Theorem 4.3 -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kappa", "steps"), [(1.5, 5), (10.0, 40), (300.0, 100)])
def test_theorem_4_3_is_lemma_4_1_with_the_influence_of_theorem_4_1(kappa, steps):
    gamma = 1 - 1 / kappa
    lemma = FromInfluence(tuple(gamma ** (steps - t) for t in range(1, steps + 1)))
    theorem = DynamicGD(kappa)
    assert [theorem(t) for t in range(steps)] == pytest.approx([lemma(t) for t in range(steps)])


def test_a_well_rounded_bowl_needs_ever_less_early_noise_and_a_flat_one_constant_noise():
    assert DynamicGD(1 + 1e-12)(4) == pytest.approx(1e-12, rel=1e-3)
    assert [DynamicGD(1e15)(t) for t in (1, 100)] == pytest.approx([1.0, 1.0], rel=1e-12)


def best_steps(kappa: float, alpha: float) -> int:
    """argmin over T of the bound of Theorem 4.1 with the best noise, by trying them all."""
    gamma = 1 - 1 / kappa

    def bound(steps: int) -> float:
        influence = gamma ** np.arange(steps)
        return gamma**steps + alpha * float(np.sqrt(influence).sum() ** 2)

    return min(range(1, 3000), key=bound)


@pytest.mark.parametrize(("kappa", "alpha"), [(5.0, 1e-3), (20.0, 1e-5)])
def test_equation_26_is_the_best_t_and_the_theorem_stays_within_its_constant_of_it(kappa, alpha):
    gamma = 1 - 1 / kappa
    best = best_steps(kappa, alpha)
    by_equation_26 = 2 * math.log1p((1 - math.sqrt(gamma)) ** 2 / alpha) / math.log(1 / gamma)
    recommended = DynamicGD.recommended_steps(kappa, alpha)

    assert abs(best - by_equation_26) <= 1
    assert recommended == math.ceil(2 * kappa * math.log(1 + 1 / (kappa * alpha)))
    # The theorem replaces (1 - √γ)² by 1/κ: later by about 2κ ln(4κ) steps.
    assert recommended - best == pytest.approx(2 * kappa * math.log(4 * kappa), rel=0.15)


def test_more_noise_means_fewer_recommended_steps():
    for steps in (
        lambda alpha: DynamicGD.recommended_steps(10.0, alpha),
        lambda alpha: DynamicMomentum.recommended_steps(10.0, 0.5, alpha),
    ):
        assert steps(1e-6) > steps(1e-4) > steps(1e-2) >= 1


# -- Theorem 4.6 -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kappa", "eta0", "beta"),
    [
        (100.0, 1.0, 0.9),
        (50.0, 0.5, 0.6),
        (8.0, 0.3, 0.2),
        (9.0, 1.0, 0.0),
        (12.0, 1.0, 0.9),
        (3.5, 1.0, 0.7),
    ],
)
def test_the_turning_step_is_the_last_that_meets_its_definition(kappa, eta0, beta):
    gamma = 1 - eta0 / kappa
    brute = [t for t in range(1, 6000) if gamma ** (t - 1) * (1 - beta**t) >= (1 - beta) - 1e-15]
    schedule = DynamicMomentum(kappa, eta0, beta, steps=10)
    assert schedule.turning_step == max(brute)
    assert brute == list(range(1, max(brute) + 1))


def test_noise_grows_in_runs_up_to_the_turning_step_and_decays_in_longer_ones():
    turn = DynamicMomentum(100.0, 1.0, 0.9, steps=1).turning_step
    short = DynamicMomentum(100.0, 1.0, 0.9, steps=turn)
    long = DynamicMomentum(100.0, 1.0, 0.9, steps=turn + 1)
    steps = range(turn)
    # q_t ∝ γ^t in short runs, γ^(T-t) in long ones; Lemma 4.1 makes the shape of it.
    for schedule, sign in ((short, 1), (long, -1)):
        lemma = FromInfluence(tuple(0.99 ** (sign * t) for t in steps))
        assert [schedule(t) for t in steps] == pytest.approx([lemma(t) for t in steps])


def test_without_momentum_it_is_the_schedule_of_gradient_descent():
    momentum = DynamicMomentum(kappa=30.0, eta0=0.5, beta=0.0, steps=100)
    descent = DynamicGD(kappa=60.0)
    assert momentum.turning_step == 1
    assert [momentum(t) for t in range(100)] == pytest.approx([descent(t) for t in range(100)])
    assert DynamicMomentum.recommended_steps(30.0, 0.5, 0.01) == DynamicGD.recommended_steps(
        60.0, 0.01
    )


def test_short_averaging_runs_are_hurt_most_by_their_first_noise():
    """Why the noise grows: the weight of each g_i in the package's own Momentum, summed over t.

    In a steep bowl with T <= T̂, early noise stays in every later average.
    """
    steps, beta = 6, 0.9
    momentum = Momentum(beta)

    def moved(at: int) -> float:
        state, total = momentum.init([torch.zeros(1)]), 0.0
        for step in range(steps):
            estimate, state = momentum.apply(state, torch.tensor([float(step == at)]))
            total += float(estimate)
        return total

    influence = [moved(at) ** 2 for at in range(steps)]
    assert influence == sorted(influence, reverse=True)
    assert DynamicMomentum(100.0, 1.0, beta, steps)(steps - 1) > 1
