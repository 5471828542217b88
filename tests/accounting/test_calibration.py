"""From a budget to the noise and to the number of steps: never over, hardly under."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import lightning_dp.accounting as accounting
from lightning_dp.accounting import (
    AbstractAccountant,
    AbstractEvent,
    Gaussian,
    PoissonGaussian,
    StreamingRDPAccountant,
    affordable_steps,
    calibrate,
)

RELATIONS = ("add_remove", "replace_one")
SHAPES: dict[str, Callable[[int], float]] = {
    "constant": lambda t: 1.0,
    "decay": lambda t: 0.999**t,
    "step": lambda t: 2.0 if t < 50 else 1.0,
}


def cost(
    scale: float, shape: Callable[[int], float], q: float, steps: int, delta: float, relation: str,
    spent: list[tuple[AbstractEvent, int]],
) -> float:  # fmt: skip
    plan: list[tuple[AbstractEvent, int]] = [
        (PoissonGaussian(scale * shape(t), q), 1) for t in range(steps)
    ]
    return accounting.epsilon([*spent, *plan], delta, relation)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("q", "steps", "epsilon", "delta"),
    [(0.01, 300, 3.0, 1e-5), (0.1, 20, 0.05, 1e-8), (1.0, 200, 8.0, 1e-6), (0.3, 1, 40.0, 1e-5)],
)
def test_keeps_to_the_budget_and_uses_it_up(
    q: float, steps: int, epsilon: float, delta: float, name: str, relation: str
) -> None:
    spent = [(PoissonGaussian(4.0, 0.01), 30)]
    for before in ([], spent):
        scale = calibrate(SHAPES[name], q, steps, epsilon, delta, relation, spent=before)
        value = cost(scale, SHAPES[name], q, steps, delta, relation, before)
        assert epsilon * (1 - 1e-3) <= value <= epsilon


def test_random_budgets_are_never_exceeded() -> None:
    rng = np.random.default_rng(5)
    for _ in range(12):
        q, steps = float(np.exp(rng.uniform(-6, 0))), int(rng.integers(1, 400))
        epsilon, delta = float(np.exp(rng.uniform(-4, 3.5))), float(10 ** rng.uniform(-10, -3))
        scale = calibrate(SHAPES["constant"], q, steps, epsilon, delta)
        value = accounting.epsilon([(PoissonGaussian(scale, q), steps)], delta)
        assert epsilon * (1 - 1e-3) <= value <= epsilon


def test_a_list_is_the_function_of_its_elements() -> None:
    values = [0.99**t for t in range(60)]
    assert calibrate(values, 0.02, 60, 2.0, 1e-5) == calibrate(
        lambda t: 0.99**t, 0.02, 60, 2.0, 1e-5
    )


def test_what_was_spent_asks_for_more_noise() -> None:
    spent = [(PoissonGaussian(1.0, 0.01), 300)]
    alone = calibrate(SHAPES["constant"], 0.01, 300, 2.0, 1e-5)
    assert calibrate(SHAPES["constant"], 0.01, 300, 2.0, 1e-5, spent=spent) > 1.02 * alone


def test_the_accountant_of_choice_decides() -> None:
    judge = StreamingRDPAccountant()
    scale = calibrate(SHAPES["constant"], 0.01, 300, 2.0, 1e-5, accountant=judge)
    value = judge.epsilon([(PoissonGaussian(scale, 0.01), 300)], 1e-5)
    assert 2.0 * (1 - 1e-3) <= value <= 2.0
    assert scale > calibrate(SHAPES["constant"], 0.01, 300, 2.0, 1e-5)


def test_reference_scale() -> None:
    """privacy.md, section 6: (3, 1e-5), q = .01, T = 1000, constant noise."""
    assert calibrate(SHAPES["constant"], 0.01, 1000, 3.0, 1e-5) == pytest.approx(0.8138, rel=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": lambda t: 0.0}, "shape must be finite and positive, got 0.0 at step 0"),
        ({"shape": lambda t: math.nan}, "shape must be finite and positive"),
        ({"shape": lambda t: -1.0 if t == 3 else 1.0}, "got -1.0 at step 3"),
        ({"shape": [1.0] * 9}, "shape has 9 values for 10 steps"),
        ({"sample_rate": 0.0}, "sample_rate must be in"),
        ({"sample_rate": math.nan}, "sample_rate must be in"),
        ({"sample_rate": 1.5}, "sample_rate must be in"),
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"steps": 1.5}, "steps must be an integer of at least 1"),
        ({"epsilon": 0.0}, "epsilon must be finite and above 0"),
        ({"epsilon": math.nan}, "epsilon must be finite and above 0"),
        ({"epsilon": math.inf}, "epsilon must be finite and above 0"),
        ({"delta": 0.0}, "delta must be in"),
        ({"delta": math.nan}, "delta must be in"),
        ({"relation": "swap"}, "relation must be"),
        ({"spent": [(Gaussian(1.0), 1)]}, "spent already costs epsilon"),
        ({"spent": [(Gaussian(0.0), 1)]}, "spent already costs epsilon inf"),
    ],
)
def test_refuses_to_calibrate(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "shape": SHAPES["constant"], "sample_rate": 0.1, "steps": 10, "epsilon": 1.0, "delta": 1e-5
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        calibrate(**{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("spent", [[], [(PoissonGaussian(2.0, 0.05), 20)]])
@pytest.mark.parametrize("varying", [False, True])
def test_the_last_affordable_step_fits_and_the_next_does_not(
    relation: str, spent: list[tuple[AbstractEvent, int]], varying: bool
) -> None:
    def plan(step: int) -> AbstractEvent:
        return PoissonGaussian(0.9 * (0.995**step if varying else 1.0), 0.02)

    n = affordable_steps(
        plan if varying else plan(0), 10**6, 2.0, 1e-5, relation, spent=spent
    )  # fmt: skip
    assert n >= 10

    def after(steps: int) -> float:
        return accounting.epsilon(
            [*spent, *((plan(t), 1) for t in range(steps))], 1e-5, relation
        )  # fmt: skip

    assert after(n) <= 2.0 < after(n + 1)


def test_the_limit_limits() -> None:
    event = PoissonGaussian(1.0, 0.01)
    assert affordable_steps(event, 5, 3.0, 1e-5) == 5
    assert affordable_steps(event, 0, 3.0, 1e-5) == 0
    assert affordable_steps(lambda t: event, 7, 3.0, 1e-5) == 7


def test_nothing_is_affordable_when_the_first_step_or_the_past_costs_too_much() -> None:
    assert affordable_steps(Gaussian(0.1), 100, 1.0, 1e-5) == 0
    assert affordable_steps(Gaussian(0.0), 100, 1.0, 1e-5) == 0
    assert affordable_steps(Gaussian(9.0), 100, 1.0, 1e-5, spent=[(Gaussian(0.5), 1)]) == 0


def test_a_huge_limit_costs_nothing(limit: int = 10**15) -> None:
    """Full batches: n = floor(mu*^2 z^2), mu* the exact budget."""
    n = affordable_steps(Gaussian(1000.0), limit, 1.0, 1e-5)
    assert accounting.gdp_epsilon(math.sqrt(n) / 1000, 1e-5) <= 1.0
    assert accounting.gdp_epsilon(math.sqrt(n + 1) / 1000, 1e-5) > 1.0
    sampled = affordable_steps(PoissonGaussian(20.0, 1e-3), limit, 0.5, 1e-5)
    assert 10**6 < sampled < 10**8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": -1}, "limit must be at least 0"),
        ({"limit": math.nan}, "limit must be at least 0"),
        ({"epsilon": -1.0}, "epsilon must be finite and above 0"),
        ({"delta": 1.0}, "delta must be in"),
        ({"relation": "swap"}, "relation must be"),
    ],
)
def test_refuses_to_count_steps(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "plan": Gaussian(1.0), "limit": 10, "epsilon": 1.0, "delta": 1e-5
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        affordable_steps(**{**arguments, **change})  # type: ignore[arg-type]


def test_judges_satisfy_the_interface() -> None:
    assert isinstance(StreamingRDPAccountant(), AbstractAccountant)
