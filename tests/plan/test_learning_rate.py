"""At the learning rate that is suggested, noise alone moves a weight by its size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_dp.plan import learning_rate, plan_training, weight_size

NAN = float("nan")
PLAN = plan_training(4000, 100, epochs=3, target_epsilon=3.0, target_delta=1e-5)


def walk(optimizer, weights, noise):
    """Root mean square of what steps on noise alone do to weights that were 0."""
    for _ in range(PLAN.steps):
        weights.grad = noise * torch.randn_like(weights)
        optimizer.step()
    return weights.detach().square().mean().sqrt().item()


def test_sgd_walks_by_the_size():
    torch.manual_seed(0)
    weights = nn.Parameter(torch.zeros(5000))
    rate = learning_rate(PLAN, 0.1, optimizer="sgd", max_grad_norm=0.3)
    moved = walk(torch.optim.SGD([weights], lr=rate), weights, 0.3 * PLAN.noise_batch_ratio)
    assert moved == pytest.approx(0.1, rel=0.05)


def test_sgd_with_momentum_walks_by_the_size():
    torch.manual_seed(0)
    weights = nn.Parameter(torch.zeros(5000))
    rate = learning_rate(PLAN, 0.1, optimizer="sgd", momentum=0.9)
    optimizer = torch.optim.SGD([weights], lr=rate, momentum=0.9)
    assert walk(optimizer, weights, PLAN.noise_batch_ratio) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_walks_by_about_the_size_whatever_the_noise(kind):
    for noise in (1e-4, 1.0):
        torch.manual_seed(0)
        weights = nn.Parameter(torch.zeros(5000))
        moved = walk(kind([weights], lr=learning_rate(PLAN, 0.1)), weights, noise)
        assert moved == pytest.approx(0.1, rel=0.35)


def test_a_weight_has_the_size_that_keeps_a_signals_size():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 5), nn.GroupNorm(2, 8), nn.Linear(40, 30))
    for layer in (module[0], module[2]):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    drawn = torch.cat([layer.weight.flatten() for layer in (module[0], module[2])])

    size = weight_size(param.shape for param in module.parameters())

    assert size == pytest.approx(drawn.square().mean().sqrt().item(), rel=0.05)


def test_published_rates_are_near():
    """Within a factor of 3: what others found by searching."""
    # TensorFlow Privacy's MNIST tutorial: SGD 0.15 (z = 1.1, C = 1, batches of 256, 60 epochs).
    shapes = [(16, 1, 8, 8), (32, 16, 4, 4), (32, 512), (10, 32)]
    plan = plan_training(60_000, 256, epochs=60, target_epsilon=3.0, target_delta=1e-5)
    assert 1 / 3 < learning_rate(plan, weight_size(shapes), optimizer="sgd") / 0.15 < 3


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"size": NAN}, "size"),
        ({"size": 0}, "size"),
        ({"optimizer": "adamw"}, "optimizer"),
        ({"optimizer": "sgd", "max_grad_norm": NAN}, "max_grad_norm"),
        ({"optimizer": "sgd", "momentum": NAN}, "momentum"),
        ({"optimizer": "sgd", "momentum": 1.0}, "momentum"),
        ({"optimizer": "sgd", "max_grad_norm": math.inf}, "noise_multiplier"),
    ],
)
def test_illegal_arguments_are_named(changes, name):
    given = {"size": 0.1, **changes}
    with pytest.raises(ValueError, match=name):
        learning_rate(PLAN, given.pop("size"), **given)


def test_vectors_alone_have_no_size():
    with pytest.raises(ValueError, match="shapes"):
        weight_size([(3,), (5,)])
