"""Clients drawn in secret: the sum and its ε, and that nothing else says who was drawn."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant as Theirs
from torch import Tensor

from lightning_dp import Constant, Diff2, FullBatch, MeanGradient
from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.accounting.journal import JournalError, read_release_file
from lightning_dp.boundary import BoundedSum, Query
from lightning_dp.federated.client import noise_source
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import Message, MessageError, Quorum
from lightning_dp.federated.synchronous import ClientSampling, QueryClient, SynchronousServer
from lightning_dp.noise_plan import NoisePlan
from tests.federated.zoo import DELTA, SIZE, START, LogCosh, clipped, history, noised, summed

CLIENTS, ROUNDS, Q, Z, C = 6, 4, 0.5, 1.3, 0.7
EVENT = PoissonGaussian(Z, Q)


class Whole(LogCosh):
    """Its sum is clipped as one; zero where it is quiet."""

    unit, is_quiet = "client", False

    def bounded_sum(self, query: Query, records: Any) -> BoundedSum:
        rows = torch.zeros(1, SIZE, dtype=torch.float64)
        for term in () if self.is_quiet else query.terms:
            rows = rows + term.weight * self.rows(term.point, records=records).sum(0, keepdim=True)
        return summed(rows, query)


class Quiet(Whole):
    is_quiet = True


def plan_of(z: float = Z, estimator: Any = None) -> NoisePlan:
    return NoisePlan(z, Constant(), FullBatch(), 1.0, estimator or MeanGradient(C))


def sampling(folder: Path, rate: float = Q, target: float = math.inf) -> ClientSampling:
    return ClientSampling(rate, ReleaseLedger(folder / "central", "list"), target, DELTA)


def server(folder: Path, plan: NoisePlan | None = None, **changes: Any) -> SynchronousServer:
    settings = {"rounds": ROUNDS, "num_clients": CLIENTS, "num_records": CLIENTS, "seed": 3}
    given = {"learning_rate": 0.2, "quorum": Quorum(2), "sampling": sampling(folder), **settings}
    return SynchronousServer("trial", plan or plan_of(), START, **{**given, **changes})


def client(folder: Path, c: int, kind: Any = Whole, plan: Any = None, **changes: Any) -> Any:
    budget = {"target_epsilon": math.inf, "target_delta": DELTA, "trusts_server": True, **changes}
    ledger = ReleaseLedger(folder / "ledgers", f"client-{c}")
    own = {"run": "trial", "rounds": ROUNDS, **budget}
    return QueryClient(kind(seed=c), plan or plan_of(), ledger, **own)


def central(folder: Path) -> Any:
    return history(folder / "central", "list")


def step(machine: SynchronousServer, folder: Path, away: Any = (), **settings: Any) -> None:
    """One round, of all who are not away."""
    for c in sorted(machine.awaited - set(away)):
        reply = client(folder, c, **settings).answer(machine.request(c))
        assert machine.receive(c, reply)
    if away:
        assert machine.leave_out() == set(away)


# -- the sum and its ε -------------------------------------------------------------------------


def test_who_was_drawn_and_was_there_is_in_the_sum_and_the_mean_is_over_all(tmp_path):
    machine, x, sizes = server(tmp_path), START, []
    for t, away in enumerate([(), (1,), (0, 5), ()]):
        if t == 3:
            machine._drawn = set()  # also of nobody
        there = machine._drawn - set(away)
        sizes.append(len(there))
        step(machine, tmp_path, away)
        total = sum((clipped(Whole(seed=c).rows(x).sum(0, True), C) for c in there), START * 0)
        x = x - 0.2 * noised(total, Z * C, noise_source(3, t)) / (Q * CLIENTS)
        torch.testing.assert_close(machine.point, x, rtol=0, atol=1e-12)
    assert machine.is_done and max(sizes) > 0 == sizes[3]
    assert central(tmp_path) == [(EVENT, ROUNDS)]


def test_epsilon_is_that_of_gaussians_on_poisson_samples(tmp_path):
    machine = server(tmp_path)
    for _ in range(ROUNDS):
        step(machine, tmp_path)
    theirs = Theirs().compose(PoissonSampledDpEvent(Q, GaussianDpEvent(Z)), ROUNDS)
    assert machine.facts["epsilon"] == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-3)
    for c in range(CLIENTS):  # towards the server, nothing is amplified
        assert history(tmp_path / "ledgers", f"client-{c}") == [(Gaussian(Z), ROUNDS)]


def test_each_client_is_drawn_by_itself_at_the_rate_and_anew_in_each_step(tmp_path):
    draws, count = torch.zeros(300, 20), 0
    for count in range(300):
        machine = server(tmp_path, num_clients=20, sampling=sampling(tmp_path, 0.2))
        draws[count, sorted(machine._drawn)] = 1
    assert float(draws.mean()) == pytest.approx(0.2, abs=5 * 0.4 / math.sqrt(6000))
    assert float(draws.sum(1).var()) == pytest.approx(20 * 0.2 * 0.8, rel=0.5)
    assert float(draws.mean(0).min()) > 0.08 and not central(tmp_path)
    machine = server(tmp_path)
    found = [machine._drawn]
    while len(found) < ROUNDS:
        step(machine, tmp_path)
        found.append(machine._drawn)
    assert len({tuple(each) for each in found}) > 1


@pytest.mark.filterwarnings("ignore:Diff2. the noise")
def test_with_differences_each_step_is_a_sample_of_its_own(tmp_path):
    plan = plan_of(estimator=Diff2(2, 1.0, 1.0))
    machine = server(tmp_path, plan)
    for _ in range(ROUNDS):
        step(machine, tmp_path, plan=plan)
    expected = {PoissonGaussian(plan.noise_multiplier(t), Q) for t in range(ROUNDS)}
    assert machine.is_done and set(dict(central(tmp_path))) == expected and len(expected) == 2


# -- charged before anybody is asked, once, and released once ----------------------------------


def test_a_step_is_charged_before_a_client_is_asked_and_not_beyond_the_budget(tmp_path):
    target = PLDAccountant().epsilon([(EVENT, 2)], DELTA) * 1.001
    machine = server(tmp_path, sampling=sampling(tmp_path, target=target))
    assert central(tmp_path) == []
    for t in range(2):
        assert machine.request(0) and central(tmp_path) == [(EVENT, t + 1)]
        step(machine, tmp_path)
    assert machine.request(0) is None and machine.awaited == set()
    assert machine.reason == "the list of clients has no budget left" and machine.round == 2
    assert machine.facts["epsilon"] <= target and central(tmp_path) == [(EVENT, 2)]


def test_a_server_that_dies_before_the_release_draws_anew_and_pays_once(tmp_path):
    machine, draws = server(tmp_path, seed=None), []
    for _ in range(12):
        draws.append(tuple(sorted(machine._drawn)))
        for c in range(CLIENTS - 1):
            assert machine.receive(c, client(tmp_path, c).answer(machine.request(c)))
        state, machine = machine.state_dict(), server(tmp_path, seed=None)
        machine.load_state_dict(state)
    step(machine, tmp_path)
    assert machine.round == 1 and len(set(draws)) > 1
    assert central(tmp_path) == [(EVENT, 1)]
    for c in range(CLIENTS):
        assert history(tmp_path / "ledgers", f"client-{c}") == [(Gaussian(Z), 1)]


def test_a_step_that_was_released_has_no_second_draw_and_noise(tmp_path):
    """Not even for a server whose state is older than its release."""
    machine = server(tmp_path, seed=None)
    state = machine.state_dict()
    step(machine, tmp_path)
    for _ in range(3):
        again = server(tmp_path, seed=None)
        again.load_state_dict(state)
        step(again, tmp_path)
        assert torch.equal(again.point, machine.point) and not torch.equal(again.point, START)
    step(machine, tmp_path)
    step(machine, tmp_path)
    again = server(tmp_path, seed=None)
    again.load_state_dict(state)
    with pytest.raises(MessageError, match="round 0 is over"):
        again.request(0)
    assert central(tmp_path) == [(EVENT, 3)]


def test_a_ledger_of_the_list_that_was_lost_or_is_old_is_noticed(tmp_path):
    machine, folder = server(tmp_path), tmp_path / "central"
    step(machine, tmp_path)
    shutil.copytree(folder, tmp_path / "old")
    step(machine, tmp_path)
    shutil.move(folder, tmp_path / "new")
    again = server(tmp_path)
    again.load_state_dict(machine.state_dict())
    for each in (machine, again):
        for copied in (None, "old"):
            shutil.rmtree(folder, ignore_errors=True)
            if copied:
                shutil.copytree(tmp_path / copied, folder)
            assert each.facts["epsilon"] == math.inf
            with pytest.raises(JournalError, match="lacks charges of this run"):
                each.request(0)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "new", folder)  # the cure
    step(machine, tmp_path)
    assert central(tmp_path) == [(EVENT, 3)]


def test_charges_of_another_run_do_not_stand_for_lost_ones(tmp_path):
    machine, folder = server(tmp_path), tmp_path / "central"
    step(machine, tmp_path)
    shutil.copytree(folder, tmp_path / "old")
    step(machine, tmp_path)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "old", folder)
    other = SynchronousServer("other", plan_of(), START, 4, 6, 6, 0.2, sampling=sampling(tmp_path))
    assert other.request(0) and central(tmp_path) == [(EVENT, 2)]
    with pytest.raises(JournalError, match="lacks charges of this run"):
        machine.request(0)


def test_clients_that_are_not_the_unit_and_updates_longer_than_it_are_refused(tmp_path):
    machine = server(tmp_path)
    with pytest.raises(MessageError, match=r"counts by unit='client', and this client by unit='re"):
        client(tmp_path, 0, LogCosh).answer(machine.request(0))
    assert history(tmp_path / "ledgers", "client-0") == []
    reply = Message.from_bytes(client(tmp_path, 1).answer(machine.request(1)))
    long = {"sum": torch.full((SIZE,), 1.01 * C / math.sqrt(SIZE), dtype=torch.float64)}
    with pytest.raises(MessageError, match="longer than"):
        machine.receive(1, Message(reply.kind, reply.facts, long).to_bytes())
    for changes in ({"noise": "client"}, {"sampling": 0.5}):
        with pytest.raises((ValueError, TypeError), match="sampling"):
            server(tmp_path, **changes)
    with pytest.raises(ValueError, match="rate=0"):
        sampling(tmp_path, 0.0)
    other = server(tmp_path, sampling=sampling(tmp_path, 0.4))
    with pytest.raises(ValueError, match="sampling differs"):
        server(tmp_path, sampling=None).load_state_dict(machine.state_dict())
    with pytest.raises(ValueError, match="begun with another plan"):
        other.request(0)


# -- nothing else says who was drawn -----------------------------------------------------------


def outward(found: Any, is_quiet: bool) -> Any:
    """Return the part that others see: all, of clients who send zeros; else all but models' numbers."""
    if isinstance(found, bytes | Tensor):
        return found if is_quiet and isinstance(found, bytes) else len(found)
    if isinstance(found, dict):
        return {
            name: outward(each, is_quiet) for name, each in found.items() if name != "estimator"
        }
    return found


def transcript(folder: Path, is_quiet: bool) -> tuple[list[Any], list[set[int]]]:
    """All that leaves a server, of a run in which clients are away, wrong, late and without budget."""
    machine, found, draws = server(folder), list[Any](), []
    machine._name, kind = "one", Quiet if is_quiet else Whole

    def note(*things: Any) -> None:
        found.extend(outward(each, is_quiet) for each in things)

    def receive(c: int, reply: bytes) -> None:
        try:
            note(machine.receive(c, reply))
        except MessageError as error:
            note(f"{error}")

    for t in range(ROUNDS):
        draws.append(machine._drawn)
        for c in range(CLIENTS):
            note(request := machine.request(c))
            if request is None or (c, t) in {(0, 1), (2, 2), (2, 3), (4, 3)}:
                continue
            target = 1e-6 if c == 5 else math.inf
            reply = client(folder, c, kind, target_epsilon=target).answer(request)
            if c == 1:
                long = {"sum": torch.full((SIZE,), 2.0 * C, dtype=torch.float64)}
                for bad in (
                    b"nonsense",
                    Message("answer", {"round": t, "part": 0}, long).to_bytes(),
                ):
                    receive(c, bad)
            for _ in range(2):
                receive(c, reply)
                note(reply, machine.stage, machine.awaited, machine.reason, machine.state_dict())
        if machine.round == t:
            note(machine.leave_out())
        note(machine.round, machine.refused, machine.reason, machine.facts, repr(machine))
        note(machine.state_dict(), central(folder))
    (path,) = (folder / "central").glob("*.release")
    progress, kept = read_release_file(path)
    note({**vars(progress), "seed": "random"}, {f"{at}": each for at, each in kept.items()})
    note(sorted(each.name for each in folder.rglob("*")), machine.point)
    return found, draws


@pytest.mark.parametrize("is_quiet", [True, False])
def test_all_that_leaves_a_server_is_the_same_whoever_is_drawn(tmp_path, is_quiet):
    """Compare runs: to the last bit where clients send zeros, else up to the numbers of models."""
    runs = [transcript(tmp_path / f"{n}", is_quiet) for n in range(4)]
    assert len({repr(draws) for _, draws in runs}) == 4
    first = runs[0][0]
    assert len(first) > 100 and any("longer than" in str(each) for each in first)
    for found, _ in runs[1:]:
        for one, other in zip(first, found, strict=True):
            assert one == other


def deployed(folder: Path, log: Any) -> tuple[Any, list[set[int]]]:
    """Files, log lines, scalars and messages of a run over Flower in which client 5 is away."""
    from loopback import LoopbackGrid
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from lightning_dp.federated.flower import client_app, server_app

    sent, draws = list[Any](), list[set[int]]()

    class Watched(LoopbackGrid):
        def push_messages(self, messages: Any) -> Any:
            for each in (messages := list(messages)):
                size = len(each.content["payload"]["bytes"].data)
                sent.append((each.metadata.dst_node_id, each.metadata.message_type, size))
            return super().push_messages(messages)

    class Noting(SynchronousServer):
        def _ask(self) -> None:
            super()._ask()
            draws.append(self._drawn)

    class Weights(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(START.clone())

    def at_the_server(context: Any, run: str, x: Tensor) -> SynchronousServer:
        numbers = (ROUNDS, CLIENTS, CLIENTS, 0.2)
        given = {"quorum": Quorum(2, wait=0.5), "sampling": sampling(folder), "seed": 3}
        return Noting("trial", plan_of(), x, *numbers, **given)

    def at_the_client(context: Any, run: str, records: Any, ledger: Any) -> QueryClient:
        return client(folder, int(context.node_config["partition-id"]), Quiet)

    grid = Watched(client_app(lambda context: Quiet(), at_the_client, folder / "locks"), CLIENTS)
    del grid._nodes[105]
    log.clear()
    server = server_app(
        *(lambda context: Weights(), at_the_server),
        **{
            "folder": folder / "out",
            "poll_interval": 0.001,
            "name": "trial",
        },
    )
    grid.start(server)
    out, events = folder / "out", EventAccumulator(str(folder / "out")).Reload()
    texts = [
        (out / name).read_text() for name in ("rounds.csv", "federation.json", "federation.md")
    ]
    tags = events.Tags()["scalars"]
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}
    weights = torch.load(out / "model.pt", weights_only=True)["x"].tolist()
    names = sorted(path.name.split(".")[0] for path in out.iterdir())
    lines = [each.getMessage() for each in log.records]
    return (texts, scalars, weights, names, lines, sorted(sent)), draws


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_logs_and_messages_over_flower_are_the_same_whoever_is_drawn(tmp_path, caplog):
    pytest.importorskip("flwr", reason="needs lightning-dp[federated]")
    caplog.set_level("INFO", logger="lightning_dp.federated")
    runs = [deployed(tmp_path / f"{n}", caplog) for n in range(3)]
    assert len({repr(draws) for _, draws in runs}) == 3
    first = runs[0][0]
    for found, _ in runs[1:]:
        for one, other in zip(first, found, strict=True):
            assert one == other
    (_, summary, page), scalars, _, names, lines, sent = first
    told = json.loads(summary)
    assert told["rounds"] == ROUNDS and told["client_rate"] == Q and told["left out"] == ROUNDS
    assert told["epsilon"] == PLDAccountant().epsilon([(EVENT, ROUNDS)], DELTA)
    assert "of a whole client, by all runs over the list" in page and len(sent) == 5 * (ROUNDS + 1)
    assert sum("goes on without client 5" in line for line in lines) == ROUNDS
    # Only the server's own log and rounds.csv name who was there.
    assert told["clients"] == {} and "answered" not in page and "| " not in page
    assert names.count("federation") == 2  # no picture
    assert scalars and not any("client_" in tag for tag in scalars)
