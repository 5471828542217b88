"""epsilon along a plan, against one evaluation for each length."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import lightning_dp.accounting as accounting
from lightning_dp.accounting import Gaussian, PoissonGaussian, StreamingRDPAccountant
from lightning_dp.accounting._grid import Together
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.accounting.pld import epsilon_curve

LENGTHS = [0, 1, 2, 3, 10, 40, 41, 150, 400, 1500]
_RNG = np.random.default_rng(0)
_Z, _Q = _RNG.uniform(0.8, 2.5, 200), np.exp(_RNG.uniform(-6.0, -3.0, 200))
PLANS: dict[str, Callable[[int], AbstractEvent]] = {
    "constant": lambda t: PoissonGaussian(1.2, 0.02),
    "decay": lambda t: PoissonGaussian(3.0 * 0.999**t, 0.02),
    "many distinct": lambda t: PoissonGaussian(float(_Z[t % 200]), float(_Q[t % 200])),
    "large samples": lambda t: PoissonGaussian(20.0 + 0.01 * t, 0.5),
    "sometimes full": lambda t: Gaussian(60.0) if t % 7 == 0 else PoissonGaussian(1.5, 0.01),
    "spike": lambda t: PoissonGaussian(0.5 if t == 100 else 4.0, 0.01),
}
SPENT = [(PoissonGaussian(1.0, 0.01), 200), (Gaussian(5.0), 1)]


def direct(
    plan: Callable[[int], AbstractEvent],
    steps: int,
    delta: float,
    relation: str,
    spent: list[tuple[AbstractEvent, int]],
) -> float:
    return accounting.epsilon([*spent, *((plan(t), 1) for t in range(steps))], delta, relation)


SETTINGS = [("add_remove", 1e-5, []), ("replace_one", 1e-10, []), ("add_remove", 1e-6, SPENT)]


@pytest.mark.parametrize(
    ("name", "relation", "delta", "spent"),
    [
        pytest.param(name, *setting, marks=[] if i % 3 == k else [pytest.mark.slow])
        for i, name in enumerate(PLANS)
        for k, setting in enumerate(SETTINGS)
    ],
)
def test_a_curve_is_one_evaluation_for_each_length(
    name: str, relation: str, delta: float, spent: list[tuple[AbstractEvent, int]]
) -> None:
    # Neighbours share a grid with a longer run: 8 lengths near each other in each stretch.
    lengths = sorted({*LENGTHS, *range(380, 400, 5), *range(1000, 1500, 100)})
    curve = epsilon_curve(PLANS[name], lengths, delta, relation, spent=spent)
    for steps, value in zip(lengths, curve, strict=True):
        if steps in (0, 1, 41, 400, 1000):
            exact = direct(PLANS[name], steps, delta, relation, spent)
            # Both are at most about 1e-3 above the truth.
            assert exact * (1 - 1e-3) <= value <= exact * 1.005 + 1e-9


@pytest.mark.parametrize("worse", [False, True])
def test_the_worse_direction_counts(monkeypatch: pytest.MonkeyPatch, worse: bool) -> None:
    monkeypatch.setattr(
        Together,
        "_group",
        lambda self, run, backward, least: np.full(run.size, 0.2 if backward == worse else 0.1),
    )
    assert list(epsilon_curve(PoissonGaussian(0.1, 0.5), [1, 2], 1e-5)) == [0.2, 0.2]


def test_one_event_is_the_function_that_always_returns_it() -> None:
    event = PoissonGaussian(1.2, 0.02)
    one = epsilon_curve(event, LENGTHS, 1e-5)
    assert one == pytest.approx(epsilon_curve(lambda t: event, LENGTHS, 1e-5), rel=1e-9)


def test_the_lengths_may_come_in_any_order_and_shape() -> None:
    event = PoissonGaussian(1.2, 0.02)
    a, b, c = epsilon_curve(event, [100, 10, 100], 1e-5)
    assert a == c > 1.5 * b > 0
    assert epsilon_curve(event, [[100, 10], [10, 100]], 1e-5).shape == (2, 2)
    assert epsilon_curve(event, [], 1e-5).size == 0


def test_full_batches_are_exact_at_every_length() -> None:
    curve = epsilon_curve(Gaussian(30.0), [1, 10, 1000], 1e-5)
    exact = [gdp_epsilon(math.sqrt(n) / 30, 1e-5) for n in (1, 10, 1000)]
    assert curve == pytest.approx(exact, rel=1e-9)


def test_no_noise_from_some_step_on_is_infinite_from_there_on() -> None:
    curve = epsilon_curve(lambda t: Gaussian(0.0 if t == 5 else 5.0), [5, 6, 7], 1e-5)
    assert curve[0] < 5 and np.all(np.isinf(curve[1:]))


def test_other_accountants_are_asked() -> None:
    judge, event = StreamingRDPAccountant(), PoissonGaussian(1.2, 0.02)
    curve = epsilon_curve(event, [10, 100], 1e-5, accountant=judge)
    assert list(curve) == [judge.epsilon([(event, n)], 1e-5) for n in (10, 100)]


@pytest.mark.parametrize("lengths", [[-1], [1.5], [math.nan], ["a"]])
def test_refuses_illegal_lengths(lengths: list[object]) -> None:
    with pytest.raises(ValueError, match="at_steps must be integers"):
        epsilon_curve(Gaussian(1.0), lengths, 1e-5)


def test_refuses_an_illegal_budget() -> None:
    with pytest.raises(ValueError, match="delta must be in"):
        epsilon_curve(Gaussian(1.0), [1], math.nan)
    with pytest.raises(ValueError, match="relation must be"):
        epsilon_curve(Gaussian(1.0), [1], 1e-5, "swap")
