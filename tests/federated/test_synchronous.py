"""Synchronous protocols: DIFF2 with a trusted server or noisy clients, and BVR-L-SGD."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.accounting.events import PoissonRound
from lightning_dp.boundary import Query, Term
from lightning_dp.estimators import Diff2, MeanGradient
from lightning_dp.estimators.base import AbstractEstimator, Traits
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import Message, MessageError
from lightning_dp.federated.synchronous import BVRLSGD, QueryClient, SynchronousServer
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import FullBatch, Poisson
from lightning_dp.schedules import Constant

SIZE, CLIENTS, RECORDS, ROUNDS, RATE = 4, 3, 30, 7, 0.2
DIFF2 = Diff2(3, 1.0, 0.6, split=2.0)

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")


def start() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.float64)


def plan(noise=2.0, estimator=DIFF2, sampling=None, rate=1.0) -> NoisePlan:
    return NoisePlan(noise, Constant(), sampling or FullBatch(), rate, estimator)


def server(the_plan=None, **changes) -> SynchronousServer:
    settings = {"rounds": ROUNDS, "num_clients": CLIENTS, "num_records": CLIENTS * RECORDS}
    settings = {**settings, "learning_rate": RATE, **changes}
    return SynchronousServer("trial", the_plan or plan(), start(), **settings)


def factory(log_cosh, folder, the_plan=None, **changes):
    settings = {"run": "trial", "rounds": ROUNDS, "target_delta": 1e-5, "trusts_server": True}
    settings |= {"target_epsilon": math.inf, **changes}

    def make(c: int) -> QueryClient:
        seed = settings.get("seed")
        return QueryClient(
            log_cosh(RECORDS, seed=c),
            the_plan or plan(),
            ReleaseLedger(folder, f"client {c}"),
            client=c,
            num_clients=CLIENTS,
            **{**settings, "seed": None if seed is None else seed + c},
        )

    return make


def clipped(rows: torch.Tensor, radius: float) -> torch.Tensor:
    return (rows * (radius / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0)


@pytest.mark.parametrize("noise_at", ["server", "client"])
@pytest.mark.parametrize("seed", range(2))
def test_without_noise_it_is_diff2_over_all_records(
    log_cosh, bad_network, tmp_path, noise_at, seed
):
    """Lost, doubled and late messages, clients that die: x is that of the plain algorithm."""
    machine = server(plan(noise=0.0), noise=noise_at)
    make = factory(log_cosh, tmp_path, plan(noise=0.0), trusts_server=noise_at == "server")
    bad_network(machine, make, CLIENTS, seed)
    data, x = [log_cosh(RECORDS, seed=c) for c in range(CLIENTS)], start()
    before = x

    def all_gradients(point):
        return torch.cat([each.gradients(point, range(RECORDS)) for each in data])

    for t in range(ROUNDS):
        if t % 3 == 0:
            v = clipped(all_gradients(x), 1.0) / (CLIENTS * RECORDS)
        else:
            radius = 0.6 * float((x - before).norm())
            differences = all_gradients(x) - all_gradients(before)
            v = v + clipped(differences, radius) / (CLIENTS * RECORDS)
        before, x = x, x - RATE * v
    torch.testing.assert_close(machine.point, x)
    assert x.norm() > 0.1 and machine.round == ROUNDS


@pytest.mark.parametrize(("noise_at", "factor"), [("server", 1.0), ("client", math.sqrt(CLIENTS))])
def test_the_server_noises_once_or_each_client_does(
    log_cosh, bad_network, tmp_path, noise_at, factor
):
    """One step of 4 coordinates, 40 times: z C / N, or √P as much; never both, never none."""
    noises, the_plan = [], plan(noise=5.0, estimator=MeanGradient(1.0))
    for trial in range(40):
        settings = {"rounds": 1, "noise": noise_at, "learning_rate": 1.0}
        noisy = server(the_plan, **settings)
        make = factory(
            *(log_cosh, tmp_path / f"{trial}", the_plan),
            rounds=1,
            trusts_server=noise_at == "server",
        )
        for c in range(CLIENTS):
            noisy.receive(c, make(c).answer(noisy.request(c)))
        noises.append(noisy.point)
    found = torch.stack(noises).std(0, correction=1).square().mean().sqrt()
    expected = factor * 5.0 / (CLIENTS * RECORDS)
    assert float(found) == pytest.approx(expected, rel=0.25)


def test_each_client_books_its_own_records(log_cosh, bad_network, tmp_path):
    machine, make = server(), factory(log_cosh, tmp_path)
    bad_network(machine, make, CLIENTS, 0)
    ratio = DIFF2.relative_noise(1)
    for c in range(CLIENTS):
        history = ReleaseLedger(tmp_path, f"client {c}").history()
        assert sorted(history, key=repr) == sorted(
            [(Gaussian(2.0), 3), (Gaussian(2.0 * ratio), 4)], key=repr
        )
        assert make(c).epsilon == PLDAccountant().epsilon(history, 1e-5)


def test_poisson_batches_are_of_the_plans_rate(log_cosh, tmp_path):
    the_plan = plan(estimator=MeanGradient(1.0), sampling=Poisson(), rate=0.3)
    make, machine = factory(log_cosh, tmp_path, the_plan, rounds=50), server(the_plan, rounds=50)
    client = make(0)
    request = Message.from_bytes(machine.request(0))
    sizes = []
    for step in range(50):
        facts = {**request.facts, "round": step}
        client.answer(Message("query", facts, request.tensors).to_bytes())
        sizes.append(len(client.records.asked[-1][1]))
    assert sum(sizes) / 50 == pytest.approx(0.3 * RECORDS, rel=0.2)
    assert ReleaseLedger(tmp_path, "client 0").history() == [(PoissonGaussian(2.0, 0.3), 50)]


def test_a_clients_unnoised_sum_is_not_on_its_disk(log_cosh, tmp_path):
    make, machine = factory(log_cosh, tmp_path), server()
    reply = make(0).answer(machine.request(0))
    assert make(0).answer(machine.request(0)) == reply
    payload = Message.from_bytes(reply).tensors["sum"].numpy().tobytes()
    assert payload in reply
    assert all(payload not in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"noise_multiplier": 1.99}, r"noise_multiplier=1\.99 at step 0, below"),
        ({"noise_multiplier": 0.0}, r"noise_multiplier=0\.0 at step 0, below"),
        ({"noise_multiplier": math.nan}, "cannot be asked"),
        ({"clip_norm": -1.0}, "cannot be asked"),
        ({"clip_norm": math.inf}, "cannot be asked"),
        ({"noise": "nobody"}, "noise='nobody'"),
        ({"part": 1}, "Part 1 of step 0"),
        ({"run": "other"}, "run 'trial'"),
        ({"weight0": math.inf}, "cannot be asked"),
    ],
)
def test_a_server_that_asks_for_more_gets_nothing(log_cosh, tmp_path, changes, match):
    request = Message.from_bytes(server().request(0))
    message = Message("query", {**request.facts, **changes}, request.tensors)
    with pytest.raises(MessageError, match=match):
        factory(log_cosh, tmp_path)(0).answer(message.to_bytes())
    assert ReleaseLedger(tmp_path, "client 0").history() == []


def test_only_a_trusted_server_gets_sums_without_noise(log_cosh, tmp_path):
    with pytest.raises(MessageError, match="trusts_server=True"):
        factory(log_cosh, tmp_path, trusts_server=False)(0).answer(server().request(0))
    assert ReleaseLedger(tmp_path, "client 0").history() == []


def test_a_client_without_budget_ends_the_run(log_cosh, bad_network, tmp_path):
    events = [Gaussian(2.0 * DIFF2.relative_noise(t)) for t in range(ROUNDS)]
    target = PLDAccountant().epsilon([(e, 1) for e in events[:4]], 1e-5) * 1.001
    machine = server()
    make = factory(log_cosh, tmp_path, target_epsilon=target)
    bad_network(machine, make, CLIENTS, 0)
    assert machine.round == 4 and "no budget left" in machine.reason
    assert make(0).epsilon <= target


@pytest.mark.parametrize("noise_at", ["server", "client"])
def test_a_saved_server_goes_on_from_any_state(log_cosh, bad_network, tmp_path, noise_at):
    """With seeded noise, killed and restored again and again, it ends where another does."""
    ends = []
    for kill in (False, True):
        folder, rng = tmp_path / f"{kill}", random.Random(2)
        settings = {"noise": noise_at, "seed": 3}
        holder = [server(**settings)]
        make = factory(log_cosh, folder, trusts_server=noise_at == "server", seed=5)

        class Proxy:
            def __getattr__(self, name, holder=holder):
                return getattr(holder[0], name)

        def maybe(holder=holder, rng=rng, kill=kill, settings=settings):
            if kill and rng.random() < 0.2:
                path = tmp_path / "server.pt"
                torch.save(holder[0].state_dict(), path)
                holder[0] = server(**settings)
                holder[0].load_state_dict(torch.load(path, weights_only=True))

        bad_network(Proxy(), make, CLIENTS, 1, look=maybe)
        ends.append(holder[0].point)
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)
    assert ends[0].norm() > 0.01


def test_another_configuration_is_refused():
    with pytest.raises(ValueError, match=r"learning_rate differs.* it was 0\.2, now 0\.5"):
        server(learning_rate=0.5).load_state_dict(server().state_dict())


class TwoQuestions(AbstractEstimator):
    """Asks about x, and then about x minus the answer, on one batch."""

    @property
    def traits(self):
        return Traits(queries_per_step=2)

    def init(self, params):
        return {"first": None}

    def ask(self, state, params, step, noise_multiplier):
        (x,) = params
        point = x if state["first"] is None else x - state["first"]
        return Query((Term(1.0, point),), 1.0, noise_multiplier * math.sqrt(2) * (1 + 1e-14))

    def tell(self, state, params, step, released):
        if state["first"] is None:
            return None, {"first": released.value}
        return released.value, {"first": None}


def test_two_queries_of_a_step_are_on_one_batch_and_charged_once(log_cosh, bad_network, tmp_path):
    the_plan = plan(estimator=TwoQuestions(), sampling=Poisson(), rate=0.4)
    machine = server(the_plan, noise="client")
    clients = {}
    make = factory(log_cosh, tmp_path, the_plan, trusts_server=False)

    def kept(c):
        clients.setdefault(c, []).append(make(c))
        return clients[c][-1]

    bad_network(machine, kept, CLIENTS, 0)
    for c in range(CLIENTS):
        history = ReleaseLedger(tmp_path, f"client {c}").history()
        assert history == [(PoissonGaussian(2.0, 0.4), ROUNDS)]
        asked = [each for client in clients[c] for each in client.records.asked]
        batches = [tuple(batch) for _, batch in asked]
        assert len(batches) >= 2 * ROUNDS and len(set(batches)) == ROUNDS
        together = PoissonRound((asked[0][0].noise_multiplier,) * 2, 1.0).pair[0]
        assert together >= 2.0


def test_several_queries_are_never_noised_by_the_server():
    with pytest.raises(ValueError, match="noise='client'"):
        server(plan(estimator=TwoQuestions()), noise="server")


ROUTINE = BVRLSGD(RATE, 4, 0.5, noise_multiplier=3.0, sample_rate=0.4)


@pytest.mark.parametrize("noise_at", ["server", "client"])
def test_bvr_l_sgd_books_what_its_worker_in_turn_does(log_cosh, bad_network, tmp_path, noise_at):
    """The history of the class itself, of every worker, through a bad network."""
    settings = {"local_routine": ROUTINE}
    machine = server(**settings, noise=noise_at)
    make = factory(log_cosh, tmp_path, trusts_server=noise_at == "server", **settings)
    bad_network(machine, make, CLIENTS, 4)
    assert machine.round == ROUNDS
    for c in range(CLIENTS):
        expected = ROUTINE.history(DIFF2, 2.0, ROUNDS, c, CLIENTS)
        history = ReleaseLedger(tmp_path, f"client {c}").history()
        assert sorted(history, key=repr) == sorted(expected, key=repr)


def test_bvr_l_sgd_without_noise_is_the_routine(log_cosh, tmp_path):
    """All records in each local batch: after the server's step, K - 1 steps on the worker's own."""
    routine = BVRLSGD(RATE, 4, 0.5, noise_multiplier=0.0, sample_rate=1.0)
    machine = server(plan(noise=0.0), rounds=2, local_routine=routine)
    make = factory(log_cosh, tmp_path, plan(noise=0.0), rounds=2, local_routine=routine)
    clients = [make(c) for c in range(CLIENTS)]
    while not machine.is_done:
        for c in range(CLIENTS):
            if (request := machine.request(c)) is not None:
                machine.receive(c, clients[c].answer(request))
    data, x, before, v = [log_cosh(RECORDS, seed=c) for c in range(CLIENTS)], start(), None, None
    for r in (1, 2):
        rows = torch.cat([each.gradients(x, range(RECORDS)) for each in data])
        if r == 1:
            v = clipped(rows, 1.0) / (CLIENTS * RECORDS)
        else:
            old = torch.cat([each.gradients(before, range(RECORDS)) for each in data])
            v = v + clipped(rows - old, 0.6 * float((x - before).norm())) / (CLIENTS * RECORDS)
        before, a, b, u = x, x, x - RATE * v, v
        for _ in range(3):
            own = data[r % CLIENTS]
            rows = own.gradients(b, range(RECORDS)) - own.gradients(a, range(RECORDS))
            u = u + clipped(rows, 0.5 * float((b - a).norm())) / RECORDS
            a, b = b, b - RATE * u
        x = b
    torch.testing.assert_close(machine.point, x)
    assert float((x - before).norm()) > 0.01


def test_a_worker_walks_only_in_its_turn(log_cosh, tmp_path):
    make = factory(log_cosh, tmp_path, local_routine=ROUTINE)
    message = Message(
        "local", {"run": "trial", "round": 0, "part": 0}, {"x": start(), "v": start() + 1}
    )
    with pytest.raises(MessageError, match="not this client's turn"):
        make(0).answer(message.to_bytes())
    assert ReleaseLedger(tmp_path, "client 0").history() == []
    assert Message.from_bytes(make(1).answer(message.to_bytes())).kind == "walked"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"num_clients": 0}, "num_clients=0"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"noise": "both"}, "noise='both'"),
        ({"local_routine": BVRLSGD(0.1, 4, 0.5, 3.0, 0.4)}, "two speeds"),
    ],
)
def test_bad_servers_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        server(**changes)
