"""Norms of many parameters that are looked at together, compared with each record's own in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dp.gradients.bilinear import Rows, Use
from lightning_dp.gradients.matrices import OuterProduct
from lightning_dp.gradients.parameter_sum import ParameterGradients, squared_norms_of_all

N = 6


def layer(v: Tensor, u: Tensor, scale: float = 1.0) -> list[ParameterGradients]:
    """The gradients of weight and bias of a linear layer."""
    u = u * scale
    weight = ParameterGradients([Use(OuterProduct(), v, u)], torch.Size([u.shape[2], v.shape[2]]))
    bias = ParameterGradients([Rows.use(u[:, 0] if u.shape[1] == 1 else u.sum(1))], u.shape[2:])
    return [weight, bias]


def exact(gradients: list[ParameterGradients]) -> list[float]:
    """The sum of squares of all entries, record by record."""
    total = torch.zeros(N, dtype=torch.float64)
    for each in gradients:
        (use,) = each.uses
        for i in range(N):
            if isinstance(use.form, Rows):
                total[i] += use.u[i].double().square().sum()
            else:
                total[i] += (use.u[i].double().T @ use.v[i].double()).square().sum()
    return total.tolist()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("width", [5, 700])
def test_they_are_those_of_each_parameter(positions, width):
    gradients = layer(normal(N, positions, width), normal(N, positions, 4))
    gradients += layer(normal(N, 1, 3), normal(N, 1, 2)) + layer(normal(N, 1, 2), normal(N, 1, 300))
    assert squared_norms_of_all(gradients).tolist() == pytest.approx(exact(gradients), rel=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-22, 1e-12, 1e12, 1e18])
@pytest.mark.parametrize("which", ["input", "gradient"])
def test_records_of_extreme_length_are_not_taken_for_short(scale, which):
    """Squares that vanish, or products that overflow, are looked at again; others stay quick."""
    v, u = normal(N, 1, 5), normal(N, 1, 4)
    (v if which == "input" else u)[2] *= scale
    gradients = layer(v, u) + layer(normal(N, 1, 3), normal(N, 1, 2))
    found, right = squared_norms_of_all(gradients).tolist(), exact(gradients)
    assert found == pytest.approx(right, rel=1e-5)
    alone = layer(v, u)[:1]
    own, least = squared_norms_of_all(alone).tolist(), exact(alone)
    assert all(a >= b * (1 - 1e-5) for a, b in zip(own, least, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_record_that_is_not_finite_stays_so_and_others_are_right(bad):
    v, u = normal(N, 1, 5), normal(N, 1, 4)
    v[1, 0, 0] = bad
    gradients = layer(v, u)
    found, right = squared_norms_of_all(gradients).tolist(), exact(gradients)
    assert not torch.tensor(found[1]).isfinite()
    assert found[:1] + found[2:] == pytest.approx(right[:1] + right[2:], rel=1e-5)


def test_tensors_without_memory_for_each_record_are_not_taken_for_each_other():
    """Their matrices are copies, and one copy may come to stand where another one stood."""
    gradients = []
    for value in range(1, 20):
        u = torch.full((1, 1, 1), float(value)).expand(N, 1, 4)
        gradients += layer(normal(N, 1, 3), u)
    assert squared_norms_of_all(gradients).tolist() == pytest.approx(exact(gradients), rel=1e-5)


def test_they_can_be_asked_for_twice():
    gradients = [ParameterGradients([], torch.Size([4, 5]))]
    gradients[0].add(Use(OuterProduct(), normal(N, 40, 5), normal(N, 40, 4)), combined=False)
    first = squared_norms_of_all(gradients).clone()
    assert torch.equal(squared_norms_of_all(gradients), first)
