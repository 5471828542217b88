"""The loss graph: what mixes records by more than sums is refused, whatever the values are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dp.gradients import CoupledLossError, RecordPasses
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


@pytest.mark.parametrize("records", [0, 1])
def test_one_record_alone_may_do_anything(records):
    output = torch.ones(1, CLASSES, requires_grad=True) * 2
    check_loss_graph(output.mean().clamp(max=1.0), records, {output.grad_fn})


ENGINES = ["layers", "hooks"]


def network() -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Conv1d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES)
    return nn.Sequential(*parts)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("last", "loss", "is_coupled"),
    [
        (nn.Identity(), lambda out, y: F.cross_entropy(out, y), False),
        (nn.Identity(), lambda out, y: F.cross_entropy(out, y).clamp(max=9.0), True),
        (nn.Identity(), lambda out, y: F.mse_loss(out, torch.zeros(N, CLASSES)).sqrt(), True),
    ],
    ids=["plain", "clamped", "rmse"],
)
def test_every_engine_is_guarded(engine, last, loss, is_coupled):
    net = nn.Sequential(network(), last)
    x, y = torch.randn(N, 2, 5), torch.arange(N) % CLASSES
    outcome = pytest.raises(CoupledLossError) if is_coupled else nullcontext()
    with RecordPasses(net, list(net.parameters()), engine) as passes, outcome:
        found = passes.run(lambda b: loss(net(b[0]), b[1]), (x, y), N)
        assert found is not None
        assert found.count == N


def test_it_can_be_left_out():
    net = network()
    with RecordPasses(net, list(net.parameters()), "auto", loss_graph_check=False) as passes:
        x = torch.randn(N, 2, 5)
        assert passes.run(lambda b: net(b).pow(2).mean().sqrt(), x, N) is not None


def test_the_message_names_the_node_and_what_was_there_before():
    out = torch.ones(N, CLASSES, requires_grad=True).exp()
    with pytest.raises(
        CoupledLossError, match=r"^The loss takes nan_to_num \(NanToNumBackward0\) of "
    ):
        check_loss_graph((out.mean() * 2).nan_to_num(), N, {out.grad_fn})


@pytest.mark.parametrize("n", range(2, 13))
def test_a_number_of_records_that_is_another_size_too_refuses_nothing(n):
    """Sizes of time and classes that n divides: rows cannot be told from them."""
    net = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    head = nn.Linear(8, 12)
    out = head(net(torch.randn(n, 12, 8)))
    outputs = [each.grad_fn for each in (out,)]
    for loss in (
        F.cross_entropy(out.flatten(0, 1), torch.arange(12 * n) % 12),
        torch.stack([each.pow(2).mean(0).sqrt().mean() for each in out]).mean(),
        out.transpose(0, 1)[2].softmax(1).logsumexp(1).mean(),
        (out @ out.transpose(1, 2)).softmax(2).pow(2).sum() / n,
        out.mean(1).softmax(1).max(1).values.mean(),
    ):
        check_loss_graph(loss, n, outputs)
