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
