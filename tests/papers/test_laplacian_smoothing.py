"""The paper example as a user runs it, and its hand-made gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn


@pytest.fixture
def example(import_paper: Callable[[str], Any]) -> Any:
    """The script as a module; its parts are ``cnn`` and what it imports."""
    return import_paper("laplacian_smoothing")


@pytest.fixture
def logistic(import_paper: Callable[[str], Any]) -> Any:
    return import_paper("laplacian_smoothing_logistic")


@pytest.fixture
def folder(mnist_folder: Path) -> Path:
    """Something of the shape of MNIST, and of CIFAR-10: noise."""
    rng = np.random.default_rng(0)
    pictures = rng.integers(0, 256, (1100, 32, 32, 3)).astype(np.uint8)
    kinds = rng.integers(0, 10, 1100)
    np.savez(
        mnist_folder / "cifar10.npz",
        **{"X_train": pictures[:600], "y_train": kinds[:600]},
        **{"X_test": pictures[600:], "y_test": kinds[600:]},
    )
    return mnist_folder


def test_the_noise_of_theorem_1_and_the_tight_noise_have_the_known_values(logistic):
    protocol = logistic.Protocol(50_000, 128, 19_550, "1/t")
    known = {0.1: (108.9, 11.04), 0.2: (54.6, 5.89), 0.3: (36.4, 4.10)}
    for budget, (paper, tight) in known.items():
        assert logistic.paper_noise(protocol, budget) == pytest.approx(paper, rel=2e-3)
        found = logistic.tight_noise(50_000, 128, 19_550, budget)
        assert found == pytest.approx(tight, rel=2e-3)
        assert protocol.spent(found) == pytest.approx(budget, rel=2e-3)


def softmax_gradient(params: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One record's, by autograd; the parameters are those of nn.Linear(784, 10), flat."""
    leaf = params.clone().requires_grad_()
    scores = leaf[:7840].view(10, 784) @ x + leaf[7840:]
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(scores, y), leaf)
    return gradient


def test_the_clipped_sums_are_sums_of_clipped_gradients(logistic):
    generator = torch.Generator().manual_seed(0)
    params = 0.02 * torch.randn(3, 7850, generator=generator)
    x, y = torch.rand(6, 784, generator=generator), torch.tensor([0, 3, 3, 9, 1, 7])
    protocol = logistic.Protocol(60, 6, 1, "constant", clip_norm=15.0)

    found = logistic.clipped_sums(params, x, y, protocol)

    clipped = 0
    for cell in range(3):
        total = torch.zeros(7850)
        for i in range(6):
            gradient = softmax_gradient(params[cell], x[i], y[i])
            clipped += bool(gradient.norm() > 15)
            total += gradient * min(1.0, 15 / float(gradient.norm()))
        torch.testing.assert_close(found[cell], total, rtol=1e-4, atol=1e-5)
    assert 0 < clipped < 18


def test_training_noises_before_it_smooths_and_averages_the_second_half(logistic, folder):
    data = logistic.splits(str(folder))["training"]
    protocol = logistic.Protocol(5000, 40, 3, "linear", is_averaged=True, weight_decay=0.1)
    cells = [logistic.Cell(1.0, 0.0, 0.5, 0.3), logistic.Cell(1.0, 2.0, 1.5, 0.7)]

    found = logistic.train(data, protocol, cells, seed=4)

    rng, noise = logistic.random_generator(4, 1), logistic.NoiseSource(4)
    spectrum = 1 + 4.0 * (1 - torch.cos(2 * torch.pi * torch.arange(3926) / 7850))  # of A, σ = 2
    params, iterates = torch.zeros(7850), []
    for step in range(3):
        chosen = logistic.Poisson().draw(5000, 40 / 5000, rng)
        total = torch.zeros(7850)
        noise.add_normal(total, 1.5)
        for i in chosen:
            gradient = softmax_gradient(params, data.x[i], data.y[i])
            total += gradient / max(1.0, float(gradient.norm()))
        smooth = torch.fft.irfft(torch.fft.rfft(total / 40) / spectrum, n=7850)
        params = params - 0.7 * (1 - step / 3) * (smooth + 0.1 * params)
        iterates.append(params)
    torch.testing.assert_close(found[1], (iterates[1] + iterates[2]) / 2, rtol=1e-3, atol=1e-5)
    alone = logistic.train(data, protocol, cells[:1], seed=4)
    torch.testing.assert_close(alone[0], found[0])


def test_losses_on_the_way_are_those_of_shorter_runs(logistic, folder):
    protocol = logistic.Protocol(5000, 40, 3, "constant")
    cells = [logistic.Cell(1.0, 0.0, 0.5, 0.3), logistic.Cell(1.0, 2.0, 1.5, 0.7)]
    found = logistic.curves(str(folder), protocol, cells, 4, [2, 3])
    assert found.shape == (2, 2, 2)
    data = logistic.splits(str(folder), logistic.DEVIATION)
    for place, steps in enumerate((2, 3)):
        shorter = replace(protocol, steps=steps)
        params = logistic.train(data["training"], shorter, cells, seed=4)
        for k, part in enumerate(("training", "validation")):
            for cell in range(2):
                scores = data[part].x @ params[cell, :7840].view(10, 784).T + params[cell, 7840:]
                expected = nn.functional.cross_entropy(scores, data[part].y)
                assert found[place, cell, k] == pytest.approx(float(expected), rel=1e-4)


def test_with_a_clipped_mean_one_record_may_move_it_by_the_whole_bound(logistic):
    """The authors' program has no ε: of three records the third alone turns the mean."""
    protocol = logistic.Protocol(3, 3, 1, "constant", clips_mean=True)
    x, y = torch.full((3, 784), 0.01), torch.tensor([0, 0, 1])
    x[2] = 100.0
    params = torch.zeros(1, 7850)

    with_it = logistic.clipped_sums(params, x, y, protocol) / 3
    without = logistic.clipped_sums(params, x[:2], y[:2], protocol) / 3

    assert float((with_it - without).norm()) > 0.9


@pytest.mark.parametrize(
    ("network", "shape"), [("mnist_network", (1, 28, 28)), ("cifar_network", (3, 24, 24))]
)
def test_the_networks_sums_are_sums_of_clipped_gradients(network, shape, example):
    torch.manual_seed(0)
    net = getattr(example.cnn, network)()
    x, y = torch.randn(3, *shape), torch.tensor([1, 7, 2])
    exact = []
    for i in range(3):
        loss = nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1])
        exact.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, net.parameters())]))
    clip_norm = float(exact[0].norm()) / 2  # so that it makes a difference

    trainee = example.cnn.Trainee(net, x, y)
    query = example.cnn.Query((example.cnn.Term(),), clip_norm, 1.0)
    found = trainee.bounded_sum(query, [0, 1, 2]).value

    expected = sum(g * min(1.0, clip_norm / float(g.norm())) for g in exact)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_the_best_at_a_budget_is_chosen_by_the_other_noises(example):
    curves = [np.array([[1.0, 9.0], [2.0, 3.0], [4.0, 3.0]]), np.array([[5.0], [5.0], [1.0]])]
    of_itself, of_others = example.best_of(curves)
    assert of_itself.tolist() == [9.0, 5.0, 4.0]
    # Sums over the others: 6, 6, 6 (the first column wins a tie), then 5, 12, 6, then 3, 12, 10.
    assert of_others.tolist() == [1.0, 3.0, 3.0]


@pytest.mark.parametrize("budget", [0.05, 0.4, 0.7, 100.0])
def test_no_more_epochs_are_run_than_the_budget_allows(example, budget):
    run = replace(example.cnn.mnist_runs(example.cnn.FULL)[-1], epochs=30)
    epochs = run.affordable(budget)
    assert epochs == sum(run.spent(n) <= budget for n in range(1, 31))
    assert run.spent(3) == pytest.approx(
        example.cnn.epsilon([(example.cnn.PoissonGaussian(10.0, 256 / 10_240), 120)], 1e-5)
    )


@pytest.mark.slow
def test_the_papers_size_is_a_command(run_paper, folder):
    """Both tables, tiny: the mean over two noises is that of the runs."""
    shown = {}
    for part in ("mnist", "budgets", "cifar"):
        done = run_paper(
            "laplacian_smoothing.py", "--quick", "--whole", "--only", part, data=folder
        )
        assert done.returncode == 0, done.stderr
        shown[part] = done.stdout
    assert "60 epochs" not in shown["mnist"]
    assert shown["mnist"].count("| LSAdam |") == 8
    assert "Over 22 settings" in shown["budgets"]
    assert shown["budgets"].count(" / ") >= 5
    assert shown["cifar"].count("| LSSGD |") == 2


@pytest.mark.slow
def test_the_quick_run_prints_its_tables_and_draws_its_pictures(run_paper, folder, tmp_path):
    done = run_paper("laplacian_smoothing.py", "--quick", "--output", "pictures", data=folder)
    assert done.returncode == 0, done.stderr
    for words in (
        "## 1. Multiclass logistic regression on MNIST",
        ", paper 76.29",
        "### Losses after",
        "### Rates a/t",
        "Smoothing is not worse than none in",
        "## 2. The paper's CNN on MNIST",
        "## 3. MNIST at noise multiplier 10",
        "## 4. TensorFlow's tutorial CNN on CIFAR-10",
    ):
        assert words in done.stdout
    spent = [
        float(e) for line in re.findall(r"; ε spent: (.*)", done.stdout) for e in line.split(",")
    ]
    assert spent == pytest.approx([0.3, 0.1] * 3, rel=2e-3)
    assert done.stdout.count("| LSAdam |") == 5 + 1  # runs, and a header
    assert "## 5. The best accuracy at a budget" in done.stdout
    for name in ("curves.png", "mnist.png", "long.png", "cifar.png"):
        assert (tmp_path / "pictures" / name).stat().st_size > 20_000
