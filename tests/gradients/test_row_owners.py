"""``rows_of_records``: layers that see rows of which each belongs to some record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dp import rows_of_records
from lightning_dp.boundary import Term
from lightning_dp.gradients import Replay, UnsupportedModelError
from lightning_dp.gradients.batches import folding_in_force
from lightning_dp.gradients.layer_calls import LayerCalls
from lightning_dp.gradients.opacus_hooks import OpacusHooks
from tests.gradients.test_contract import alone, ask

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

RECORDS = 4
OWNERS = torch.tensor([3, 0, 0, 3, 3, 0, 2, 3])  # one record without a row, in no order


class OfRows(nn.Module):
    """Rows of shape (2, 4, 4) and (3,), a sum over each record's rows, and a head for the records."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten())
        self.tokens, self.norm = nn.Embedding(5, 16), nn.LayerNorm(16)
        self.linear, self.head = nn.Linear(16, 3), nn.Linear(3, 2)

    def backbone(self, images: Tensor, tokens: Tensor) -> Tensor:
        hidden = torch.cat([self.image(images).unsqueeze(1), self.tokens(tokens)], 1)
        return torch.tanh(self.linear(self.norm(hidden))).mean(1)

    def forward(self, rows: tuple[Tensor, Tensor], owners: Tensor, n: int) -> Tensor:
        with rows_of_records(owners, n):
            hidden = self.backbone(*rows)
        return self.head(hidden.new_zeros(n, 3).index_add(0, owners, hidden))


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
    return OfRows().double()


ROWS = torch.randn(len(OWNERS), 2, 4, 4).double(), torch.randint(5, (len(OWNERS), 3))


@pytest.mark.parametrize("engine", ["layers", "ghost", "hooks"])
def test_ragged_rows_equal_one_record_at_a_time(engine, model):
    chunk = Replay(lambda b: model(b, OWNERS, RECORDS).square().sum(1).mean(), ROWS, RECORDS)
    with alone(engine, model) as passes:
        found = passes.run(chunk.forward, ROWS, RECORDS)
        assert found.count == RECORDS
        ask(passes, chunk, Term(), rows=one_by_one(model, ROWS))


def test_without_the_hint_rows_are_not_taken_for_records(model):
    def loss(rows: Any) -> Tensor:
        hidden = model.backbone(*rows)
        output = model.head(hidden.new_zeros(RECORDS, 3).index_add(0, OWNERS, hidden))
        return output.square().sum(1).mean()

    message = "more rows than there are records"
    with alone("layers", model) as passes, pytest.raises(UnsupportedModelError, match=message):
        passes.run(loss, ROWS, RECORDS)


def test_owners_of_another_number_of_rows_are_refused(model):
    def loss(rows: Any) -> Tensor:
        with rows_of_records(OWNERS[1:], RECORDS):
            return model.backbone(*rows).square().sum()

    message = r"linear: was called with another number of rows"
    with alone("layers", model) as passes, pytest.raises(UnsupportedModelError, match=message):
        passes.run(loss, ROWS, RECORDS)


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
