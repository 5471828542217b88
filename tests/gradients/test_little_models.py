"""Little models in the words that people use: the engine that is chosen is right about each of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_dp.gradients import RecordPasses, UnsupportedModelError
from tests.gradients.little_calls import CALLS
from tests.gradients.little_losses import LOSSES
from tests.gradients.little_models import Batch, Little, N
from tests.gradients.little_orders import BY_PLACE, ORDERS
from tests.gradients.little_parameters import PARAMETERS

MODELS = {**CALLS, **PARAMETERS, **LOSSES, **ORDERS}


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def of_record(batch: Batch, i: int) -> Batch:
    """Return a batch of one record, in float64."""
    parts = {name: each[i : i + 1] for name, each in batch.items()}
    return {n: part.double() if part.is_floating_point() else part for n, part in parts.items()}


def one_by_one(little: Little, module: nn.Module, batch: Batch) -> Tensor:
    """(n, d), in float64."""
    module = copy.deepcopy(module).double()
    rows = []
    for i in range(N):
        loss = little.loss(module, of_record(batch, i))
        parts = torch.autograd.grad(loss, trained(module), materialize_grads=True)
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


@pytest.mark.filterwarnings(
    "ignore:Full backward hook is firing", "ignore:There is a performance drop"
)
@pytest.mark.parametrize("name", MODELS)
def test_norms_and_sums_equal_the_loop(name):
    torch.manual_seed(0)
    little = MODELS[name]
    module, batch = little.make(), little.batch()
    rows = one_by_one(little, module, batch)
    buffers = [buffer.clone() for buffer in module.buffers()]
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    with RecordPasses(module, trained(module), "auto") as passes:
        found = passes.run(lambda: little.loss(module, batch), size=N, batch=batch)
        assert found is not None and found.count == N
        norms, total = found.norms(), found.weighted_sum(weights)
    lengths, expected = rows.norm(dim=1), weights @ rows
    assert float(((norms - lengths).abs() / lengths).max()) <= little.tolerance
    assert float((total.double() - expected).norm() / expected.norm()) <= little.tolerance
    assert all(map(torch.equal, module.buffers(), buffers))


@pytest.mark.parametrize("name", ORDERS)
def test_a_record_alone_owns_all_rows(name):
    torch.manual_seed(0)
    little = ORDERS[name]
    module = little.make()
    batch = {each: part[:1] for each, part in little.batch().items()}
    loss = little.loss(module, batch)
    parts = torch.autograd.grad(loss, trained(module), materialize_grads=True)
    expected = torch.cat([part.flatten() for part in parts]).double()

    with RecordPasses(module, trained(module), "auto") as passes:
        found = passes.run(lambda: little.loss(module, batch), size=1, batch=batch)
        assert found is not None
        total = found.weighted_sum(torch.ones(1)).double()

    assert float((total - expected).norm() / expected.norm()) <= little.tolerance


@pytest.mark.parametrize("name", BY_PLACE)
def test_rows_that_are_chosen_by_their_places_are_refused(name):
    little = BY_PLACE[name]
    module, batch = little.make(), little.batch()
    with (
        RecordPasses(module, trained(module), "auto") as passes,
        pytest.raises(
            UnsupportedModelError,
            match=r"cannot be computed from its calls|cannot be run record by record",
        ),
    ):
        found = passes.run(lambda: little.loss(module, batch), size=N, batch=batch)
        assert found is not None
        found.norms()
