"""The cubic Newton paper's formulas say what the paper says; its noise costs more than it states."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from cubic_newton_formulas import paper_epsilon, paper_noise, paper_steps

from lightning_dp import CubicNewton


def test_noise_and_steps_of_the_paper():
    newton = CubicNewton(1.0, 1.0, 3, 0.1, 1.0, keep_fraction=0.08)
    sigma = paper_noise(newton, 0.8, 0.01, rounds=400, num_records=250, diameter=0.1)
    by_hand = 160 * 3 * 400 * 0.08 * math.log(125) * 0.2**2 / (0.8**2 * 250**2)
    assert sigma**2 == pytest.approx(by_hand)
    other = replace(newton, keep_fraction=None)
    options = {"rounds": 400, "num_records": 250, "diameter": 0.1}
    assert paper_noise(other, 0.8, 0.01, **options, kept_fraction=0.08) == sigma
    tau = paper_steps(newton, 0.8, 0.01, **options, kept=10)
    by_hand = (0.1 + 0.1 + 0.005) ** 2 * 0.8**2 * 250**2 / (10 * 400 * math.log(100) * 0.2**2)
    assert tau == pytest.approx(by_hand)


@pytest.mark.parametrize("options", [{"inner_steps": 2}, {"inner_steps": 7, "keep_fraction": 0.1}])
def test_the_noise_of_the_paper_has_a_much_larger_epsilon_than_it_says(options):
    """Its own experiment: 400,000 records on 40 clients, four epochs of one record per round."""
    newton = CubicNewton(1.0, 1.0, max_grad_norm=0.1, **options)
    true = paper_epsilon(newton, 0.8, 0.01, rounds=40_000, num_records=10_000, delta=1e-5)
    assert true == pytest.approx(9.16, rel=6e-3)


@pytest.mark.parametrize("bad", [
    {"target_epsilon": 0.0}, {"delta0": math.nan}, {"rounds": 0}, {"num_records": -1},
    {"diameter": math.inf},
])  # fmt: skip
def test_bad_arguments_of_the_papers_formulas_are_named(bad):
    good = {"target_epsilon": 1.0, "delta0": 0.01, "rounds": 3, "num_records": 5, "diameter": 1.0}
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        paper_noise(CubicNewton(1.0, 1.0, 2), **{**good, **bad})
