"""The DIFF2 example as a user runs it, and its gradients, which are never formed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diff2_formulas import paper_noise
from torch import Tensor

from lightning_dp import Diff2
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.boundary import Query, Term, bounded_sum
from lightning_dp.functional import flatten, unflatten

MODULES = ("diff2_data", "diff2_model", "diff2_run", "diff2_report", "diff2_halving", "diff2")


@pytest.fixture
def example(import_paper: Callable[[str], Any]) -> Any:
    return SimpleNamespace(**{name: import_paper(name) for name in MODULES})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two small regression sets and two of classes, in the shapes of the archives."""
    rng = np.random.default_rng(0)
    x = rng.normal(2.0, 3.0, (403, 4)).astype(np.float32)
    y = x @ np.array([1.0, -0.5, 0.2, 0.0]) + 0.1 * rng.normal(size=len(x))
    np.savez(tmp_path / "california_housing.npz", X=x, y=y)
    np.savez(
        tmp_path / "blogfeedback.npz",
        X_train=x[:300],
        y_train=y[:300],
        X_test=x[300:],
        y_test=y[300:],
    )
    label = 1 + (y > 0).astype(np.int8) + (y > 2)
    np.savez(tmp_path / "kddcup99_10pct.npz", X=x, y=label)
    bits = {"wilderness": rng.integers(0, 4, 403), "soil": rng.integers(0, 40, 403)}
    np.savez(
        tmp_path / "covertype_subset.npz", X_num=rng.integers(0, 9, (403, 10)), y=label, **bits
    )
    return tmp_path


# -- the gradients -------------------------------------------------------------------------------


def autograds(data: Any, params: list[Tensor]) -> Tensor:
    """One row per training record, by autograd in float64, one record at a time."""
    rows = []
    for i in range(data.train.count):
        first, second = (p.double().requires_grad_() for p in params)
        hidden = torch.log1p(torch.exp(first @ data.train.x[:, i].double()))
        outputs = second[:, :-1] @ hidden + second[:, -1]
        if data.is_regression:
            loss = (outputs[0] - data.train.y[0, i].double()) ** 2
        else:
            loss = outputs.logsumexp(0) - outputs[data.train.y[i]]
        rows.append(flatten(torch.autograd.grad(loss, (first, second))))
    return torch.stack(rows)


def answer(example: Any, data: Any, weights: tuple[float, ...], points: list[list[Tensor]]) -> Any:
    """The example's answer to a query of these weights: the first is for the parameters."""
    terms = [Term(weights[0])]
    terms += [Term(w, flatten(p)) for w, p in zip(weights[1:], points[1:], strict=True)]
    answers = example.diff2_model.Answers(example.diff2_model.Network(data))
    return answers.gradients(Query(tuple(terms), 1.0, 1.0), points[0])


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["california", "kdd"])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, -1.0), (1.0, -0.7)])
def test_norms_and_clipped_sums_are_those_of_an_autograd_loop(name, weights, example, folder):
    data = example.diff2_data.split(name, str(folder), 0)
    network = example.diff2_model.Network(data)
    points = [network.start(seed) for seed in (1, 2)][: len(weights)]
    exact = sum(w * autograds(data, p) for w, p in zip(weights, points, strict=True))
    found = answer(example, data, weights, points)
    assert found.count == len(exact)
    torch.testing.assert_close(found.norms().double(), exact.norm(dim=1), rtol=1e-5, atol=1e-6)
    clip_norm = float(exact.norm(dim=1).median())
    factors = (clip_norm / exact.norm(dim=1)).clamp(max=1)
    total = bounded_sum(found, clip_norm)
    torch.testing.assert_close(total.value.double(), factors @ exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["california", "kdd"])
def test_differences_of_close_points_are_accurate_in_float32(name, example, folder):
    data = example.diff2_data.split(name, str(folder), 0)
    here = example.diff2_model.Network(data).start(1)
    generator = torch.Generator().manual_seed(0)
    there = [p + 1e-4 * torch.randn(p.shape, generator=generator) for p in here]
    exact = autograds(data, here) - autograds(data, there)
    norms = answer(example, data, (1.0, -1.0), [here, there]).norms()
    error = (norms.double() - exact.norm(dim=1)).abs().max()
    assert error < 5e-3 * exact.norm(dim=1).median()


@pytest.fixture
def copies(folder: Path) -> Path:
    """The set of classes with some records that are there up to five times."""
    with np.load(folder / "kddcup99_10pct.npz") as whole:
        x, y = whole["X"], whole["y"]
    chosen = np.random.default_rng(1).permutation(np.repeat(np.arange(90), np.arange(90) % 5 + 1))
    np.savez(folder / "kddcup99_10pct.npz", X=x[chosen], y=y[chosen])
    return folder


def test_equal_records_count_as_often_as_they_are_there(example, copies, monkeypatch):
    """Sums, means and runs are those where each copy is another column."""
    counted = example.diff2_data.split("kdd", str(copies), 0)
    kdd = example.diff2_data.SETS["kdd"]
    monkeypatch.setitem(
        example.diff2_data.SETS, "kdd", example.diff2.replace(kdd, has_copies=False)
    )
    example.diff2_data.split.cache_clear()
    each = example.diff2_data.split("kdd", str(copies), 0)
    assert counted.train.count == each.train.count > 2 * counted.train.columns
    assert counted.test.count == each.test.count > counted.test.columns

    points = [example.diff2_model.Network(each).start(seed) for seed in (1, 2)]
    for weights in ((1.0,), (1.0, -1.0)):
        norms = answer(example, each, weights, points[: len(weights)]).norms()
        sums = [
            bounded_sum(
                answer(example, data, weights, points[: len(weights)]), float(norms.median())
            )
            for data in (counted, each)
        ]
        torch.testing.assert_close(sums[0].value, sums[1].value, rtol=1e-4, atol=1e-4)
    found, expected = (
        example.diff2_model.Network(data).on_test(points[0]) for data in (counted, each)
    )
    assert found == pytest.approx(expected)

    setting = example.diff2_run.Setting(0.1, 0.5, 4, 3.0)
    run = example.diff2_run.Run("kdd", str(copies), 0, 3.0, 40, "exact", setting)
    traces = []
    for data in (counted, each):
        monkeypatch.setattr(example.diff2_run, "split", lambda *_, data=data: data)
        traces.append(example.diff2_run.execute(run))
    np.testing.assert_allclose(traces[0].values, traces[1].values, rtol=1e-3)
    assert traces[0].spent == traces[1].spent


# -- the noise and the runs ----------------------------------------------------------------------


def run_of(example: Any, folder: Path, setting: Any, noise: str, **changes: Any) -> Any:
    run = example.diff2_run.Run("california", str(folder), 0, 3.0, 40, noise, setting)
    return example.diff2_run.execute(example.diff2.replace(run, **changes))


def test_runs_spend_what_they_claim(example, folder):
    setting = example.diff2_run.Setting(0.05, 1.0, 4, 3.0, u=1.5)
    spent = run_of(example, folder, setting, "exact").spent
    assert 2.99 < spent["replace-one"] <= 3
    assert 1.3 < spent["add/remove"] < 1.5
    assert 2.99 < run_of(example, folder, setting, "add/remove").spent["add/remove"] <= 3
    spent = run_of(example, folder, example.diff2_run.Setting(0.05, 1.0), "paper").spent
    assert spent["replace-one"] == pytest.approx(2.341, abs=2e-3)


def test_without_noise_it_is_gradient_descent(example, folder):
    trace = run_of(example, folder, example.diff2_run.Setting(0.1), "none")
    data = example.diff2_data.split("california", str(folder), 0)
    params = example.diff2_model.Network(data).start(0)
    losses, squares, lengths = [], [], []
    for done in range(41):
        gradient = mean_gradient(data, params)
        if done % 20 == 0:
            losses.append(float((_outputs(params, data) - data.train.y[0]).square().mean()))
            squares.append(float(gradient.square().sum()))
        lengths.append(0.1 * float(gradient.norm()))
        step = unflatten(0.1 * gradient, params)
        params = [p - g for p, g in zip(params, step, strict=True)]
    np.testing.assert_allclose(trace.values[0], losses, rtol=1e-4)
    np.testing.assert_allclose(trace.values[1], squares, rtol=1e-3)
    root_mean_square = float(np.mean(np.square(lengths[20:40]))) ** 0.5
    assert trace.step_length == pytest.approx(root_mean_square, rel=1e-3)


def test_the_error_of_classes_is_the_share_that_is_wrong(example, folder):
    data = example.diff2_data.split("kdd", str(folder), 0)
    network = example.diff2_model.Network(data)
    params = network.start(3)
    wrong = 0
    for x, y in zip(data.test.x.T, data.test.y, strict=True):
        hidden = torch.nn.functional.softplus(params[0] @ x)
        outputs = params[1] @ torch.cat([hidden, torch.ones(1)])
        wrong += int(outputs.argmax()) != int(y)
    assert network.on_test(params)[1] == pytest.approx(wrong / len(data.test.y))
    assert 0 < wrong < len(data.test.y)
    of_numbers = example.diff2_data.split("california", str(folder), 0)
    network = example.diff2_model.Network(of_numbers)
    assert math.isnan(network.on_test(network.start(3))[1])


def mean_gradient(data: Any, params: list[Tensor]) -> Tensor:
    """Of the squared error over all records, by autograd in float64."""
    point = [p.double().requires_grad_() for p in params]
    x, y = data.train.x.double(), data.train.y[0].double()
    hidden = torch.nn.functional.softplus(point[0] @ x)
    outputs = point[1][0, :-1] @ hidden + point[1][0, -1]
    return flatten(torch.autograd.grad((outputs - y).square().mean(), point))


def _outputs(params: list[Tensor], data: Any) -> Tensor:
    hidden = torch.nn.functional.softplus(params[0] @ data.train.x)
    return params[1][0, :-1] @ hidden + params[1][0, -1]


def test_a_part_of_a_run_is_how_it_begins(example, folder):
    setting = example.diff2_run.Setting(0.05, 1.0, 4, 3.0)
    whole = run_of(example, folder, setting, "exact", rounds=80)
    part = run_of(example, folder, setting, "exact", rounds=80, part=2)
    np.testing.assert_array_equal(part.values, whole.values[:, :3])


def test_halving_drops_by_the_level_of_each_rung(example):
    """Of settings whose levels are known the best at first is overtaken; a mean decides."""
    halving, setting = example.diff2_halving, example.diff2_run.Setting
    settings = [setting(float(i)) for i in range(1, 31)]
    levels = {8: lambda i, s: i, 2: lambda i, s: -i, 1: lambda i, s: [i, -2.5 * i, 0][s - 100]}
    made = []

    def execute_all(runs):
        made.append(runs)
        return [
            SimpleNamespace(
                level=lambda c, at=(part, one.rate, seed): (1 - 2 * c) * levels[at[0]](*at[1:])
            )
            for _, one, seed, part in runs
        ]

    found = halving.winners(
        {"a": ("exact", settings)}, halving.HALVING, lambda *what: what, execute_all
    )
    assert [len(runs) for runs in made] == [30, 24, 24]
    assert {one.rate for _, one, *_ in made[1]} == {*range(1, 13), *range(19, 31)}
    assert {(one.rate, seed) for _, one, seed, _ in made[2]} == {
        (rate, seed) for rate in (*range(9, 13), *range(19, 23)) for seed in (100, 101, 102)
    }
    assert found["a", 0].rate == 12  # of the last four the mean is -1.5 i / 3
    assert found["a", 1].rate == 19
    grids = halving.dp_gd_grid(), halving.diff2_grid()
    assert [len(set(grid)) for grid in grids] == [30, 30]


@pytest.mark.slow
def test_halving_prints_its_winners_and_its_tables(run_paper, copies, tmp_path):
    arguments = ["--confirm", "--sets", "kdd", "--rounds", "80", "--seeds", "2", "--jobs", "1"]
    done = run_paper("diff2.py", *arguments, "--output", str(tmp_path / "pictures"), data=copies)
    assert done.returncode == 0, done.stderr
    assert "by halving and by the full grid in" in done.stdout
    assert "| DIFF2-GD, paper's noise (a) | 2.341 |" in done.stdout
    assert (tmp_path / "pictures" / "kdd.png").stat().st_size > 20_000


@pytest.mark.slow
def test_the_quick_run_prints_its_tables_and_draws_its_picture(run_paper, folder, tmp_path):
    arguments = ["--quick", "--rounds", "40", "--jobs", "1", "--output", str(tmp_path / "pictures")]
    done = run_paper("diff2.py", *arguments, data=folder)
    assert done.returncode == 0, done.stderr
    for words in ("California Housing: n = 320, 81 to test", "| DIFF2-GD(c) < DIFF2-GD(b) |"):
        assert words in done.stdout
    rows = re.findall(r"\| (DP-GD|DIFF2-GD), (.*?) \([abc]\) \| ([\d.]+) \|", done.stdout)
    assert len(rows) == 5
    for _, noise, epsilon in rows:
        assert float(epsilon) == pytest.approx(2.341 if "paper" in noise else 2.9985, abs=2e-3)
    assert (tmp_path / "pictures" / "california.png").stat().st_size > 20_000
    assert "DIFF2-GD, best split (c)" in (tmp_path / "pictures/california_tuning.csv").read_text()


# -- the noise of the DIFF2 paper is that of Proposition 4.1, and more than its ε needs ----------


# n = 16,512, R = 2000, ε = 3, δ = 1e-5, u = 1.25.
@pytest.mark.parametrize(
    ("interval", "sigmas"),
    [
        (6, (0.004287, 0.019148)),
        (20, (0.002346, 0.020448)),
        (60, (0.001368, 0.020800)),
        (200, (0.000742, 0.020927)),
        (1, (0.009382, 0.0)),
    ],
)
def test_noise_of_the_paper(interval, sigmas):
    noise = paper_noise(Diff2(interval), 3.0, 1e-5, steps=2000, num_records=16_512)
    assert noise == pytest.approx(sigmas, abs=5e-7)


@pytest.mark.parametrize("interval", [6, 20, 60, 200])
def test_noise_of_the_paper_has_less_privacy_left_over_than_it_says(interval):
    """Replace-one: z on the sum is n σ / 2. The paper's noise for ε = 3 is good for 2.34."""
    noise = paper_noise(Diff2(interval), 3.0, 1e-5, steps=2000, num_records=16_512)
    restarts = math.ceil(2000 / interval)
    z1, z2 = (16_512 * sigma / 2 for sigma in noise)
    mu = math.sqrt(restarts / z1**2 + (2000 - restarts) / z2**2)
    assert gdp_epsilon(mu, 1e-5) == pytest.approx(2.34, abs=0.005)
