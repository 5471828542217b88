"""The closed forms of the schedules against slow twins, brute force and their limits."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable

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
from scipy.optimize import minimize

from lightning_dp import schedules
from lightning_dp.postprocessing import Momentum
from lightning_dp.schedules import (
    AbstractSchedule,
    Cosine,
    DynamicGD,
    DynamicMomentum,
    FromInfluence,
    Polynomial,
)

STEPS = range(200)
INFLUENCE = tuple(1.0 + (7 * t) % 13 for t in STEPS)

# The object, and its slow and obvious twin.
CASES: dict[str, tuple[AbstractSchedule, Callable[[int], float]]] = {
    "linear": (
        Polynomial(steps=100, end=0.25),
        lambda t: 1.0 - 0.75 * t / 100 if t < 100 else 0.25,
    ),
    "cubic_growth": (
        Polynomial(steps=50, end=3.0, power=3.0),
        lambda t: 3.0 - 2.0 * (1 - t / 50) ** 3 if t < 50 else 3.0,
    ),
    "cosine": (
        Cosine(steps=150, end=0.1),
        lambda t: 0.1 + 0.9 * math.cos(math.pi * t / 300) ** 2 if t < 150 else 0.1,
    ),
    "dynamic_gd": (
        DynamicGD(kappa=25.0),
        lambda t: math.prod([(1 - 1 / 25) ** 0.25] * t),
    ),
    "long_momentum": (
        DynamicMomentum(kappa=50.0, eta0=0.5, beta=0.6, steps=200),
        lambda t: math.prod([0.99**0.25] * t),
    ),
    "short_momentum": (
        DynamicMomentum(kappa=50.0, eta0=0.5, beta=0.9, steps=200),
        lambda t: math.prod([0.99**-0.25] * t),
    ),
    "influence": (
        FromInfluence(INFLUENCE),
        lambda t: 1 / math.sqrt(math.sqrt(INFLUENCE[t])),
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[AbstractSchedule, Callable[[int], float]]:
    return CASES[request.param]


def test_a_schedule_equals_its_slow_twin(case):
    schedule, twin = case
    for step in STEPS:
        assert schedule(step) == pytest.approx(twin(step) / twin(0), rel=1e-9)


def test_a_schedule_starts_at_1_and_stays_a_positive_plain_float(case):
    assert case[0](0) == 1.0
    for step in STEPS:
        assert type(case[0](step)) is float
        assert 0 < case[0](step) < math.inf


def test_a_resumed_schedule_goes_on_where_it_was(case):
    """It holds no state: any step, in any order, in a copy made of its configuration alone."""
    schedule = case[0]
    whole = [schedule(step) for step in STEPS]
    resumed = pickle.loads(pickle.dumps(schedule))
    assert [resumed(step) for step in reversed(STEPS)] == whole[::-1]
    assert eval(repr(schedule), vars(schedules)) == schedule
    assert hash(dataclasses.replace(schedule)) == hash(schedule)


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
    budget = 0.3927
    found = brute_force(influence, budget)
    stated = paper_noise(influence, budget)
    shape = [FromInfluence(tuple(influence))(step) for step in range(len(influence))]

    np.testing.assert_allclose(stated, found, rtol=1e-4)
    np.testing.assert_allclose(np.array(shape) * stated[0], stated, rtol=1e-12)
    value = sum(q * sigma**2 for q, sigma in zip(influence, stated, strict=True))
    assert value == pytest.approx(sum(math.sqrt(q) for q in influence) ** 2 / budget)


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


# -- Theorem 4.3 -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kappa", "steps"), [(1.5, 5), (10.0, 40), (300.0, 100)])
def test_theorem_4_3_is_lemma_4_1_with_the_influence_of_theorem_4_1(kappa, steps):
    gamma = 1 - 1 / kappa
    influence = [gamma ** (steps - t) for t in range(1, steps + 1)]
    by_lemma = paper_noise(influence, budget=0.5)
    by_theorem = paper_dynamic_gd_noise(kappa, steps, budget=0.5)
    shape = DynamicGD(kappa)

    np.testing.assert_allclose(by_theorem, by_lemma, rtol=1e-9)
    np.testing.assert_allclose([by_theorem[0] * shape(t) for t in range(steps)], by_lemma)


def test_a_well_rounded_bowl_needs_ever_less_early_noise_and_a_flat_one_constant_noise():
    assert DynamicGD(1 + 1e-12)(4) == pytest.approx(1e-12, rel=1e-3)
    assert [DynamicGD(1e15)(t) for t in (1, 100)] == pytest.approx([1.0, 1.0], rel=1e-12)


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


def best_steps(kappa: float, alpha: float, *, dynamic: bool) -> int:
    """argmin over T of the bound of Theorem 4.1, by trying them all."""
    gamma = 1 - 1 / kappa

    def bound(steps: int) -> float:
        influence = gamma ** np.arange(steps)
        roots = np.sqrt(influence).sum() ** 2
        return gamma**steps + alpha * (roots if dynamic else steps * influence.sum())

    return min(range(1, 3000), key=bound)


@pytest.mark.parametrize(("kappa", "alpha"), [(5.0, 1e-3), (20.0, 1e-5)])
def test_equation_26_is_the_best_t_and_the_theorem_stays_within_its_constant_of_it(kappa, alpha):
    gamma = 1 - 1 / kappa
    best = best_steps(kappa, alpha, dynamic=True)
    by_equation_26 = 2 * math.log1p((1 - math.sqrt(gamma)) ** 2 / alpha) / math.log(1 / gamma)
    recommended = DynamicGD.recommended_steps(kappa, alpha)

    assert abs(best - by_equation_26) <= 1
    assert recommended == math.ceil(2 * kappa * math.log(1 + 1 / (kappa * alpha)))
    # The theorem replaces (1 - √γ)² by 1/κ: later by about 2κ ln(4κ) steps.
    assert recommended - best == pytest.approx(2 * kappa * math.log(4 * kappa), rel=0.15)


@pytest.mark.parametrize(("kappa", "alpha"), [(5.0, 1e-3), (20.0, 1e-5)])
def test_the_uniform_t_is_of_the_order_of_the_best_one(kappa, alpha):
    recommended = paper_uniform_steps(kappa, alpha)
    assert recommended == math.ceil(kappa * math.log(1 + 1 / (kappa * alpha)))
    # Theorem 4.2 holds up to a constant factor; the values here are within 1.6.
    assert recommended / 1.6 < best_steps(kappa, alpha, dynamic=False) < recommended * 1.6


def test_more_noise_means_fewer_recommended_steps():
    for steps in (
        lambda alpha: DynamicGD.recommended_steps(10.0, alpha),
        lambda alpha: DynamicMomentum.recommended_steps(10.0, 0.5, alpha),
        lambda alpha: paper_uniform_steps(10.0, alpha),
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
    import torch

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


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Polynomial(steps=0, end=0.5), r"Polynomial\(steps=0\)"),
        (lambda: Polynomial(steps=math.nan, end=0.5), r"Polynomial\(steps=nan\)"),
        (lambda: Polynomial(steps=9, end=0.0), r"Polynomial\(end=0.0\)"),
        (lambda: Polynomial(steps=9, end=math.nan), r"Polynomial\(end=nan\)"),
        (lambda: Polynomial(steps=9, end=0.5, power=math.nan), r"Polynomial\(power=nan\)"),
        (lambda: Cosine(steps=True, end=0.5), r"Cosine\(steps=True\)"),
        (lambda: Cosine(steps=9, end=math.inf), r"Cosine\(end=inf\)"),
        (lambda: DynamicGD(kappa=1.0), r"DynamicGD\(kappa=1.0\)"),
        (lambda: DynamicGD(kappa=math.nan), r"DynamicGD\(kappa=nan\)"),
        (lambda: DynamicGD.recommended_steps(9.0, math.nan), r"recommended_steps\(alpha=nan\)"),
        (lambda: DynamicMomentum(9.0, 10.0, 0.1, 5), r"eta0=10.0\).*below kappa=9.0"),
        (lambda: DynamicMomentum(9.0, math.nan, 0.1, 5), r"eta0=nan"),
        (lambda: DynamicMomentum(10.0, 1.0, 0.95, 5), r"beta=0.95\) must be below gamma.*0.9 "),
        (lambda: DynamicMomentum(10.0, 1.0, math.nan, 5), r"beta=nan"),
        (lambda: FromInfluence(()), r"influence=\(\)"),
        (lambda: FromInfluence((1.0, -2.0)), r"influence\[1\]=-2.0"),
        (lambda: FromInfluence((math.nan,)), r"influence\[0\]=nan"),
        (lambda: FromInfluence([1.0]), r"influence=list"),
        (lambda: paper_noise([1.0, math.nan], 1.0), r"influence=nan"),
        (lambda: paper_uniform_noise(5, math.nan), r"budget=nan"),
        (lambda: paper_subsampled_budget(1.0, math.nan), r"sample_rate=nan"),
        (lambda: paper_uniform_steps(math.nan, 0.1), r"kappa=nan"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_influence_has_no_value_beyond_its_length():
    with pytest.raises(ValueError, match="has 2 values and none for step 2"):
        FromInfluence((1.0, 2.0))(2)


def test_influence_of_any_number_type_becomes_plain_floats():
    schedule = FromInfluence(tuple(np.array([1.0, 16.0])))
    assert repr(schedule) == "FromInfluence(influence=(1.0, 16.0))"
    assert schedule == FromInfluence((1, 16))


def test_the_papers_subsampled_budget_is_far_from_private():
    """18.99 where 4 is claimed, for q = .01 and T = 1000 (dp-accounting's PLD)."""
    from lightning_dp.accounting import PoissonGaussian, epsilon

    budget = paper_subsampled_budget(0.3927, sample_rate=0.01)
    sigma = paper_uniform_noise(1000, budget)[0]
    true = epsilon([(PoissonGaussian(sigma, 0.01), 1000)], delta=1e-8)
    assert true == pytest.approx(18.99, rel=0.01)
