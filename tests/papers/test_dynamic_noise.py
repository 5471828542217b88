"""The paper example as a user runs it, and its hand-made gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture
def model(import_paper: Callable[[str], Any]) -> Any:
    return import_paper("dynamic_noise_model")


@pytest.fixture
def run(import_paper: Callable[[str], Any]) -> Any:
    return import_paper("dynamic_noise_run")


@pytest.mark.parametrize("given", [(), ("--data", "nowhere")])
def test_without_data_it_explains_itself(given, import_paper, explains_missing_mnist):
    explains_missing_mnist(import_paper("dynamic_noise"), given)


@pytest.mark.parametrize("loss", ["squared", "logistic", "network"])
def test_the_hand_made_gradients_are_autograds(model, loss):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    y = torch.tensor([1.0, -1.0, 1.0] * 3, dtype=torch.float64)
    problem = model.Problem(loss, model.Records(x, y))
    params = [p + 0.1 for p in problem.start(3)]
    found = problem.gradients(params)
    for i in range(9):
        alone = model.Problem(loss, model.Records(x[i : i + 1], y[i : i + 1]))
        leaves = [p.clone().requires_grad_() for p in params]
        output, _ = alone._forward(leaves)
        margin = y[i] * output
        value = ((margin - 1) ** 2 / 2 if loss == "squared" else torch.log1p(torch.exp(-margin)))[0]
        assert alone.value(params) == pytest.approx(value.item())
        exact = torch.cat([g.flatten() for g in torch.autograd.grad(value, leaves)])
        one = torch.zeros(9, dtype=torch.float64)
        one[i] = 1
        torch.testing.assert_close(found.weighted_sum(one), exact)
        torch.testing.assert_close(found.norms()[i], exact.norm())


def test_a_record_of_weight_0_adds_nothing_even_if_it_is_not_finite(model):
    delta = torch.tensor([[float("nan")], [2.0]])
    found = model.LayerGradients([(delta, torch.ones(2, 3))])
    torch.testing.assert_close(
        found.weighted_sum(torch.tensor([0.0, 0.5])), torch.tensor([1.0, 1.0, 1.0])
    )


def test_every_plan_spends_its_budget(run):
    influence = np.geomspace(1, 100, 100)
    assert run.exact_budget() == pytest.approx(0.5134, abs=5e-5)
    for budget, value in (("paper", 0.3927), ("exact", run.exact_budget())):
        for shape in run.shapes(influence, 30).values():
            plan = run.plan_of(shape, 30, budget)
            spent = sum(plan.noise_multiplier(step) ** -2 for step in range(30))
            assert 0.998 * value < spent <= value * (1 + 1e-9)


def test_the_scaled_records_have_the_data_scale_as_their_largest_norm(run, mnist_folder):
    for each in (True, False):
        records = run.mnist35(str(mnist_folder), 7.0, each_feature=each)
        assert records.x.shape == (1000, 60)
        assert float(records.x.norm(dim=1).max()) == pytest.approx(7.0)
        assert float(records.x.mean(0).abs().max()) < 1e-9
        assert set(records.y.tolist()) == {-1.0, 1.0}
    assert run.two_clusters(3.0).x.shape == (1000, 100)


@pytest.mark.slow
def test_the_quick_run_prints_its_tables_and_draws_its_pictures(run_paper, mnist_folder, tmp_path):
    done = run_paper("dynamic_noise.py", "--quick", "--output", "pictures", data=mnist_folder)
    assert done.returncode == 0, done.stderr
    for words in (
        "(3.456, 1e-08)-DP exactly",
        "allows R = 0.5134",
        "### squared: final training loss",
        "### network: final training loss",
        "The claim dynamic <= exponential <= uniform (exact budget",
        "## 2. Poisson minibatches",
        "small CNN",
    ):
        assert words in done.stdout
    spent = [float(x) for x in re.findall(r"\| 1 \| (?:constant|to 1/4) \| ([\d.]+) ", done.stdout)]
    assert len(spent) == 4
    assert all(0.99 < epsilon <= 1 for epsilon in spent)
    for name in ("full_batch.png", "schedules.png"):
        assert (tmp_path / "pictures" / name).stat().st_size > 20_000
