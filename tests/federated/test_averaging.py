"""Federated averaging: updates against loops by hand."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from local_updates import LocalUpdates
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp import Constant, FullBatch, MeanGradient, Poisson, Query, Term, UserLevel
from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.synchronous import QueryClient, SynchronousServer
from lightning_dp.noise_plan import NoisePlan
from tests.federated.zoo import history

SIZE, CLIENTS, ROUNDS, DELTA = 3, 5, 4, 1e-5
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.5)
START = torch.linspace(-1, 1, SIZE + 1)


class Line(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, 1)
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            self.layer.weight.copy_(START[:SIZE])
            self.layer.bias.copy_(START[SIZE:])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        self.log("loss", 0.0)
        return nn.functional.mse_loss(self.layer(batch[0]).squeeze(1), batch[1])


def data(c: int, records: int = 6) -> TensorDataset:
    generator = torch.Generator().manual_seed(c)
    x = torch.randn(records, SIZE, generator=generator)
    return TensorDataset(x, x.sum(1) + c)


def by_hand(x: Tensor, c: int, epochs: int) -> Tensor:
    """x - x' of full-batch gradient descent with momentum, without autograd."""
    features, y = data(c).tensors
    inputs = torch.cat([features, torch.ones(len(y), 1)], 1).double()
    now, speed = x.double(), torch.zeros(SIZE + 1, dtype=torch.float64)
    for _ in range(epochs):
        speed = 0.5 * speed + 2 * inputs.T @ (inputs @ now - y.double()) / len(y)
        now = now - 0.3 * speed
    return x.double() - now


def updates(c: int, unit: Any = "client", epochs: int = 3, **settings: Any) -> LocalUpdates:
    return LocalUpdates(Line(), data(c), SGD, epochs=epochs, unit=unit, **settings)


def plan_of(z: float, clip_norm: float = 1.0) -> NoisePlan:
    return NoisePlan(z, Constant(), FullBatch(), 1.0, MeanGradient(clip_norm))


def server(plan: NoisePlan, **changes: Any) -> SynchronousServer:
    return SynchronousServer("trial", plan, START, ROUNDS, CLIENTS, CLIENTS, 1.0, **changes)


def client(plan: NoisePlan, c: int, folder: Path, records: Any = None, **changes: Any):
    ledger = ReleaseLedger(folder, f"client-{c}")
    settings = {"run": "trial", "rounds": ROUNDS, "target_epsilon": math.inf, "target_delta": DELTA}
    given = {"trusts_server": True, **settings, **changes}
    return QueryClient(records or updates(c), plan, ledger, **given)


# -- updates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("epochs", [1, 3])
def test_without_clip_and_noise_it_is_federated_averaging_by_hand(epochs, tmp_path):
    plan = plan_of(0.0, math.inf)
    machine, x = server(plan), START
    for _ in range(ROUNDS):
        for c in range(CLIENTS):
            one = client(plan, c, tmp_path, updates(c, epochs=epochs))
            assert machine.receive(c, one.answer(machine.request(c)))
        x = x.double() - sum(by_hand(x, c, epochs) for c in range(CLIENTS)) / CLIENTS
        torch.testing.assert_close(machine.point.double(), x, rtol=0, atol=1e-5)
    assert machine.is_done and float((x - START).norm()) > 0.5


def test_local_steps_see_each_record_once_an_epoch_and_leave_no_trace():
    local = updates(0, epochs=4, chunk_size=2)
    sizes, before = [], {k: v.clone() for k, v in local._module.state_dict().items()}
    local._module.layer.register_forward_hook(lambda *args: sizes.append(len(args[2])))
    local.bounded_sum(Query((Term(),), 1.0, 1.0), [5, 0, 2, 3, 1])
    assert sizes == [2, 2, 1] * 4
    for name, value in local._module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None and p.requires_grad for p in local.params)


OWNED = UserLevel([0, 1, 0, 1, 0, 1], most_rows=2)


@pytest.mark.parametrize(("unit", "radius"), [("client", 0.8), ("record", 0.4), (OWNED, 0.4)])
def test_the_update_is_clipped_once_so_that_its_unit_moves_it_by_the_clip_norm(unit, radius):
    query = Query((Term(),), 0.8, 1.0)
    full = by_hand(START, 0, 3)
    assert float(full.norm()) > 0.8
    answer = updates(0, unit).bounded_sum(query, range(6))
    torch.testing.assert_close(
        answer.value.double(), full * radius / full.norm(), atol=1e-5, rtol=0
    )
    assert answer.clip_norm == 0.8
    assert not updates(0, unit).bounded_sum(query, []).value.any()


def test_one_record_may_turn_an_update_around_and_moves_it_by_the_clip_norm():
    """One clip at C would be moved by 2 C: the bound of a record is reached, and not exceeded."""
    x, y = torch.ones(2, SIZE), torch.tensor([50.0, -1e4])
    local = LocalUpdates(Line(), TensorDataset(x, y), SGD, unit="record")
    query = Query((Term(),), 0.8, 1.0)
    without, whole = (local.bounded_sum(query, records).value for records in ([0], [0, 1]))
    assert 0.79 < float((whole - without).norm()) <= 0.8 * (1 + 1e-6)


def test_an_update_that_is_not_finite_counts_as_zero():
    x = torch.tensor([[math.inf, 0.0, 0.0], [1.0, 2.0, 3.0]])
    for unit in ("client", "record"):
        local = LocalUpdates(Line(), TensorDataset(x, torch.ones(2)), SGD, unit=unit)
        assert not local.bounded_sum(Query((Term(),), 1.0, 1.0), [0, 1]).value.any()


def test_terms_are_added_before_the_clip_and_coordinates_are_kept():
    other, chosen = START + 1, torch.tensor([0, 2])
    query = Query((Term(2.0, START), Term(-1.0, other)), 1e6, 0.0, chosen)
    expected = (2 * by_hand(START, 1, 3) - by_hand(other, 1, 3))[chosen]
    found = updates(1).bounded_sum(query, range(6)).value.double()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("unit", "event"),
    [
        (OWNED, PoissonGaussian(2.0, 0.3)),
        ("client", Gaussian(2.0)),
        ("record", PoissonGaussian(2.0, 0.3)),
    ],
)
def test_a_round_is_charged_as_its_unit_is_sampled(unit, event, tmp_path):
    plan = NoisePlan(2.0, Constant(), Poisson(), 0.3, MeanGradient(1.0))
    machine = server(plan, noise="client")
    client(plan, 0, tmp_path, updates(0, unit)).answer(machine.request(0))
    assert history(tmp_path, "client-0") == [(event, 1)]


def test_a_training_step_that_fails_costs_nothing(tmp_path):
    class Failing(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    local = LocalUpdates(Failing(), data(0), SGD, unit="client")
    with pytest.raises(Exception, match="no loss that depends on the trained parameters"):
        client(plan_of(2.0), 0, tmp_path, local).answer(server(plan_of(2.0)).request(0))
    assert history(tmp_path, "client-0") == []
