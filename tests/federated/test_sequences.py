"""Sample sizes and step sizes: the formulas, and when a delay is permissible."""

from __future__ import annotations

import math

import pytest

from lightning_dp.federated import AsyncPlan, InverseRootSteps, PolynomialSizes
from lightning_dp.federated.sequences import (
    ConstantSteps,
    DelaySizes,
    InverseSteps,
    LogarithmicSizes,
    PowerSizes,
    delay_is_permissible,
    rounds_for,
)


@pytest.mark.parametrize("i", [0, 1, 7, 100])
def test_sizes_are_their_formulas(i):
    assert PolynomialSizes(1.322, 16)(i) == 16 + math.ceil(1.322 * i)
    assert PolynomialSizes(50, c=0.5, first=1)(i) == math.ceil(50 * math.sqrt(i + 1))
    assert LogarithmicSizes(50, first=4)(i) == math.ceil(50 * (i + 4) / math.log(i + 4))
    assert PowerSizes(1000, 0.01, 3.5, 0.5)(i) == math.ceil(1000 * 0.01 * (i + 3.5) ** 0.5)
    x = (5000 + i + 1) / 3
    assert DelaySizes(2, 5000)(i) == math.ceil((5000 + i + 1) / (16 * 9) / math.log(x / 2))
    assert x > 2


def test_the_papers_sequences_have_the_papers_rounds():
    """Examples 3 and E.2.1: 183 rounds of 16 + ⌈1.322 i⌉, 1563 of 16; 80 of 5 x 50; 20 of 5 x 200."""
    assert rounds_for(PolynomialSizes(1.322, 16), 25_000) == 183
    assert rounds_for(PolynomialSizes(0, 16), 25_000) == 1563
    assert [rounds_for(PolynomialSizes(0, s), 4000) for s in (50, 100, 200, 500, 700, 1000)] == [
        *(80, 40, 20, 8, 6, 4)
    ]


@pytest.mark.parametrize("lag", [1, 2, 5])
@pytest.mark.parametrize("offset", [500.0, 5800.0, 60_000.0])
def test_the_recipe_keeps_its_delay(lag, offset):
    """Lemma B.3, by its own condition; sizes twice as large break it."""
    sizes = DelaySizes(lag, offset)
    assert delay_is_permissible(sizes, sizes.delay, lag=lag, rounds=3000)
    assert not delay_is_permissible(lambda i: 200 * sizes(i), sizes.delay, lag=lag, rounds=3000)


def test_the_recipe_for_other_exponents():
    sizes = DelaySizes(1, 200.0, exponent=3.0, slow=lambda x: 2 * math.log(x))
    assert delay_is_permissible(sizes, sizes.delay, lag=1, rounds=500)
    assert sizes(0) == math.ceil(
        math.sqrt(201 / 2 / (2 * math.log((201 / 2 * 2 / 3) ** 1.5)) * 2 / 3) / 2
    )


def test_a_delay_is_judged_by_the_slow_definition():
    values = [3, 1, 4, 1, 5, 9, 2, 6]
    for lag in range(4):
        worst = max(
            sum(values[j] for j in range(max(0, i - lag), i + 1)) - sum(values[: i + 1]) / 4
            for i in range(8)
        )
        for slack, holds in ((worst, True), (worst - 0.01, False)):
            assert holds == delay_is_permissible(
                values.__getitem__, lambda x, s=slack: s + x / 4, lag=lag, rounds=8
            )


def test_step_sizes_are_their_formulas_at_the_gradients_before():
    sizes = PolynomialSizes(10, 5)
    for steps, at in (
        (ConstantSteps(0.3), lambda t: 0.3),
        (InverseSteps(0.3, 0.01), lambda t: 0.3 / (1 + 0.01 * t)),
        (InverseRootSteps(0.3, 0.01), lambda t: 0.3 / (1 + 0.01 * t**0.5)),
    ):
        plan = AsyncPlan(6, sizes, steps)
        for i in range(6):
            assert plan.gradients_before(i) == sum(sizes(j) for j in range(i))
            assert plan.step_size(i) == pytest.approx(at(sum(sizes(j) for j in range(i))))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: PolynomialSizes(50), "gives s_0 = 0"),
        (lambda: PolynomialSizes(math.nan, 5), "a=nan"),
        (lambda: PolynomialSizes(1, 5, c=1.5), r"c=1\.5"),
        (lambda: LogarithmicSizes(50, first=1), "first=1"),
        (lambda: PowerSizes(0, 0.1, 1), "num_records=0"),
        (lambda: PowerSizes(10, math.nan, 1), "rate=nan"),
        (lambda: PowerSizes(10, 0.1, -1), "offset=-1"),
        (lambda: PowerSizes(10, 0.1, 1, 2.0), r"power=2\.0"),
        (lambda: DelaySizes(0, 10), "lag=0"),
        (lambda: DelaySizes(1, 1.0), r"offset=1\.0 is too small"),
        (lambda: DelaySizes(1, 100.0, exponent=1.0), r"exponent=1\.0"),
        (lambda: InverseSteps(math.nan, 1.0), "eta0=nan"),
        (lambda: InverseRootSteps(1.0, -1.0), r"beta=-1\.0"),
        (lambda: AsyncPlan(0, PolynomialSizes(0, 1), ConstantSteps(1.0)), "rounds=0"),
        (lambda: AsyncPlan(1, PolynomialSizes(0, 1), ConstantSteps(1.0), lag=0), "lag=0"),
        (lambda: AsyncPlan(1, PolynomialSizes(0, 1), ConstantSteps(1.0), keep=0), "keep=0"),
        (lambda: rounds_for(PolynomialSizes(0, 1), math.nan), "gradients=nan"),
        (lambda: delay_is_permissible(len, float, lag=-1, rounds=1), "lag=-1"),
        (lambda: delay_is_permissible(len, float, lag=1, rounds=0), "rounds=0"),
    ],
)
def test_bad_arguments_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
