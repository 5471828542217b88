"""Noise schedules: one contract for all, and the closed form of each."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest

from lightning_dp import schedules
from lightning_dp.noise_plan import NoisePlan
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


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[AbstractSchedule, Callable[[int], float]]:
    return CASES[request.param]


class TestContract:
    """The promises of every schedule."""

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

    def test_a_resumed_one_goes_on_where_it_was(self, case):
        """It holds no state: a copy made of its configuration alone says the same."""
        resumed = pickle.loads(pickle.dumps(case[0]))
        assert resumed == case[0]
        assert [resumed(step) for step in STEPS] == [case[0](step) for step in STEPS]

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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Exponential(math.nan), r"Exponential\(rate=nan\) must be a finite number"),
        (lambda: Exponential(math.inf), r"Exponential\(rate=inf\) must be a finite number"),
        (lambda: Exponential(-math.inf), r"Exponential\(rate=-inf\) must be a finite number"),
        (lambda: StepDecay(0, 0.5), r"StepDecay\(every=0\) must be a whole number of at least 1"),
        (lambda: StepDecay(-1, 0.5), r"StepDecay\(every=-1\) must be a whole number"),
        (lambda: StepDecay(math.nan, 0.5), r"StepDecay\(every=nan\) must be a whole number"),
        (lambda: StepDecay(1, 0.0), r"StepDecay\(factor=0.0\) must be finite"),
        (lambda: StepDecay(1, -0.5), r"StepDecay\(factor=-0.5\) must be finite"),
        (lambda: StepDecay(1, math.nan), r"StepDecay\(factor=nan\) must be finite"),
        (lambda: StepDecay(1, math.inf), r"StepDecay\(factor=inf\) must be finite"),
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


def test_a_plan_names_the_step_at_which_a_growing_schedule_overflows():
    plan = NoisePlan(1.0, Exponential(rate=-1.0), Poisson(), 0.1)
    with pytest.raises(ValueError, match="gives inf at step 5000"):
        plan.noise_multiplier(5000)
