"""``rows_of_records``: layers that see rows of which each belongs to some record."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_dp import rows_of_records
from lightning_dp.boundary import bounded_sum
from lightning_dp.gradients.base import UnsupportedModelError
from lightning_dp.gradients.batches import folding_in_force
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.opacus_hooks import OpacusHooks

RECORDS = 4
OWNERS = torch.tensor([3, 0, 0, 3, 3, 0, 2, 3])  # one record without a row, in no order


class Backbone(nn.Module):
    """Every kind of rule, on rows of shape (6, 4, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten())
        self.tokens = nn.Embedding(5, 16)
        self.norm = nn.LayerNorm(16)
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.linear = nn.Linear(16, 3)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        hidden = torch.cat([self.image(images).unsqueeze(1), self.tokens(tokens)], 1)
        hidden = self.norm(hidden)
        hidden = nn.functional.scaled_dot_product_attention(self.q(hidden), self.k(hidden), hidden)
        return torch.tanh(self.linear(hidden)).mean(1)


class OfRows(nn.Module):
    """A backbone for the rows, a sum over each record's rows, and a head for the records."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(3, 2)

    def forward(self, rows: tuple[Tensor, Tensor], owners: Tensor, n: int) -> Tensor:
        with rows_of_records(owners, n):
            hidden = self.backbone(*rows)
        return self.head(hidden.new_zeros(n, 3).index_add(0, owners, hidden))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(len(OWNERS), 2, 4, 4), torch.randint(5, (len(OWNERS), 3))


def one_by_one(model: OfRows, given: tuple[Tensor, Tensor]) -> Tensor:
    """Each record alone, by plain autograd in float64."""
    found = []
    for record in range(RECORDS):
        own = record == OWNERS
        images, tokens = (each[own] for each in given)
        owners = torch.zeros(int(own.sum()), dtype=torch.int64)
        loss = model((images.double(), tokens), owners, 1).square().sum()
        parts = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found)


@pytest.fixture
def model() -> OfRows:
    torch.manual_seed(0)
    return OfRows()


@pytest.fixture
def engine(model: OfRows) -> Iterator[LayerCalls]:
    engine = LayerCalls(model, list(model.parameters()))
    with engine.watching():
        yield engine


@pytest.fixture
def expected(model: OfRows) -> tuple[tuple[Tensor, Tensor], Tensor]:
    given = rows()
    wanted = one_by_one(model.double(), given)
    model.float()
    return given, wanted


def test_ragged_rows_equal_one_record_at_a_time(model, expected, engine, oracle):
    given, wanted = expected
    engine.backward(model(given, OWNERS, RECORDS).square().sum(1).mean())
    found = engine.take(1.0)
    assert found.count == RECORDS
    torch.testing.assert_close(found.norms(), wanted.norm(dim=1), rtol=1e-5, atol=1e-9)
    clip_norm = float(wanted.norm(dim=1).median())
    total = bounded_sum(found, clip_norm).value.double()
    clipped = oracle.clipped(wanted, clip_norm)
    assert (total - clipped).norm() <= 1e-5 * clipped.norm()


def test_without_the_hint_rows_are_not_taken_for_records(model, expected, engine):
    given, _ = expected
    hidden = model.backbone(*given)
    output = model.head(hidden.new_zeros(RECORDS, 3).index_add(0, OWNERS, hidden))
    with pytest.raises(UnsupportedModelError, match="more rows than there are records"):
        engine.backward(output.square().sum(1).mean())
        engine.take(1.0)


def test_owners_of_another_number_of_rows_are_refused(model, expected, engine):
    given, _ = expected
    with rows_of_records(OWNERS[1:], RECORDS):
        loss = model.backbone(*given).square().sum()
    with pytest.raises(UnsupportedModelError, match=r"backbone\.\S+: .*another number of rows"):
        engine.backward(loss)


def test_the_inner_hint_holds_and_ends():
    outer, inner = torch.tensor([0, 1]), torch.tensor([1, 0, 0])
    with rows_of_records(outer, 2):
        with pytest.raises(RuntimeError), rows_of_records(inner, 2):
            assert folding_in_force().owners.tolist() == [1, 0, 0]
            raise RuntimeError
        inner += 5
        assert folding_in_force().owners.tolist() == [0, 1]
    assert folding_in_force() is None


@pytest.mark.parametrize("owners", [[0, 5], [-1, 0]])
def test_an_owner_that_is_no_record_is_refused(owners):
    net = nn.Linear(3, 2)
    engine = LayerCalls(net, list(net.parameters()))
    with engine.watching(), rows_of_records(torch.tensor(owners), 2):
        loss = net(torch.ones(2, 3)).sum()
    with pytest.raises(UnsupportedModelError):
        engine.backward(loss)


@pytest.mark.parametrize("engine", [LayerCalls, OpacusHooks])
def test_rows_in_another_order_are_those_of_their_records(engine):
    """Also where there happen to be as many."""
    net, x, owners = nn.Linear(3, 2), torch.randn(3, 3), torch.tensor([1, 0, 1])
    attached = engine(net, list(net.parameters()))
    with attached.watching(), rows_of_records(owners, 3):
        loss = net(x).sum() / 3
    attached.backward(loss)
    rows = torch.stack([x[1], x[0] + x[2], torch.zeros(3)])
    norms = (2 * rows.square().sum(1) + 2 * torch.tensor([1.0, 4.0, 0.0])).sqrt()
    torch.testing.assert_close(attached.take(1.0).norms(), norms, check_dtype=False)
