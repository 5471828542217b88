"""Sample sizes and step sizes: the formulas."""

from __future__ import annotations

import math

import pytest

from lightning_dp.federated import AsyncPlan, InverseRootSteps, PolynomialSizes
from lightning_dp.federated.asynchronous import (
    ConstantSteps,
    InverseSteps,
    PowerSizes,
    rounds_for,
)


@pytest.mark.parametrize("i", [0, 1, 7, 100])
def test_sizes_are_their_formulas(i):
    assert PolynomialSizes(1.322, 16)(i) == 16 + math.ceil(1.322 * i)
    assert PolynomialSizes(50, c=0.5, first=1)(i) == math.ceil(50 * math.sqrt(i + 1))
    assert PowerSizes(1000, 0.01, 3.5, 0.5)(i) == math.ceil(1000 * 0.01 * (i + 3.5) ** 0.5)


def test_the_papers_sequences_have_the_papers_rounds():
    """Examples 3 and E.2.1: 183 rounds of 16 + ⌈1.322 i⌉, 1563 of 16; 80 of 5 x 50; 20 of 5 x 200."""
    assert rounds_for(PolynomialSizes(1.322, 16), 25_000) == 183
    assert rounds_for(PolynomialSizes(0, 16), 25_000) == 1563
    assert [rounds_for(PolynomialSizes(0, s), 4000) for s in (50, 100, 200, 500, 700, 1000)] == [
        *(80, 40, 20, 8, 6, 4)
    ]


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
        (lambda: PowerSizes(0, 0.1, 1), "num_records=0"),
        (lambda: PowerSizes(10, math.nan, 1), "rate=nan"),
        (lambda: PowerSizes(10, 0.1, -1), "offset=-1"),
        (lambda: PowerSizes(10, 0.1, 1, 2.0), r"power=2\.0"),
        (lambda: InverseSteps(math.nan, 1.0), "eta0=nan"),
        (lambda: InverseRootSteps(1.0, -1.0), r"beta=-1\.0"),
        (lambda: AsyncPlan(0, PolynomialSizes(0, 1), ConstantSteps(1.0)), "rounds=0"),
        (lambda: AsyncPlan(1, PolynomialSizes(0, 1), ConstantSteps(1.0), lag=0), "lag=0"),
        (lambda: AsyncPlan(1, PolynomialSizes(0, 1), ConstantSteps(1.0), keep=0), "keep=0"),
        (lambda: rounds_for(PolynomialSizes(0, 1), math.nan), "gradients=nan"),
    ],
)
def test_bad_arguments_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()
