"""DIFF2 in other forms: what each does without noise, what it spends, and its table."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_dp.accounting import PoissonGaussian, epsilon
from lightning_dp.functional import flatten

MODULES = ("diff2_data", "diff2_model", "diff2_run", "diff2_variants")


@pytest.fixture
def example(import_paper: Callable[[str], Any]) -> Any:
    return SimpleNamespace(**{name: import_paper(name) for name in MODULES})


@pytest.fixture
def data(example: Any, folder: Path) -> Any:
    return example.diff2_data.split("california", str(folder), 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    x = rng.normal(2.0, 3.0, (403, 4)).astype(np.float32)
    y = x @ np.array([1.0, -0.5, 0.2, 0.0]) + 0.1 * rng.normal(size=len(x))
    np.savez(tmp_path / "california_housing.npz", X=x, y=y)
    return tmp_path


def descent(example: Any, data: Any, rate: float, rounds: int) -> list[torch.Tensor]:
    """Plain gradient descent."""
    network = example.diff2_model.Network(data)
    params = network.start(3)
    for _ in range(rounds):
        gradient = network.at(params).gradient_sum() / data.train.count
        params = example.diff2_variants.step(params, gradient, rate)
    return params


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"every": 4, "diff": 1e6},
        {"every": 4, "diff": 1e6, "trigger": 1e-9},
        {"every": 4, "diff": 1e6, "trigger": 1e9},
        {"every": 4, "diff": 1e6, "batch": 320},
    ],
)
def test_without_noise_and_clipping_every_form_with_all_records_is_gradient_descent(
    example, data, form
):
    plan = example.diff2_variants.Plan(0.1, 1e6, 10, **form)
    found, course = example.diff2_variants.train(data, plan, math.inf, 3)
    torch.testing.assert_close(flatten(found), flatten(descent(example, data, 0.1, 10)))
    assert course.spent() == math.inf


def test_local_steps_follow_the_gradient_of_the_workers_records(example, data):
    """Algorithm 4 written down: two rounds of three steps, without noise, whole local batches."""
    variants = example.diff2_variants
    plan = variants.Plan(0.1, 1e6, 2, 4, 1e6, local=3, local_batch=32)
    found, _ = variants.train(data, plan, math.inf, 3)

    def gradient(params: Any, rows: torch.Tensor) -> torch.Tensor:
        part = variants.replace(data, train=data.train.take(rows))
        return example.diff2_model.Network(part).at(params).gradient_sum() / len(rows)

    every = torch.arange(data.train.count)
    before = params = example.diff2_model.Network(data).start(3)
    estimate = gradient(params, every)
    for r in range(2):
        if r:
            estimate = estimate + gradient(params, every) - gradient(before, every)
        before, params = params, variants.step(params, estimate, 0.1)
        local, last = estimate, before
        mine = every[r::10]
        for _ in range(2):
            local = local + gradient(params, mine) - gradient(last, mine)
            last, params = params, variants.step(params, local, 0.1)
    torch.testing.assert_close(flatten(found), flatten(params))


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"every": 4, "diff": 3.0},
        {"every": 4, "diff": 3.0, "trigger": 0.3},
        {"every": 4, "diff": 3.0, "batch": 40},
        {"every": 4, "diff": 3.0, "batch": 40, "larger": 3.0},
        {"every": 4, "diff": 3.0, "local": 4, "local_batch": 8, "local_noise": 0.5},
    ],
)
def test_a_run_spends_its_budget_and_no_more(example, data, form):
    plan = example.diff2_variants.Plan(0.05, 1.0, 22, **form)
    _, course = example.diff2_variants.train(data, plan, 2.0, 3)
    assert sum(course.charged.values()) == 22 + 9 * ("local" in form)  # worker 0: 3 turns of 3
    if "trigger" not in form:
        assert 1.99 < course.spent() <= 2
    restarts = sum(n for (z, _), n in course.charged.items() if z == course.scale)
    assert restarts == 6 if form.get("every") and "trigger" not in form else restarts >= 1
    events = [(PoissonGaussian(z, q), n) for (z, q), n in course.charged.items()]
    assert course.spent() == pytest.approx(epsilon(events, 1e-5), rel=1e-3)


@pytest.mark.parametrize(("trigger", "restarts"), [(1e-9, 6), (1e9, 1)])
def test_a_trigger_restarts_no_more_often_than_is_paid_for(example, data, trigger, restarts):
    plan = example.diff2_variants.Plan(0.05, 1.0, 22, 4, 3.0, trigger=trigger)
    _, course = example.diff2_variants.train(data, plan, 2.0, 3)
    assert course.charged[course.scale, 1.0] == restarts
    assert course.spent() <= 2
    assert (course.spent() > 1.99) == (restarts == 6)


def test_full_batches_are_those_of_the_papers_script(example, data, folder):
    """The noise of a round has the same scale: the same ε, T and split, through the mechanism."""
    plan = example.diff2_variants.Plan(0.05, 1.0, 40, 4, 3.0)
    scale = example.diff2_variants.scale_of(plan, data.train.count, 3.0)
    setting = example.diff2_run.Setting(0.05, 1.0, 4, 3.0)
    other = example.diff2_run.plan_of(setting, "add/remove", 3.0, 40, data.train.count)
    assert scale == pytest.approx(other.noise_multiplier(0), rel=2e-3)
    assert scale * plan.ratio == pytest.approx(other.noise_multiplier(1), rel=2e-3)


@pytest.mark.slow
def test_it_tunes_runs_and_prints_and_says_what_is_missing(example, folder, monkeypatch, capsys):
    variants = example.diff2_variants
    tried = ("DP-GD", "DIFF2-SGD, larger batches at restarts", "DIFF2-BVR-L-SGD")
    few = {name: {**variants.METHODS[name], "rounds": (10,)} for name in tried}
    monkeypatch.setattr(variants, "METHODS", few)
    arguments = ["--data", str(folder), "--noises", "20", "--out", str(folder / "runs.jsonl")]
    variants.main([*arguments, "--minutes", "0"])
    assert capsys.readouterr().out.count("missing (0 of 20)") == len(variants.METHODS)
    variants.main(arguments)
    printed = capsys.readouterr().out
    assert "missing" not in printed
    assert printed.count("(p ") == 2 * (len(variants.METHODS) - 1)
    assert f"{len(variants.METHODS) * 58} runs" in printed
