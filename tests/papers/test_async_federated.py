"""The closed forms of examples/papers/async_federated.py are the package's own sums."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dp.boundary import Query, Term, bounded_sum
from lightning_dp.gradients.materialised import MaterialisedGradients

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
