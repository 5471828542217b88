"""Federated averaging: updates against loops by hand, and clients that are drawn in secret."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant as Theirs
from loopback import LoopbackGrid
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_dp import Constant, Diff2, FullBatch, MeanGradient, Poisson, Query, Term
from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.federated.flower import client_app, server_app
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.local import LocalRecords
from lightning_dp.federated.local_updates import LocalUpdates
from lightning_dp.federated.protocol import MessageError, Quorum
from lightning_dp.federated.synchronous import ClientSampling, QueryClient, SynchronousServer
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


def play(machine: SynchronousServer, plan: NoisePlan, folder: Path) -> list[set[int]]:
    """Run to the end; return who was asked in each round."""
    asked: list[set[int]] = []
    while not machine.is_done:
        stage, there = machine.stage, machine.awaited
        asked += [] if machine.is_done else [there]
        for c in there:
            assert machine.receive(c, client(plan, c, folder).answer(machine.request(c)))
        if machine.stage == stage:
            machine.leave_out()
    return asked


def sampling(folder: Path, rate: float = 0.5, target: float = math.inf) -> ClientSampling:
    return ClientSampling(rate, ReleaseLedger(folder / "central", "clients"), target, DELTA)


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


@pytest.mark.parametrize(("unit", "radius"), [("client", 0.8), ("record", 0.4)])
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
    ("unit", "event"), [("client", Gaussian(2.0)), ("record", PoissonGaussian(2.0, 0.3))]
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


# -- clients that are drawn --------------------------------------------------------------------


def test_epsilon_is_that_of_poisson_sampled_gaussians(tmp_path):
    plan, drawn = plan_of(1.3), sampling(tmp_path, 0.3)
    machine = server(plan, sampling=drawn)
    asked = play(machine, plan, tmp_path)
    assert len(asked) == ROUNDS and machine.round == ROUNDS
    theirs = Theirs().compose(PoissonSampledDpEvent(0.3, GaussianDpEvent(1.3)), ROUNDS)
    assert machine.facts["epsilon"] == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-3)
    for c in range(CLIENTS):  # its own ledger, which need not trust that the draw stays secret
        rounds = sum(c in who for who in asked)
        assert sum(n for _, n in history(tmp_path, f"client-{c}")) == rounds
        assert set(dict(history(tmp_path, f"client-{c}"))) <= {Gaussian(1.3)}
    again = server(plan, sampling=drawn)
    assert again.sampling.spending("other", plan, 9).unit == "client"


def test_each_client_is_drawn_by_itself_at_the_rate(tmp_path):
    drawn, plan = sampling(tmp_path, 0.2), plan_of(1.0)
    spending = drawn.spending("trial", plan, 40)
    draws = [drawn.draw(spending, t, 100) for t in range(40)]
    sizes = torch.tensor([float(len(each)) for each in draws])
    assert abs(float(sizes.mean()) - 20) < 5 * 4 / math.sqrt(40)
    assert 1.8 < float(sizes.std()) < 8 and len({tuple(each) for each in draws}) == 40
    assert drawn.draw(spending, 39, 100) == draws[39]  # asked again after a crash


def test_the_mean_is_over_the_expected_number_of_clients(tmp_path):
    """Also of a round that nobody was drawn for, and of one that a client is late for."""
    plan, x = plan_of(0.0, math.inf), START
    machine = server(plan, sampling=sampling(tmp_path, 0.4))
    machine._drawn = 0, {1, 3}
    assert machine.receive(3, client(plan, 3, tmp_path).answer(machine.request(3)))
    assert machine.request(0) is None and machine.awaited == {1}
    assert machine.leave_out() == {1}
    x = x - by_hand(x, 3, 3) / (0.4 * CLIENTS)
    torch.testing.assert_close(machine.point.double(), x, rtol=0, atol=1e-5)
    machine._drawn = 1, set()
    assert machine.leave_out() == set() and machine.round == 2
    torch.testing.assert_close(machine.point.double(), x, rtol=0, atol=1e-5)


def test_a_server_that_dies_asks_those_that_it_drew(tmp_path):
    plan, drawn = plan_of(1.0), sampling(tmp_path)
    machine = server(plan, sampling=drawn)
    machine._left = {4}
    who, state = machine.awaited, machine.state_dict()
    assert not state["left"]
    machine._left = set()
    who |= machine.awaited
    again = server(plan, sampling=drawn)
    again.load_state_dict(state)
    assert again.awaited == who and drawn.ledger.history() == [(PoissonGaussian(1.0, 0.5), 1)]


def test_a_run_ends_before_the_budget_of_the_list_is_exceeded(tmp_path):
    plan = plan_of(1.0)
    target = PLDAccountant().epsilon([(PoissonGaussian(1.0, 0.5), 2)], DELTA) * 1.001
    machine = server(plan, sampling=sampling(tmp_path, target=target))
    play(machine, plan, tmp_path)
    assert machine.round == 2 and machine.reason == "the list of clients has no budget left"
    assert machine.facts["epsilon"] <= target


def test_clients_that_are_not_the_unit_and_plans_without_the_trust_are_refused(tmp_path):
    plan = plan_of(1.0)
    machine = server(plan, sampling=sampling(tmp_path, 1.0))
    records = LocalRecords(Line(), data(0))
    with pytest.raises(MessageError, match="counts by 'client', this client by 'record'"):
        client(plan, 0, tmp_path, records).answer(machine.request(0))
    assert history(tmp_path, "client-0") == []
    with pytest.raises(ValueError, match="noise='server'"):
        server(plan, sampling=sampling(tmp_path), noise="client")
    with pytest.raises(ValueError, match="rate=0"):
        sampling(tmp_path, 0.0)


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
def test_with_differences_each_step_is_a_sample_of_its_own(tmp_path):
    plan = NoisePlan(1.5, Constant(), FullBatch(), 1.0, Diff2(2, 1.0, 1.0))
    machine = server(plan, sampling=sampling(tmp_path))
    play(machine, plan, tmp_path)
    expected = {PoissonGaussian(plan.noise_multiplier(t), 0.5) for t in range(ROUNDS)}
    assert machine.is_done and set(dict(machine.sampling.ledger.history())) == expected


# -- in secret ---------------------------------------------------------------------------------


class Away(LocalUpdates):
    def bounded_sum(self, query: Query, records: Any) -> Any:
        raise OSError("the disk is gone")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_outside_the_private_log_tells_who_was_drawn_late_or_there(tmp_path, caplog):
    """All that a run writes and logs is the same whoever is drawn, but for ε, noise and times."""
    caplog.set_level("INFO")
    plan, noted = plan_of(1.0), []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            noted.append(record.getMessage())

    private = logging.getLogger("lightning_dp.federated.private")
    assert not private.propagate
    private.addHandler(handler := Handler())
    private.setLevel("INFO")

    def number(context: Any) -> int:
        return int(context.node_config["partition-id"])

    def records(context: Any) -> LocalUpdates:
        kind = Away if number(context) == 2 else LocalUpdates
        return kind(Line(), data(number(context)), SGD, unit="client")

    def follow(rate: float, place: Path) -> tuple[Any, str]:
        app = client_app(
            records,
            lambda context, run, data, ledger: QueryClient(
                *(data, plan, ledger),
                **{"run": run, "rounds": ROUNDS, "trusts_server": True},
                **{"target_epsilon": math.inf, "target_delta": DELTA},
            ),
            place / "ledgers",
        )
        central = server_app(
            lambda context: Line(),
            lambda context, run, x: SynchronousServer(
                *(run, plan, x, ROUNDS, CLIENTS, CLIENTS, 1.0),
                **{"sampling": sampling(place, rate), "quorum": Quorum(wait=0.3)},
            ),
            **{"num_clients": CLIENTS, "folder": place / "out", "poll_interval": 0.001},
            name="trial",
        )
        caplog.clear()
        LoopbackGrid(app, CLIENTS).start(central)
        own = "Client 2 could not answer."  # what a client says in its own log stays there
        public = [each for each in caplog.records if each.name != private.name]
        lines = [each.getMessage() for each in public if each.getMessage() != own]
        return json.loads((place / "out" / "federation.json").read_text()), "\n".join(lines)

    none, all_ = (follow(rate, tmp_path / f"{rate}") for rate in (1e-9, 1.0))
    private.removeHandler(handler)
    assert any("client 2" in line for line in noted)
    assert any("client 1 replies" in line for line in noted)
    for (summary, lines), place in ((none, tmp_path / "1e-09"), (all_, tmp_path / "1.0")):
        assert summary.pop("epsilon") >= 0 and summary["clients"] == {}
        assert "client 2" not in lines.lower() and "replies" not in lines
        page = (place / "out" / "federation.md").read_text()
        assert "of a whole client" in page and "| client |" not in page
        assert (place / "out" / "rounds.csv").read_text().count("\n") == 1
    assert none[0] == all_[0]
    written = [{path.name.split(".")[0] for path in (tmp_path / name / "out").iterdir()}
               for name in ("1e-09", "1.0")]  # fmt: skip
    assert written[0] == written[1]
    assert none[1] == all_[1]
