"""Units of several rows: every engine on every model is right against a loop over the units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dp import rows_of_records
from lightning_dp.boundary import Query, Term
from lightning_dp.gradients import EngineChoice, RecordPasses, Replay, UnsupportedModelError
from lightning_dp.gradients.batches import RowOwners, SampleBatch
from lightning_dp.gradients.graph import CoupledLossError
from tests.gradients.models import EXAMPLES
from tests.gradients.test_contract import alone, ask, known, made, near, replay, vector

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

ENGINES = ("records", "layers", "ghost", "one_by_one")


def owners_of(owners):
    return RowOwners(max(owners) + 1, torch.tensor(owners))


def means(rows, owners):
    """The loop over users."""
    return torch.stack([rows[owners.owners == unit].mean(0) for unit in range(owners.records)])


APART = [name for name, each in EXAMPLES.items() if not each.mixes]
RARE = [name for i, name in enumerate(APART) if i % 3 and name not in ("mlp", "cnn")]


@pytest.mark.few(12)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in RARE else n for n in APART]
)
def test_engines_are_right_about_units(name):
    """Of one row, and of three that do not follow each other."""
    example, owners = EXAMPLES[name], owners_of([1, 0, 1, 1])
    here, there, products = (means(each, owners) for each in known(name))
    for engine in ENGINES:
        if engine not in example.by.split():
            continue
        module, batch = made(example)
        with alone(engine, module) as passes:
            chunk = replay(example, module, batch)
            chunk = Replay(chunk.forward, chunk.batch, owners.records, owners=owners)
            found = passes.gradients(Query((Term(),), 1.0, 0.0), chunk)
            assert found is not None and found.count == owners.records
            torch.testing.assert_close(found.norms(), here.norm(dim=1), rtol=1e-8, atol=1e-12)
            if example is EXAMPLES["mlp"] and engine != "one_by_one":
                check_parameters(found, module, here)
            else:
                found.discard()
            ask(passes, chunk, Term(), rows=here)
            keep = torch.arange(here.shape[1])[1::3]
            ask(passes, chunk, Term(-0.5), rows=-0.5 * here, coordinates=keep)
            if engine != "ghost":
                difference = Term(), Term(-1.0, near(module))
                ask(passes, chunk, *difference, rows=here - there)
            if engine in example.products.split():
                along = Term(0.3), Term(2.0, direction=vector(module, 2))
                ask(passes, chunk, *along, rows=0.3 * here + 2.0 * products)


def check_parameters(found, module, here):
    """Norms and weights of each parameter, as clipping by groups asks for them."""
    sizes = [param.numel() for param in module.parameters()]
    wanted = torch.stack([part.norm(dim=1) for part in here.split(sizes, 1)], 1)
    torch.testing.assert_close(found.norms_by_parameter(), wanted, rtol=1e-8, atol=1e-12)
    weights = torch.rand(len(here), len(sizes), dtype=torch.float64)
    total = torch.cat([weights[:, i] @ part for i, part in enumerate(here.split(sizes, 1))])
    torch.testing.assert_close(found.weighted_sum(weights), total, rtol=1e-8, atol=1e-12)


def test_rows_of_records_stand_inside_of_units():
    """Two foldings: rows of a layer belong to rows of the data set, and these to users."""
    torch.manual_seed(0)
    layers = nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)
    net = nn.Sequential(*layers).double()
    crops, of = torch.randn(7, 2, 4).double(), torch.tensor([0, 0, 1, 2, 2, 2, 3])
    owners = owners_of([1, 0, 0, 1])

    def forward(batch):
        with rows_of_records(of, 4):
            found = net(batch[0]).tanh()
        return found.new_zeros(4, 2).index_add(0, of, found).square().sum(1).mean()

    rows = []
    for row in range(4):
        own = crops[of == row]
        loss = net(own).tanh().sum(0).square().sum()
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, net.parameters())]))
    for engine in ("layers", "ghost"):
        with alone(engine, net) as passes:
            chunk = Replay(forward, [crops], 2, owners=owners)
            ask(passes, chunk, Term(), rows=means(torch.stack(rows), owners))


def test_other_rows_than_those_of_the_units_are_refused():
    net = nn.Linear(3, 2)
    with RecordPasses(net, list(net.parameters()), EngineChoice("layers")) as passes:
        chunk = Replay(
            lambda x: net(x[:3]).sum(1).mean(), torch.ones(4, 3), 2, owners=owners_of([0, 0, 1, 1])
        )
        with pytest.raises(UnsupportedModelError, match="another number of rows"):
            passes.answer(Query((Term(),), 1.0, 0.0), chunk)


def contrast(net, x):
    """Rows attract or repel each other."""
    return net(x).mean(0).square().sum()


def test_rows_of_a_user_meet_only_where_users_run_alone():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2).double(), torch.randn(5, 3).double()
    params, owners = list(net.parameters()), owners_of([0, 1, 0, 1, 1])
    chunk = Replay(lambda x: contrast(net, x), x, 2, owners=owners)
    with (
        RecordPasses(net, params, EngineChoice("layers")) as passes,
        pytest.raises(CoupledLossError),
    ):
        passes.answer(Query((Term(),), 1.0, 0.0), chunk)
    users = [
        torch.cat([g.flatten() for g in torch.autograd.grad(contrast(net, own), params)])
        for own in (x[[0, 2]], x[[1, 3, 4]])
    ]
    with RecordPasses(net, params, EngineChoice("one_by_one")) as passes:
        ask(passes, chunk, Term(), rows=torch.stack(users))


def test_one_batch_of_each_unit():
    batch = SampleBatch(torch.arange(4), 4, owners=owners_of([1, 0, 1, 1]))
    assert [each.tolist() for each in batch.singles] == [[1], [0, 2, 3]]
