"""Noise schedules: one contract for all, and the closed form of each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from lightning_dp import schedules
from lightning_dp.plan import NoisePlan
from lightning_dp.sampling import Poisson
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


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[AbstractSchedule, Callable[[int], float]]:
    return CASES[request.param]


class TestContract:
    """What every schedule promises."""

    def test_it_equals_its_slow_twin(self, case):
        schedule, twin = case
        for step in STEPS:
            assert schedule(step) == pytest.approx(twin(step), rel=1e-9)

    def test_it_is_positive_and_finite_and_a_plain_float(self, case):
        for step in STEPS:
            value = case[0](step)
            assert type(value) is float
            assert 0 < value < math.inf

    def test_it_is_a_pure_function_of_the_step(self, case):
        schedule = case[0]
        forwards = [schedule(step) for step in STEPS]
        backwards = [schedule(step) for step in reversed(STEPS)]
        assert forwards == backwards[::-1]
        assert vars(schedule) == vars(dataclasses.replace(schedule))

    def test_it_starts_at_1(self, case):
        """So that the scale of a plan is the noise of its first step."""
        assert case[0](0) == 1.0

    def test_it_is_frozen_configuration(self, case):
        schedule = case[0]
        assert hash(schedule) == hash(dataclasses.replace(schedule))
        for name in [f.name for f in dataclasses.fields(schedule)] or ["anything"]:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(schedule, name, 0)

    def test_its_repr_is_the_call_that_made_it(self, case):
        assert eval(repr(case[0]), vars(schedules)) == case[0]


def test_every_schedule_is_tested():
    public = {getattr(schedules, name) for name in schedules.__all__}
    concrete = {kind for kind in public if not kind.__name__.startswith("Abstract")}
    assert concrete == {type(schedule) for schedule, _ in CASES.values()}


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf])
def test_an_exponential_rate_that_is_not_finite_is_refused(rate):
    with pytest.raises(ValueError, match=rf"Exponential\(rate={rate}\) must be a finite number"):
        Exponential(rate=rate)


@pytest.mark.parametrize("every", [0, -1, math.nan])
def test_an_interval_below_one_step_is_refused(every):
    with pytest.raises(
        ValueError, match=rf"StepDecay\(every={every}\) must be a whole number of at least 1"
    ):
        StepDecay(every=every, factor=0.5)


@pytest.mark.parametrize("factor", [0.0, -0.5, math.nan, math.inf])
def test_a_factor_that_is_not_positive_is_refused(factor):
    with pytest.raises(ValueError, match=rf"StepDecay\(factor={factor}\) must be finite"):
        StepDecay(every=1, factor=factor)


def test_a_plan_names_the_step_at_which_a_growing_schedule_overflows():
    plan = NoisePlan(1.0, Exponential(rate=-1.0), Poisson(), 0.1)
    with pytest.raises(ValueError, match="gives inf at step 5000"):
        plan.noise_multiplier(5000)
