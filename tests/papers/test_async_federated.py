"""The closed forms of examples/papers/async_federated.py are the package's own sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from async_federated_formulas import (
    paper_selection,
    true_epsilon,
)

from lightning_dp.accounting import PLDAccountant, PoissonGaussian, calibrate
from lightning_dp.boundary import Query, Term, bounded_sum
from lightning_dp.federated import PolynomialSizes
from lightning_dp.federated.asynchronous import rounds_for
from lightning_dp.functional import flatten
from lightning_dp.gradients.parameter_sum import MaterialisedGradients


@pytest.fixture
def example(import_paper):
    return import_paper("async_federated_data")


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
    rows = by_autograd(x[chosen], y[chosen], point, decay) if chosen else torch.zeros(0, 5)
    expected = bounded_sum(MaterialisedGradients([point], [rows], 1.0), clip_norm)
    assert found.clip_norm == clip_norm
    torch.testing.assert_close(found.value, expected.value)


@pytest.mark.parametrize("chosen", [[], [2], [0, 3, 5]])
def test_lenets_private_sums_are_sums_of_clipped_gradients(example, chosen):
    generator = torch.Generator().manual_seed(0)
    images, digits = torch.rand(6, 1, 28, 28, generator=generator), torch.arange(6)
    records = example.LeNetRecords(images, digits)
    start = flatten(list(example.lenet().parameters()))
    point = start + 0.05 * torch.randn(len(start), generator=generator)
    plain = Query((Term(1.0, point),), math.inf, 0.0)
    each = [records.bounded_sum(plain, [i]).value for i in range(6)]
    clip_norm = float(torch.stack(each).norm(dim=1).median())
    expected = sum(
        (each[i] * min(1.0, clip_norm / float(each[i].norm())) for i in chosen),
        torch.zeros_like(point),
    )
    found = records.bounded_sum(Query((Term(1.0, point),), clip_norm, 1.0), chosen)
    assert found.clip_norm == clip_norm
    torch.testing.assert_close(found.value, expected, rtol=1e-3, atol=1e-5)


def test_biased_clients_of_two_digits_have_one_each(import_paper, mnist_folder):
    run = import_paper("async_federated_run")
    for biased in (False, True):
        split = run.Split.of(run.TWO_DIGITS, str(mnist_folder), 0, biased=biased)
        kinds = [len(y.unique()) for _, y in split.clients]
        assert kinds == ([1, 1] if biased else [2, 2])
        assert sum(len(y) for _, y in split.clients) == pytest.approx(4 * len(split.y), abs=4)


def test_a_private_run_repeats_number_by_number(import_paper, mnist_folder):
    private = import_paper("async_federated_private")
    private.LENET_RECORDS = 1000
    what = (str(mnist_folder), PolynomialSizes(0, 16), 2)
    runs = [private.private_lenet_run(*what, sigma, 0.5, 3) for sigma in (1.0, 1.0, 2.0)]
    assert runs[0] == runs[1]
    assert runs[0][2] == pytest.approx(
        private.true_epsilon(PolynomialSizes(0, 16), 1.0, 2, 1000), rel=1e-6
    )
    assert runs[2][2] < runs[0][2]


def test_a_tuned_run_spends_its_budget_and_without_noise_it_learns(
    import_paper, tmp_path, monkeypatch
):
    private = import_paper("async_federated_private")
    monkeypatch.setattr(private, "PRIVATE_RECORDS", 400)
    rng = np.random.default_rng(0)
    x = rng.random((3000, 6)).astype(np.float32)
    np.savez(tmp_path / "w8a.npz", X=x, y=np.where(x[:, 0] > 0.5, 1, -1))
    setting = {"step": 5.0, "size": 400, "clip": 1.0, "gradients": 16_000, "decay": 0.0}
    found = private.tuned_run(str(tmp_path), setting, 0)
    assert 0.99 < found.spent <= 1
    accuracy, _ = private.plain_model(str(tmp_path), 0)
    assert accuracy > 0.97
    monkeypatch.setattr(private, "smallest_sigma", lambda *_: 0.0)
    free = private.tuned_run(str(tmp_path), setting, 0)
    assert free.test[1] > 0.9
    assert free.test[0] > found.test[0]


@pytest.mark.slow
def test_it_runs_on_small_archives(run_paper, mnist_folder, tmp_path):
    rng = np.random.default_rng(0)
    for name, n in (("a9a", 10_000), ("w8a", 49_749)):
        x = rng.random((n, 12)).astype(np.float32)
        y = np.where(x[:, 0] + 0.1 * rng.standard_normal(n) > 0.5, 1, -1)
        np.savez(tmp_path / f"{name}.npz", X=x, y=y)
    arguments = ["--data", str(tmp_path), "--quick", "--seeds", "1"]
    done = run_paper("async_federated.py", *arguments, data=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("## ") == 11
    assert (tmp_path / "outputs/async_federated/growth.png").stat().st_size > 10_000


# -- the paper's parameter selection prints the paper's numbers, and the true ε ----------------------


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
