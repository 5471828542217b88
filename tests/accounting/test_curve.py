"""epsilon along a plan, against one evaluation for each length."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

import lightning_dp.accounting as accounting
from lightning_dp.accounting import (
    AbstractEvent,
    EpsilonCurve,
    Gaussian,
    PoissonGaussian,
    StreamingRDPAccountant,
    epsilon_curve,
)

LENGTHS = [0, 1, 2, 3, 10, 40, 41, 150, 400, 1500]
_RNG = np.random.default_rng(0)
_Z, _Q = _RNG.uniform(0.8, 2.5, 2000), np.exp(_RNG.uniform(-6.0, -3.0, 2000))
PLANS: dict[str, Callable[[int], AbstractEvent]] = {
    "constant": lambda t: PoissonGaussian(1.2, 0.02),
    "decay": lambda t: PoissonGaussian(3.0 * 0.999**t, 0.02),
    "all distinct": lambda t: PoissonGaussian(float(_Z[t]), float(_Q[t])),
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


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    ("relation", "delta", "spent"),
    [("add_remove", 1e-5, []), ("replace_one", 1e-10, []), ("add_remove", 1e-6, SPENT)],
)
def test_a_curve_is_one_evaluation_for_each_length(
    name: str, relation: str, delta: float, spent: list[tuple[AbstractEvent, int]]
) -> None:
    # Neighbours share a grid with a longer run: 8 lengths near each other in each stretch.
    lengths = sorted({*LENGTHS, *range(380, 400, 5), *range(1000, 1500, 100)})
    curve = epsilon_curve(PLANS[name], lengths, delta, relation, spent=spent)
    for steps, value in zip(lengths, curve, strict=True):
        if steps in LENGTHS or steps == 1000:
            exact = direct(PLANS[name], steps, delta, relation, spent)
            # Both are at most about 1e-3 above the truth.
            assert exact * (1 - 1e-3) <= value <= exact * 1.005 + 1e-9


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
    exact = [accounting.gdp_epsilon(math.sqrt(n) / 30, 1e-5) for n in (1, 10, 1000)]
    assert curve == pytest.approx(exact, rel=1e-9)


def test_no_noise_from_some_step_on_is_infinite_from_there_on() -> None:
    curve = epsilon_curve(lambda t: Gaussian(0.0 if t == 5 else 5.0), [5, 6, 7], 1e-5)
    assert curve[0] < 5 and np.all(np.isinf(curve[1:]))


def test_other_accountants_are_asked() -> None:
    judge, event = StreamingRDPAccountant(), PoissonGaussian(1.2, 0.02)
    curve = epsilon_curve(event, [10, 100], 1e-5, accountant=judge)
    assert list(curve) == [judge.epsilon([(event, n)], 1e-5) for n in (10, 100)]


@pytest.mark.parametrize("name", ["constant", "all distinct"])
def test_a_read_is_never_below_the_length_and_close(name: str) -> None:
    curve = EpsilonCurve(PLANS[name], 1500, 1e-5)
    reads = [curve.at(n) for n in range(1501)]
    assert reads == sorted(reads)
    assert reads[0] == 0.0
    for n in (1, 32, 33, 77, 500, 1499, 1500):
        exact = direct(PLANS[name], n, 1e-5, "add_remove", [])
        assert exact * (1 - 1e-3) <= reads[n] <= exact * 1.03


def test_the_nodes_are_dense_at_first_then_geometric() -> None:
    nodes = EpsilonCurve(Gaussian(1.0), 100_000, 1e-5).nodes
    assert list(nodes[:33]) == list(range(33))
    assert nodes[-1] == 100_000
    assert np.all(np.diff(nodes) <= np.maximum(1, 0.02 * nodes[:-1]))
    assert nodes.size < 480


@pytest.mark.parametrize("steps", [-1, 1501, math.nan])
def test_refuses_to_read_outside_the_plan(steps: int) -> None:
    with pytest.raises(ValueError, match=r"steps must be in 0 \.\. 1500"):
        EpsilonCurve(PLANS["constant"], 1500, 1e-5).at(steps)


@pytest.mark.parametrize("lengths", [[-1], [1.5], [math.nan], ["a"]])
def test_refuses_illegal_lengths(lengths: list[object]) -> None:
    with pytest.raises(ValueError, match="at_steps must be integers"):
        epsilon_curve(Gaussian(1.0), lengths, 1e-5)


def test_refuses_an_illegal_budget() -> None:
    for make in (
        lambda d, r: epsilon_curve(Gaussian(1.0), [1], d, r),
        lambda d, r: EpsilonCurve(Gaussian(1.0), 1, d, r),
    ):
        with pytest.raises(ValueError, match="delta must be in"):
            make(math.nan, "add_remove")
        with pytest.raises(ValueError, match="relation must be"):
            make(1e-5, "swap")
