"""The loss graph: what mixes records by more than sums is refused, whatever the values are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_dp.gradients import CoupledLossError
from lightning_dp.gradients.loss_graph import check_loss_graph
from tests.gradients.loss_cases import CLASSES, COUPLED, SEPARATE, STEPS, Batch, Loss

N = 6


def batch(seed: int = 0) -> Batch:
    """Make records of which none is special."""
    seeded = torch.Generator().manual_seed(seed)
    out = torch.randn(N, CLASSES, generator=seeded)
    mask = torch.tensor([True, True, False, True, True, False])
    valid = torch.rand(N, STEPS, generator=seeded) > 0.3
    return Batch(out.requires_grad_(), torch.tensor([0, 1, 1, 0, 4, 2]), mask, valid)


def refused(loss: Loss, of: Batch) -> str | None:
    try:
        check_loss_graph(loss(of), of.n, ())
    except CoupledLossError as error:
        return str(error)
    return None


def with_another(of: Batch, place: int) -> Iterator[Batch]:
    """Yield the batch with other records in one place, gentle and wild ones."""
    other = batch(1)
    for factor in (1.0, 0.0, 30.0, torch.nan):
        out, y, mask, valid = (
            of.out.detach().clone(),
            of.y.clone(),
            of.mask.clone(),
            of.valid.clone(),
        )
        out[place] = other.out[place].detach() * factor
        y[place], mask[place], valid[place] = (y[place] + 1) % 2, ~mask[place], other.valid[place]
        yield Batch(out.requires_grad_(), y, mask, valid)


def row_gradients(loss: Loss, of: Batch) -> Tensor:
    (found,) = torch.autograd.grad(loss(of), of.out)
    return found


def couples(loss: Loss, place: int = 1) -> bool:
    """Tell, by trying, whether the record in a place moves the gradients of the others."""
    before = row_gradients(loss, batch())
    others = [i for i in range(N) if i != place]
    return any(
        not torch.allclose(
            before[others], row_gradients(loss, each)[others], rtol=1e-4, atol=1e-7, equal_nan=True
        )
        for each in with_another(batch(), place)
    )


@pytest.mark.parametrize("name", COUPLED)
def test_a_loss_that_couples_is_refused(name):
    assert couples(COUPLED[name])
    assert refused(COUPLED[name], batch()) is not None


@pytest.mark.parametrize("name", SEPARATE)
def test_a_loss_that_does_not_couple_passes(name):
    assert not couples(SEPARATE[name])
    assert refused(SEPARATE[name], batch()) is None
