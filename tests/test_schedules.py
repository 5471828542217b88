"""Noise schedules: one contract for all, and the closed form of each."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from lightning_dp import schedules
from lightning_dp._refusals import RefusedSetting
from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.accounting.journal import read_journal
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import (
    CyclicPoisson,
    FixedOrder,
    Poisson,
    RandomAllocation,
    TruncatedPoisson,
)
from lightning_dp.schedules import (
    AbstractSchedule,
    Constant,
    Cosine,
    DynamicGD,
    DynamicMomentum,
    Exponential,
    FromInfluence,
    Polynomial,
    StepDecay,
)
from tests.zoo import private

# One line for each schedule: the object, and its slow and obvious twin.
CASES: dict[str, tuple[AbstractSchedule, Callable[[int], float]]] = {
    "constant": (Constant(), lambda t: 1.0),
    "decaying": (Exponential(rate=0.01), lambda t: math.prod([math.exp(-0.01)] * t)),
    "growing": (Exponential(rate=-0.01), lambda t: math.prod([math.exp(0.01)] * t)),
    "flat": (Exponential(rate=0.0), lambda t: 1.0),
    "step_decay": (
        StepDecay(every=10, factor=0.7),
        lambda t: math.prod(0.7 for step in range(1, t + 1) if step % 10 == 0),
    ),
    "step_growth": (
        StepDecay(every=3, factor=1.1),
        lambda t: math.prod(1.1 for step in range(1, t + 1) if step % 3 == 0),
    ),
    "cosine": (
        Cosine(steps=50, end=0.2),
        lambda t: 0.2 + 0.8 * math.cos(math.pi * t / 100) ** 2 if t < 50 else 0.2,
    ),
    "polynomial": (
        Polynomial(steps=50, end=3.0, power=2.0),
        lambda t: 3.0 - 2.0 * ((50 - t) / 50) ** 2 if t < 50 else 3.0,
    ),
    "straight": (
        Polynomial(steps=100, end=0.25),
        lambda t: 1.0 - 0.75 * t / 100 if t < 100 else 0.25,
    ),
    "dynamic_gd": (DynamicGD(kappa=100.0), lambda t: math.prod([0.99**0.25] * t)),
    "dynamic_momentum_short": (
        DynamicMomentum(kappa=100.0, eta0=1.0, beta=0.9, steps=200),
        lambda t: math.prod([0.99**-0.25] * t),
    ),
    "dynamic_momentum_long": (
        DynamicMomentum(kappa=100.0, eta0=1.0, beta=0.9, steps=500),
        lambda t: math.prod([0.99**0.25] * t),
    ),
    "from_influence": (
        FromInfluence(tuple(2.0 + math.sin(step) for step in range(200))),
        lambda t: math.sqrt(math.sqrt(2.0 / (2.0 + math.sin(t)))),
    ),
}
STEPS = range(0, 200)


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_keeps_the_contract(name):
    schedule, twin = CASES[name]
    values = [schedule(step) for step in STEPS]

    assert values == pytest.approx([twin(step) for step in STEPS], rel=1e-9)
    assert all(type(value) is float and 0 < value < math.inf for value in values)
    assert values[0] == 1.0  # so that the scale of a plan is the noise of its first step
    # A pure function of the step, whose configuration alone is all that a resumed run needs.
    assert [schedule(step) for step in reversed(STEPS)] == values[::-1]
    for copied in (pickle.loads(pickle.dumps(schedule)), eval(repr(schedule), vars(schedules))):
        assert copied == schedule and hash(copied) == hash(schedule)
        assert vars(copied) == vars(schedule) and [copied(step) for step in STEPS] == values
    for field in [f.name for f in dataclasses.fields(schedule)] or ["anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(schedule, field, 0)


def test_every_schedule_is_tested():
    public = {getattr(schedules, name) for name in schedules.__all__}
    concrete = {kind for kind in public if not kind.__name__.startswith("Abstract")}
    assert concrete == {type(schedule) for schedule, _ in CASES.values()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Exponential(math.inf), r"Exponential\(rate=inf\) must be a finite number"),
        (lambda: StepDecay(0, 0.5), r"StepDecay\(every=0\) must be a whole number of at least 1"),
        (lambda: StepDecay(-1, 0.5), r"StepDecay\(every=-1\) must be a whole number"),
        (lambda: StepDecay(1, 0.0), r"StepDecay\(factor=0.0\) must be finite"),
        (lambda: StepDecay(1, -0.5), r"StepDecay\(factor=-0.5\) must be finite"),
        (lambda: StepDecay(1, math.inf), r"StepDecay\(factor=inf\) must be finite"),
        (lambda: Polynomial(steps=0, end=0.5), r"Polynomial\(steps=0\)"),
        (lambda: Polynomial(steps=9, end=0.0), r"Polynomial\(end=0.0\)"),
        (lambda: Cosine(steps=9, end=math.inf), r"Cosine\(end=inf\)"),
        (lambda: DynamicGD(kappa=1.0), r"DynamicGD\(kappa=1.0\)"),
        (lambda: DynamicMomentum(9.0, 10.0, 0.1, 5), r"eta0=10.0\).*below kappa=9.0"),
        (lambda: DynamicMomentum(10.0, 1.0, 0.95, 5), r"beta=0.95\) must be below gamma.*0.9 "),
        (lambda: FromInfluence(()), r"influence=\(\)"),
        (lambda: FromInfluence((1.0, -2.0)), r"influence\[1\]=-2.0"),
        (lambda: FromInfluence([1.0]), r"influence=list"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_names_the_step_at_which_a_growing_schedule_overflows():
    plan = NoisePlan(1.0, Exponential(rate=-1.0), Poisson(), 0.1)
    with pytest.raises(ValueError, match="gives inf at step 5000"):
        plan.noise_multiplier(5000)


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


def test_without_momentum_it_is_the_schedule_of_gradient_descent():
    momentum = DynamicMomentum(kappa=30.0, eta0=0.5, beta=0.0, steps=100)
    descent = DynamicGD(kappa=60.0)
    assert momentum.turning_step == 1
    assert [momentum(t) for t in range(100)] == pytest.approx([descent(t) for t in range(100)])
    assert DynamicMomentum.recommended_steps(30.0, 0.5, 0.01) == DynamicGD.recommended_steps(
        60.0, 0.01
    )


# -- a Trainer with schedules: its journal follows the schedule, and spends the budget -----------


TRAINED, DELTA = 6, 1e-5

SCHEDULES = [
    Constant(),
    Exponential(rate=0.1),
    FromInfluence(tuple(1.0 + t for t in range(TRAINED))),
    # A plan knows no more of a schedule than its values, which the contract tests for each of them.
    *(
        pytest.param(schedule, marks=pytest.mark.slow)
        for schedule in (
            Cosine(steps=15, end=0.5),
            DynamicGD(kappa=10.0),
            DynamicMomentum(kappa=50.0, eta0=1.0, beta=0.9, steps=TRAINED),
            Polynomial(steps=TRAINED, end=0.3, power=2.0),
            StepDecay(every=7, factor=0.8),
        )
    ),
]


def events(folder: Path) -> list[Gaussian | PoissonGaussian]:
    """All events in the journal on the disk, in order."""
    (path,) = (folder / "privacy").glob("*.journal")
    return [e for run in read_journal(path)[1].values() for e, n in run for _ in range(n)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_the_journal_follows_the_schedule_and_spends_the_target(
    schedule, classifier, mlp, loader, make_trainer, tmp_path
):
    target = 3.0
    privacy = private(target_epsilon=target, noise_schedule=schedule)
    make_trainer(max_steps=TRAINED, callbacks=[privacy]).fit(classifier(mlp()), loader)

    charged = events(tmp_path)
    assert len(charged) == TRAINED
    assert {event.sample_rate for event in charged} == {0.1}
    multipliers = np.array([event.noise_multiplier for event in charged])
    shape = np.array([schedule(step) for step in range(TRAINED)])
    np.testing.assert_allclose(multipliers, multipliers[0] * shape, rtol=1e-12)
    spent = PLDAccountant().epsilon([(event, 1) for event in charged], DELTA)
    assert 0.99 * target < spent <= target
    assert privacy.epsilon == pytest.approx(spent, rel=1e-9)


def test_an_influence_shorter_than_the_run_is_refused_before_any_data_is_used(
    classifier, mlp, loader, make_trainer, tmp_path
):
    privacy = private(target_epsilon=3.0, noise_schedule=FromInfluence((1.0,) * (TRAINED - 1)))
    model = classifier(mlp())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"none for step {TRAINED - 1}"):
        make_trainer(max_steps=TRAINED, callbacks=[privacy]).fit(model, loader)
    assert privacy.steps == 0
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


class Falling(Constant):
    def __call__(self, step: int) -> float:
        return 0.5**step


def test_a_subclass_of_the_constant_schedule_is_not_taken_for_constant():
    plan = NoisePlan(1.0, Falling(), Poisson(), 0.1)
    assert plan.history(0, 2) == [(PoissonGaussian(0.5**step, 0.1), 1) for step in range(2)]
    for settings in (
        {"sampling": CyclicPoisson(2)},
        {"sampling": FixedOrder(), "relation": "zero_out"},
        {"sampling": RandomAllocation()},
        {"sampling": TruncatedPoisson(50)},
    ):
        with pytest.raises(RefusedSetting, match=r"needs the same noise.*Use Constant\(\)"):
            private(noise_schedule=Falling(), **settings)
