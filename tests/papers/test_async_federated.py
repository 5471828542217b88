"""The closed forms of examples/papers/async_federated.py are the package's own sums."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from pathlib import Path

import async_federated_formulas
import numpy as np
import pytest
import torch
from async_federated_formulas import (
    paper_higher_order,
    paper_r0,
    paper_selection,
    paper_sigma,
    true_epsilon,
)

from lightning_dp.accounting import PLDAccountant, PoissonGaussian, calibrate
from lightning_dp.boundary import Query, Term, bounded_sum
from lightning_dp.federated import PolynomialSizes
from lightning_dp.federated.asynchronous import rounds_for
from lightning_dp.gradients.parameter_sum import MaterialisedGradients

PAPERS = Path(__file__).parents[2] / "examples" / "papers"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(PAPERS))
    return importlib.import_module("async_federated_data")


def problem(n=20, d=5):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator)
    y = torch.where(torch.randn(n, generator=generator) > 0, 1.0, -1.0)
    return x, y, torch.randn(d, generator=generator)


def by_autograd(x, y, point, decay) -> torch.Tensor:
    rows = []
    for features, label in zip(x, y, strict=True):
        w = point.clone().requires_grad_()
        loss = torch.nn.functional.softplus(-label * (features @ w)) + decay / 2 * w.square().sum()
        rows.append(torch.autograd.grad(loss, w)[0])
    return torch.stack(rows)


@pytest.mark.parametrize("decay", [0.0, 0.7])
@pytest.mark.parametrize("clip_norm", [0.3, 2.0, math.inf])
@pytest.mark.parametrize("chosen", [[], [3], [0, 4, 7, 19]])
def test_logistic_sums_are_those_of_autograd_and_the_package(example, decay, clip_norm, chosen):
    x, y, point = problem()
    query = Query((Term(1.0, point),), clip_norm, 0.0)
    found = example.LogisticRecords(x, y, decay).bounded_sum(query, chosen)
    rows = by_autograd(x, y, point, decay)[chosen] if chosen else torch.zeros(0, 5)
    expected = bounded_sum(MaterialisedGradients([point], [rows], 1.0), clip_norm)
    assert found.clip_norm == clip_norm
    if chosen:
        all_rows = by_autograd(x[chosen], y[chosen], point, decay)
        expected = bounded_sum(MaterialisedGradients([point], [all_rows], 1.0), clip_norm)
    torch.testing.assert_close(found.value, expected.value)


def test_lenet_sums_are_gradients_of_the_summed_loss(example):
    images, digits = torch.randn(3, 1, 28, 28), torch.tensor([1, 5, 9])
    records, model = example.LeNetRecords(images, digits), example.lenet()
    point = torch.cat([p.detach().flatten() for p in model.parameters()])
    query = Query((Term(1.0, point),), math.inf, 0.0)
    total = records.bounded_sum(query, [0, 1, 2]).value
    parts = [records.bounded_sum(query, [i]).value for i in range(3)]
    torch.testing.assert_close(total, sum(parts), rtol=1e-4, atol=1e-6)
    assert len(point) == 61_706


@pytest.mark.slow
def test_it_runs_on_small_archives(tmp_path):
    rng = np.random.default_rng(0)
    for name, n in (("a9a", 10_000), ("w8a", 49_749)):
        x = rng.random((n, 12)).astype(np.float32)
        y = np.where(x[:, 0] + 0.1 * rng.standard_normal(n) > 0.5, 1, -1)
        np.savez(tmp_path / f"{name}.npz", X=x, y=y)
    script = PAPERS / "async_federated.py"
    done = subprocess.run(
        [sys.executable, str(script), "--data", str(tmp_path), "--quick", "--seeds", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("## ") == 5


# -- the paper's parameter selection prints the paper's numbers; the true ε stands beside the ----


EXACT, ROUNDED = 1e-12, 1e-6
TOTAL, RECORDS, DELTA = 25_000, 10_000, 5.5e-8


def formulas(number: int, **changes):
    chosen = {
        1: (16, 50_000, {"sigma": 3.0, "epsilon": 2.0, "epochs": 100, "r0": 0.0110}),
        2: (16, 10_000, {"sigma": 5.0, "epsilon": 2.0, "epochs": 10, "r0": 0.0202}),
        3: (16, 10_000, {"sigma": 8.0, "epsilon": 1.0, "epochs": 2.5, "r0": 1 / math.e}),
        4: (16, 25_000, {"sigma": 8.0, "epsilon": 2.0, "epochs": 5, "r0": 0.0247}),
        5: (16, 25_000, {"sigma": 8.0, "epsilon": 2.0, "epochs": 5, "r0": 1 / math.e}),
    }[number]
    return paper_selection(*chosen[:2], **{**chosen[2], **changes})


@pytest.mark.parametrize(
    ("number", "rate", "offset", "rounds", "ratio", "precision"),
    [
        (1, 6.722222222222222e-8, 4760.330578512398, 54546, 0.08727185455418175, EXACT),
        (2, 8.160800000000002e-7, 1960.5920988138412, 4951, 0.39599921204076777, EXACT),
        (3, 1.3216327772100012e-4, 12.106237281566509, 195, 0.06208326811059748, EXACT),
        (4, 9.53265625e-7, 671.376354308, 3239, 0.20727889913, 1e-9),
        (5, 7.554972e-5, 8.471242187728482, 364, 0.023272643372880444, 1e-6),
    ],
)
def test_the_examples_parameters(number, rate, offset, rounds, ratio, precision):
    chosen = formulas(number)
    assert chosen.rate == pytest.approx(rate, rel=precision)
    assert chosen.offset == pytest.approx(offset, rel=precision)
    assert chosen.rounds == rounds
    assert chosen.ratio == pytest.approx(ratio, rel=precision)
    assert chosen.by_k_star == (number in (1, 2, 4))


@pytest.mark.parametrize(
    ("number", "factor", "delta"),
    [
        (1, 1.5222584705194226, 0.020570872204539764),
        (2, 5.31257308281, None),
        (3, 1.38361486085, 5.502343985212556e-8),
        (5, 1.1486274762710156, 8.56732681988984e-22),
    ],
)
def test_the_examples_promises(number, factor, delta):
    chosen = formulas(number)
    assert chosen.sigma / chosen.budget == pytest.approx(factor, rel=1e-9)
    if delta is not None:
        assert chosen.delta == pytest.approx(delta, rel=1e-6)


def test_example_1_at_a_larger_epsilon():
    """ "For ε = 6" in print; its δ is that of ε = 8, m = 4027 and another r0: here by its σ/B."""
    assert formulas(1, epsilon=8.0).delta == pytest.approx(math.exp(-4 * 1.97075599058834**2))


def test_example_4_divides_by_another_sigma_in_print():
    """√(1 - 0.0247/5) stands where σ is 8: the paper's δ is 6.24e-5, the theorem's 6.13e-5."""
    chosen = formulas(4)
    assert chosen.delta == pytest.approx(6.1298e-5, rel=1e-4)
    printed = chosen.budget / math.sqrt(1 - 0.0247 / 8) * math.sqrt(1 - 0.0247 / 5)
    assert math.exp(-(printed**2)) == pytest.approx(6.241319203188485e-5, rel=1e-6)


def test_the_constants_between_the_steps():
    """Example 3: u0, u1, r, and the factors of K⁻ and K*."""
    r, u0, u1 = paper_higher_order(1 / math.e, 8.0)
    assert (u1, u0) == pytest.approx((0.15275204077456322, 0.4495546831835495), rel=EXACT)
    assert r == pytest.approx(5.7460446671129635, rel=EXACT)
    first = formulas(3, refinements=0)
    assert first.rate == pytest.approx((0.1368988621622339 / 2.5) ** 3, rel=EXACT)
    second = formulas(3, refinements=1)
    assert second.rate == pytest.approx((0.12819685818649007 / 2.5) ** 3, rel=EXACT)
    third = formulas(3)
    assert third.rate == pytest.approx((0.12734354695486969 / 2.5) ** 3, rel=EXACT)
    star = third.k_star / RECORDS * third.rate / (1 + third.ratio) ** 2
    assert star == pytest.approx(0.0010573069002860367, rel=EXACT)


def test_the_fixed_point_is_one_and_near_what_is_printed():
    assert paper_r0(3.0) == pytest.approx(0.0110, abs=5e-5)
    assert paper_r0(5.0) == pytest.approx(0.0202, rel=0.01)
    assert paper_r0(8.0) == pytest.approx(0.0247, rel=0.01)
    for power in (0.2, 0.5, 1.0):
        for sigma in (1.137, 2.0, 8.0):
            r0 = paper_r0(sigma, power)
            base = (math.sqrt(3) - 1) / 2 * (2 * power + 1)
            expected = base ** ((1 + power) / (1 + 2 * power)) / (1 + power)
            # A and B of Theorem D.3 at m = 0; for p = 1 it is 0.5321797270231777
            assert async_federated_formulas._b(power, r0, sigma, 0.0) == pytest.approx(
                expected, rel=1e-9
            )
            assert async_federated_formulas._a(power, r0, sigma, 0.0) == pytest.approx(
                expected, rel=1e-9
            )
    assert expected == pytest.approx(0.5321797270231777)


def test_theorem_3s_bound_on_sigma():
    chosen = formulas(3)
    assert paper_sigma(chosen, chosen.delta, chosen.k_minus) == pytest.approx(8.0)
    with pytest.raises(ValueError, match="says nothing"):
        paper_sigma(chosen, 1e-5, 1.01 * chosen.k_minus)
    with pytest.raises(ValueError, match=r"above K\*"):
        paper_sigma(chosen, 1e-5, 1.01 * chosen.k_star)


def test_aggregated_noise_and_rounds_as_printed():
    """195 rounds against 1563, √T σ of 112 against 229."""
    chosen = formulas(3)
    constant = rounds_for(PolynomialSizes(0, 16), TOTAL)
    assert constant == 1563 and chosen.rounds == 195 and chosen.rounds_needed == 183
    assert math.sqrt(chosen.rounds) * 8 == pytest.approx(112, abs=0.5)
    assert math.sqrt(constant) * chosen.budget == pytest.approx(229, abs=0.5)


def test_the_true_epsilon_of_the_papers_noise_is_a_ninth():
    assert true_epsilon(formulas(3), DELTA) == pytest.approx(0.1145, abs=2e-4)


SEQUENCES = [
    (PolynomialSizes(1.322, 16), 183, 1.423, 19.2),
    (PolynomialSizes(0, 16), 1563, 0.837, 33.1),
    (PolynomialSizes(0, 137), 183, 1.293, 17.5),
]


@pytest.mark.parametrize(("sizes", "rounds", "sigma", "aggregated"), SEQUENCES)
def test_the_smallest_valid_sigma_is_just_enough(sizes, rounds, sigma, aggregated):
    """ε = 1 at δ = 5.5e-8 lies between σ and 0.5 % less."""
    assert rounds_for(sizes, TOTAL) == rounds
    assert math.sqrt(rounds) * sigma == pytest.approx(aggregated, abs=0.06)
    for factor, holds in ((1.002, True), (0.995, False)):
        events = [(PoissonGaussian(sigma * factor, sizes(i) / RECORDS), 1) for i in range(rounds)]
        assert holds == (PLDAccountant().epsilon(events, DELTA) <= 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "rounds", "sigma", "aggregated"), SEQUENCES)
def test_calibration_finds_it(sizes, rounds, sigma, aggregated):
    found = calibrate(lambda i: 1.0, lambda i: sizes(i) / RECORDS, rounds, epsilon=1.0, delta=DELTA)
    assert found == pytest.approx(sigma, abs=1.5e-3)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: paper_r0(1.0), r"sigma=1\.0"),
        (lambda: paper_r0(3.0, 1.5), r"power=1\.5"),
        (lambda: paper_higher_order(0.5, 8.0), r"r0=0\.5"),
        (lambda: paper_higher_order(0.3, 1.2), r"sigma=1\.2 is too small"),
        (lambda: formulas(3, epsilon=math.nan), "epsilon=nan"),
        (lambda: formulas(3, epochs=0.0), r"epochs=0\.0"),
        (lambda: formulas(3, power=0.0), r"power=0\.0"),
    ],
)
def test_bad_arguments_are_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
