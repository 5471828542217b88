"""The cubic Newton example as a user runs it: its closed form, its search, its data and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cubic_newton_formulas import paper_epsilon, paper_noise, paper_steps
from torch import Tensor, nn

from lightning_dp import CubicNewton
from lightning_dp.accounting import Gaussian, epsilon
from lightning_dp.boundary import Query, Term, bounded_sum
from lightning_dp.gradients.layer_calls import LayerCalls

MODULES = (
    *("cubic_newton_data", "cubic_newton_run", "cubic_newton_paper"),
    *("cubic_newton_report", "cubic_newton"),
)


@pytest.fixture
def example(import_paper: Callable[[str], Any]) -> Any:
    return SimpleNamespace(**{name: import_paper(name) for name in MODULES})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Small sets in the shapes of the archives."""
    rng = np.random.default_rng(0)
    x = (rng.random((500, 6)) < 0.4).astype(np.uint8)
    y = np.where(x[:, 0] + x[:, 1] - 0.8 + 0.5 * rng.normal(size=500) > 0, 1, -1).astype(np.int8)
    np.savez(tmp_path / "phishing.npz", X=x, y=y)
    np.savez(tmp_path / "w8a.npz", X_train=x, y_train=y)
    np.savez(tmp_path / "a9a.npz", X_train=x[:403], y_train=y[:403], X_test=x[403:], y_test=y[403:])
    images = rng.integers(0, 256, (300, 4, 4)).astype(np.uint8)
    digits = np.arange(300) % 10
    np.savez(
        tmp_path / "mnist.npz",
        X_train=images,
        y_train=digits,
        X_test=images[:100],
        y_test=digits[:100],
    )
    return tmp_path


# -- the closed form -------------------------------------------------------------------------------


class Margin(nn.Module):
    def __init__(self, point: Tensor) -> None:
        super().__init__()
        self.line = nn.Linear(len(point), 1, bias=False)
        self.line.weight.data = point[None].clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x)[:, 0]


def by_the_engine(x: Tensor, point: Tensor, direction: Tensor | None, query: Query) -> Tensor:
    """The clipped sum by the package's engine, from an ordinary model."""
    model = Margin(point)
    params = list(model.parameters())
    engine = LayerCalls(model, params)

    def run() -> Tensor:
        with engine.watching():
            return nn.functional.softplus(-model(x)).mean()

    if direction is None:
        engine.backward(run())
        gradients = engine.take(1.0)
    else:
        gradients = engine.along(run, direction, (1.0, 1.0))
    if query.coordinates is not None:
        gradients = gradients.restrict(query.coordinates)
    return bounded_sum(gradients, query.clip_norm).value


@pytest.mark.parametrize("coordinates", [None, torch.tensor([0, 2, 5])])
@pytest.mark.parametrize("with_product", [False, True])
@pytest.mark.parametrize("clip_norm", [0.02, 0.2, 10.0])
def test_the_closed_form_is_what_the_engine_gives(example, coordinates, with_product, clip_norm):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 7, generator=generator)
    point, along = torch.randn(2, 7, generator=generator)
    if coordinates is not None:
        along = along * torch.zeros(7).index_fill(0, coordinates, 1.0)
    terms = [Term(1.0, point), *([Term(1.0, point, along)] if with_product else [])]
    query = Query(tuple(terms), clip_norm, 1.0, coordinates)
    records = example.cubic_newton_run.LogisticRecords(x)
    for _ in range(2):  # the second time from what it remembers
        found = records.bounded_sum(query, range(40))
        expected = by_the_engine(x, point, along if with_product else None, query)
        torch.testing.assert_close(found.value, expected, rtol=1e-4, atol=1e-5)
        assert found.clip_norm == clip_norm


# -- the runs and the search -----------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"inner": 1},
        {"is_local": True},
        {"whole": True},
        {"cubic": 2.0},
        {"curvature": 0.01},
    ],
)
@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_the_search_computes_what_the_package_runs(example, folder, kept, change):
    run = example.cubic_newton_run
    of = example.cubic_newton_data.problem("phishing", str(folder), 4)
    setting = run.Setting(**{"inner": 3, "rate": 2.0, "clip": 0.2, "scale": 1.3, **change})
    trace = run.execute(of, setting, math.inf, 3, kept, seed=0)
    found = run.sweep(of, [setting, setting], [0.0, 0.0], 3, kept)
    assert found.tolist() == pytest.approx([float(trace.suboptimality[-1])] * 2, rel=1e-4)
    assert trace.suboptimality[-1] < 0.9 * trace.suboptimality[0]
    assert trace.evaluations == 3 * setting.inner
    assert 0 < trace.uplink - 4 * round(7 * kept + 0.1) < 160


@pytest.mark.parametrize("kept", [pytest.param(1.0, marks=pytest.mark.slow), 0.3])
def test_the_search_has_the_noise_of_the_package(example, folder, kept):
    run = example.cubic_newton_run
    of = example.cubic_newton_data.problem("phishing", str(folder), 4)
    setting = run.Setting(2, 2.0, 0.2)
    z = run.noise_multiplier(0.2, 3)
    found = run.sweep(of, [setting] * 500, [z] * 500, 3, kept)
    ran = torch.stack(
        [run.execute(of, setting, 0.2, 3, kept, seed).suboptimality[-1] for seed in range(50)]
    )
    spread = float(found.std()) / math.sqrt(50)
    assert float(ran.mean()) == pytest.approx(float(found.mean()), abs=4 * spread)
    assert float(ran.std()) == pytest.approx(float(found.std()), rel=0.4)


def test_runs_spend_what_they_claim(example, folder):
    run = example.cubic_newton_run
    of = example.cubic_newton_data.problem("phishing", str(folder), 4)
    for inner in (1, 3):
        trace = run.execute(of, run.Setting(inner, 1.0, 0.2), 0.8, 4, 1.0, 0)
        assert 0.799 <= trace.epsilon <= 0.8
    z = run.noise_multiplier(0.8, 4)
    assert epsilon([(Gaussian(z), 4)], 1e-5) == pytest.approx(0.8, rel=2e-3)


# -- the data --------------------------------------------------------------------------------------


def test_the_optimum_is_one(example, folder):
    of = example.cubic_newton_data.problem("phishing", str(folder), 4)
    at_zero = float(of.suboptimality(torch.zeros(7, 1))[0])
    assert at_zero == pytest.approx(math.log(2) - of.optimum)
    x = of.x.reshape(-1, 7).double().numpy()
    w = np.zeros(7)
    for _ in range(30):
        p = 1 / (1 + np.exp(x @ w))
        hessian = (x.T * (p * (1 - p))) @ x / len(x) + of.weight_decay * np.eye(7)
        w = w - np.linalg.solve(hessian, -(p @ x) / len(x) + of.weight_decay * w)
    least = np.log1p(np.exp(-x @ w)).mean() + of.weight_decay / 2 * w @ w
    assert of.optimum == pytest.approx(least, abs=1e-9)
    assert of.best_accuracy == pytest.approx(float((of.test.numpy() @ w > 0).mean()))


def test_the_synthetic_set_has_the_shape_of_epsilon_and_its_own_rule(example, monkeypatch):
    """Small here: variances 1/j, and labels whose rule is right on about 90 %."""
    data = example.cubic_newton_data
    assert data.SYNTHETIC == (400_000, 20_000, 2_000)
    monkeypatch.setattr(data, "SYNTHETIC", (12_000, 2_000, 60))
    (x, y), (x_test, y_test) = data._synthetic()
    assert x.shape == (12_000, 60)
    assert x_test.shape == (2_000, 60)
    np.testing.assert_allclose(x.var(0) * np.arange(1, 61), 1, atol=0.1)
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    assert 0.86 < np.mean((x_test @ best > 0) == (y_test > 0)) < 0.94
    of = data.problem("synthetic", "", 4)
    assert of.x.shape == (4, 3_000, 61)
    torch.testing.assert_close(of.x.norm(dim=2), torch.ones(4, 3_000))
    assert float(of.suboptimality(torch.zeros(61, 1))[0]) > 0.1
    assert 0.84 < of.best_accuracy < 0.94
    setting = example.cubic_newton_run.Setting(2, 8.0, 0.3)
    trace = example.cubic_newton_run.execute(of, setting, 1.0, 3, 1.0, 0)
    assert trace.suboptimality[-1] < trace.suboptimality[0]


# -- the paper's noise, and the tables -------------------------------------------------------------


@pytest.mark.slow
def test_the_papers_noise_is_that_of_theorem_1(example, folder):
    of = example.cubic_newton_data.problem("phishing", str(folder), 4)
    rows = list(example.cubic_newton_paper.paper_rows(of))
    assert [(row.stated, row.kept) for row in rows] == [(0.4, 0.1), (0.4, 1), (0.8, 0.1), (0.8, 1)]
    sigma = math.sqrt(160 * 400 * math.log(125)) * 0.2 / (0.8 * 100)
    assert rows[3].sigma == pytest.approx(sigma)
    assert rows[2].sigma == pytest.approx(sigma * math.sqrt(0.1))
    tau = (0.205 / 0.2 * 0.8 * 100) ** 2 / (7 * 400 * math.log(100))
    assert rows[3].steps == pytest.approx(tau)
    assert rows[3].true == pytest.approx(rows[2].true)
    assert all(bool(torch.isfinite(row.values).all()) for row in rows)


@pytest.mark.slow
def test_the_quick_run_prints_its_tables_and_draws_its_picture(run_paper, folder, tmp_path):
    arguments = ["--quick", "--jobs", "1", "--output", str(tmp_path / "pictures")]
    done = run_paper("cubic_newton.py", *arguments, data=folder)
    assert done.returncode == 0, done.stderr
    assert "phishing: 40 clients with m = 10, d = 7, 100 to test" in done.stdout
    rows = re.findall(r"\| ([\d.]+) \| (Fed-SGD|Newton)(?:, k/d = 0.1)? \| \d+ \|", done.stdout)
    assert len(rows) == 5
    for found, _ in rows:
        assert min(abs(float(found) - 0.4), abs(float(found) - 0.8)) < 1e-3
    assert (tmp_path / "pictures" / "phishing.png").stat().st_size > 20_000


# -- the cubic Newton paper's formulas say what the paper says; its noise costs more than it  ----


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
    assert true == pytest.approx(9.15, abs=0.005)
