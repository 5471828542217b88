"""Asynchronous SGD under a bad network: each update once, bounded lag, one noise draw."""

from __future__ import annotations

import itertools
import math
import os
import random

import numpy as np
import pytest
import torch

from lightning_dp.accounting import Gaussian, PLDAccountant, PoissonGaussian
from lightning_dp.federated import (
    Aggregator,
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    ConstantSteps,
    InverseSteps,
    Message,
    MessageError,
    PolynomialSizes,
    ReleaseLedger,
)

SIZE, ROUNDS, CLIENTS = 4, 6, 3
STEPS = InverseSteps(0.05, beta=0.01)


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch):
    """No power is cut here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def plan(lag=1, rounds=ROUNDS, **changes) -> AsyncPlan:
    return AsyncPlan(rounds, PolynomialSizes(1.5, 3), STEPS, lag=lag, **changes)


def start() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.float64)


def factory(log_cosh, folder, the_plan, noise=2.0, **changes):
    """Makes client c anew, on the ledger that it had."""
    privacy = {"max_grad_norm": 1.0, "noise_multiplier": noise, **changes.pop("privacy", {})}

    def make(c: int) -> AsyncClient:
        seed = changes.get("seed")
        return AsyncClient(
            log_cosh(30, seed=c),
            the_plan,
            ClientPrivacy(**privacy, seed=None if seed is None else seed + c),
            ReleaseLedger(folder, f"client {c}"),
            run="trial",
            **{k: v for k, v in changes.items() if k != "seed"},
        )

    return make


class Watched(AsyncServer):
    """Writes down every update that changed the model, and checks what must hold at any time."""

    def __post_init__(self):
        super().__post_init__()
        self.updates: dict[tuple[int, int], torch.Tensor] = {}
        self.over = {0: self.start}  # v̂ when round k became the earliest one

    def receive(self, client, reply):
        before, k = self.applied, self.round
        super().receive(client, reply)
        if self.round > k:
            self.over[self.round] = self.point
        if self.applied != before:
            message = Message.from_bytes(reply)
            key = (message.whole("round"), client)
            assert key not in self.updates
            self.updates[key] = message.tensor("update")
        self.check()

    def check(self):
        expected = self.start.clone()
        for (i, _), update in self.updates.items():
            change = update.clone()
            coordinates = self.plan.coordinates(i, SIZE)
            if coordinates is not None:
                change = torch.zeros(SIZE, dtype=torch.float64)
                change[coordinates] = update * SIZE / len(coordinates)
            expected = expected - self.plan.step_size(i) * change
        torch.testing.assert_close(self.point, expected)
        k = self.round
        assert all((i, c) in self.updates for i in range(k) for c in range(self.num_clients))
        assert all(n <= k + self.plan.lag for n in self.applied)
        for c in range(self.num_clients):
            request = self.request(c)
            if request is None:
                continue
            message = Message.from_bytes(request)
            i = message.whole("round")
            assert i == self.applied[c] < k + self.plan.lag
            if "model" in message.tensors:  # it has the rounds below k, and all of this client's
                model = self.over[k] if i == k else self.point
                assert torch.equal(message.tensors["model"], model)


@pytest.mark.parametrize("lag", [1, 2, 4])
@pytest.mark.parametrize("keep", [None, 3])
@pytest.mark.parametrize("seed", range(2))
def test_each_update_is_applied_once_and_no_one_is_too_far_ahead(
    log_cosh, bad_network, tmp_path, lag, keep, seed
):
    server = Watched("trial", plan(lag, keep=keep), start(), CLIENTS)
    make = factory(log_cosh, tmp_path, server.plan)
    bad_network(server, make, CLIENTS, seed, look=server.check)
    assert len(server.updates) == ROUNDS * CLIENTS
    assert server.applied == [ROUNDS] * CLIENTS
    for c in range(CLIENTS):
        history = ReleaseLedger(tmp_path, f"client {c}").history()
        rates = [server.plan.sizes(i) / 30 for i in range(ROUNDS)]
        assert history == [(PoissonGaussian(2.0, q), 1) for q in rates]
        assert make(c).epsilon == PLDAccountant().epsilon(history, 1e-5)


def test_lags_of_more_than_one_happen(log_cosh, bad_network, tmp_path):
    """Else the tests above would test nothing."""
    server, seen = Watched("trial", plan(lag=4), start(), CLIENTS), set()
    bad_network(
        *(server, factory(log_cosh, tmp_path, server.plan), CLIENTS, 0),
        look=lambda: seen.add(max(server.applied) - server.round),
    )
    assert max(seen) == 4


def test_the_network_changes_nothing_when_rounds_are_synchronous(log_cosh, bad_network, tmp_path):
    ends = []
    for seed, faults in ((0, 0.0), (1, 0.4), (2, 0.4)):
        server = AsyncServer("trial", plan(lag=1), start(), CLIENTS)
        make = factory(log_cosh, tmp_path / f"{seed}", server.plan, seed=50)
        bad_network(server, make, CLIENTS, seed, faults=faults)
        ends.append(server.point)
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(ends[2], ends[0], rtol=0, atol=1e-12)
    assert ends[0].norm() > 0.1


def test_without_noise_and_clipping_it_is_gradient_descent(log_cosh, bad_network, tmp_path):
    """All records in each batch, lag 1: x ← x - η Σ g over all clients."""
    full = AsyncPlan(5, PolynomialSizes(0, 30), ConstantSteps(0.01))
    server = AsyncServer("trial", full, start(), CLIENTS)
    make = factory(log_cosh, tmp_path, full, noise=0.0, privacy={"max_grad_norm": math.inf})
    bad_network(server, make, CLIENTS, 0)
    x = start()
    for _ in range(5):
        x = x - 0.01 * sum(log_cosh(30, seed=c).gradients(x, range(30)).sum(0) for c in range(3))
    torch.testing.assert_close(server.point, x)
    assert x.norm() > 0.5
    assert math.isinf(make(0).epsilon)


def drive(client: AsyncClient, i: int, k: int, model=None) -> Message:
    facts = {"run": "trial", "round": i, "counter": k}
    tensors = {} if model is None else {"model": model}
    return Message.from_bytes(client.answer(Message("round", facts, tensors).to_bytes()))


def test_between_models_a_client_moves_as_the_server_does(log_cosh, tmp_path):
    """The noise is in the local step too, with the server's sign: ŵ ← ŵ - η̄ U."""
    records = log_cosh(30)
    privacy = ClientPrivacy(1.0, noise_multiplier=2.0)
    ledger = ReleaseLedger(tmp_path, "client")
    client = AsyncClient(records, plan(lag=3), privacy, ledger, run="trial")
    point = torch.ones(SIZE, dtype=torch.float64)
    for i in range(3):
        update = drive(client, i, 0, point if i == 0 else None).tensor("update")
        asked = records.asked[-1][0].terms[0].point
        torch.testing.assert_close(asked, point)
        point = point - plan().step_size(i) * update
    fresh = torch.full((SIZE,), 7.0, dtype=torch.float64)
    drive(client, 3, 1, fresh)
    assert torch.equal(records.asked[-1][0].terms[0].point, fresh)


def test_one_noisy_sum_of_one_model_is_what_leaves(log_cosh, tmp_path):
    """2500 rounds of one record: mean q clip(g), variance q(1-q) clip² + z² C²; not a factor off."""
    records, rounds = log_cosh(1), 2500
    many = AsyncPlan(rounds, PolynomialSizes(0, 1), ConstantSteps(1e-9))
    privacy = ClientPrivacy(0.5, noise_multiplier=3.0)
    ledger = ReleaseLedger(tmp_path, "client")
    client = AsyncClient(records, many, privacy, ledger, run="trial", share=0.5)
    # Straight to what is made in a round: 2500 rounds through the disk take a minute.
    rng = np.random.default_rng(0)
    sums = torch.stack(
        [Message.from_bytes(client._make(0, start(), rng)).tensor("update") for _ in range(rounds)]
    )
    gradient = records.gradients(start(), [0])[0]
    clipped = gradient * min(1.0, 0.5 / float(gradient.norm()))
    spread = math.sqrt((1.5**2 + 0.25 * 0.25) / rounds)
    assert float((sums.mean(0) - 0.5 * clipped).abs().max()) < 5 * spread
    assert sums.var(0).mean() == pytest.approx(
        1.5**2 + 0.25 * float(clipped**2 @ torch.ones(4).double()) / 4, rel=0.05
    )
    assert all(query.clip_norm == 0.5 for query, _ in records.asked)


def test_a_process_for_every_message_is_one_client(log_cosh, tmp_path):
    """Lag 3 and one model: each new process goes on from ŵ of the one before."""
    same = factory(log_cosh, tmp_path / "same", plan(lag=3), seed=1)(0)
    make = factory(log_cosh, tmp_path / "new", plan(lag=3), seed=1)
    for i in range(3):
        model = start() + 1 if i == 0 else None
        expected = drive(same, i, 0, model)
        found = drive(make(0), i, 0, model)
        assert found.kind == "update"
        torch.testing.assert_close(found.tensor("update"), expected.tensor("update"))


def test_asked_again_the_same_bytes_come_also_from_a_new_process(log_cosh, tmp_path):
    make = factory(log_cosh, tmp_path, plan(lag=2))
    facts = {"run": "trial", "round": 0, "counter": 0}
    request = Message("round", facts, {"model": start()}).to_bytes()
    first = make(0)
    reply = first.answer(request)
    assert first.answer(request) == reply
    assert make(0).answer(request) == reply
    assert make(0).answer(Message("round", facts).to_bytes()) == reply
    second = drive(first, 1, 0).to_bytes()
    assert make(0).answer(request) == reply  # lag 2: the server may have gone back one round
    assert make(0).answer(Message("round", {**facts, "round": 1}).to_bytes()) == second
    assert sum(n for _, n in ReleaseLedger(tmp_path, "client 0").history()) == 2
    other = ReleaseLedger(tmp_path, "client 1").history()
    assert other == []


def test_a_budget_ends_before_the_round_that_would_exceed_it(log_cosh, bad_network, tmp_path):
    """The client leaves, the others go on; ε is below the target and one more round is above."""
    the_plan = plan(lag=2, rounds=12)
    events = [PoissonGaussian(2.0, the_plan.sizes(i) / 30) for i in range(12)]
    target = PLDAccountant().epsilon([(e, 1) for e in events[:5]], 1e-5) * 1.001

    def make(c):
        budget = {"target_epsilon": target} if c == 1 else {}
        return factory(log_cosh, tmp_path, the_plan, privacy=budget)(c)

    server = AsyncServer("trial", the_plan, start(), CLIENTS)
    bad_network(server, make, CLIENTS, 3)
    assert server.applied == [12, 5, 12]
    assert make(1).epsilon <= target
    assert PLDAccountant().epsilon([(e, 1) for e in events[:6]], 1e-5) > target


def test_no_client_with_budget_ends_the_run(log_cosh, bad_network, tmp_path):
    server = AsyncServer("trial", plan(), start(), 2)
    make = factory(log_cosh, tmp_path, plan(), privacy={"target_epsilon": 1e-6})
    bad_network(server, make, 2, 0)
    assert (server.applied, server.reason) == ([0, 0], "no client has budget left")
    assert ReleaseLedger(tmp_path, "client 0").history() == []


@pytest.mark.parametrize("unit", ["record", "client"])
def test_sampling_amplifies_nothing_where_the_client_is_the_unit(log_cosh, tmp_path, unit):
    records = log_cosh(30)
    records.unit = unit
    ledger = ReleaseLedger(tmp_path, "client")
    client = AsyncClient(records, plan(), ClientPrivacy(1.0, 2.0), ledger, run="trial")
    drive(client, 0, 0, start())
    expected = Gaussian(2.0) if unit == "client" else PoissonGaussian(2.0, 0.1)
    assert ledger.history() == [(expected, 1)]


def test_shares_scale_the_batches(log_cosh, tmp_path):
    ledger = ReleaseLedger(tmp_path, "client")
    privacy = ClientPrivacy(1.0, noise_multiplier=lambda i: 2.0 + i)
    client = AsyncClient(log_cosh(30), plan(), privacy, ledger, run="trial", share=0.5)
    for i in range(2):
        drive(client, i, i, start())
    assert ledger.history() == [
        (PoissonGaussian(2.0, 0.05), 1),
        (PoissonGaussian(3.0, 2.5 / 30), 1),
    ]


@pytest.mark.parametrize("lag", [1, 3])
def test_a_saved_server_goes_on_from_any_state(log_cosh, bad_network, tmp_path, lag):
    """Killed and restored again and again, between any two calls, it loses and doubles nothing."""
    rng = random.Random(1)
    holder = {"server": Watched("trial", plan(lag), start(), CLIENTS)}

    class Restored:
        def __getattr__(self, name):
            return getattr(holder["server"], name)

    def kill_and_restore():
        if rng.random() < 0.3:
            old = holder["server"]
            path = tmp_path / "server.pt"
            torch.save(old.state_dict(), path)
            new = Watched("trial", plan(lag), start(), CLIENTS)
            new.updates, new.over = old.updates, old.over
            new.load_state_dict(torch.load(path, weights_only=True))
            holder["server"] = new

    class Proxy(Restored):
        is_done = property(lambda self: holder["server"].is_done)

    bad_network(
        *(Proxy(), factory(log_cosh, tmp_path, plan(lag)), CLIENTS, 5), look=kill_and_restore
    )
    assert len(holder["server"].updates) == ROUNDS * CLIENTS


def test_a_server_that_lost_its_latest_rounds_gets_the_same_updates_again(
    log_cosh, bad_network, tmp_path
):
    the_plan = plan(lag=2)
    make = factory(log_cosh, tmp_path, the_plan)
    server = Watched("trial", the_plan, start(), 2)
    saved = server.state_dict()
    for c, i in ((0, 0), (0, 1), (1, 0)):
        assert Message.from_bytes(server.request(c)).whole("round") == i
        server.receive(c, make(c).answer(server.request(c)))
    again = Watched("trial", the_plan, start(), 2)
    again.load_state_dict(saved)
    bad_network(again, make, 2, 0)
    for key, update in server.updates.items():
        assert torch.equal(again.updates[key], update)


def test_another_configuration_is_refused_by_name():
    state = AsyncServer("trial", plan(), start(), 3).state_dict()
    with pytest.raises(ValueError, match=r"num_clients=2.*num_clients=3"):
        AsyncServer("trial", plan(), start(), 2).load_state_dict(state)
    with pytest.raises(ValueError, match="plan="):
        AsyncServer("trial", plan(lag=2), start(), 3).load_state_dict(state)


def test_what_was_not_asked_is_refused():
    server = AsyncServer("trial", plan(lag=9), start(), 2)
    wrong = Message("update", {"round": 1, "counter": 0}, {"update": start()}).to_bytes()
    with pytest.raises(MessageError, match="round 1, which it was not asked for"):
        server.receive(0, wrong)
    short = Message("update", {"round": 0, "counter": 0}, {"update": start()[:2]}).to_bytes()
    with pytest.raises(MessageError, match="not a vector of 4"):
        server.receive(0, short)
    with pytest.raises(MessageError, match="another protocol"):
        server.receive(0, Message("x", {"round": 0}).to_bytes())
    assert server.applied == [0, 0]


def test_a_client_refuses_other_runs_and_old_rounds(log_cosh, tmp_path):
    client = factory(log_cosh, tmp_path, plan(lag=1))(0)
    facts = {"run": "other", "round": 0, "counter": 0}
    with pytest.raises(MessageError, match="run 'trial'"):
        client.answer(Message("round", facts, {"model": start()}).to_bytes())
    with pytest.raises(MessageError, match="Round 6 of 6"):
        drive(client, 6, 6, start())
    for i in range(3):
        drive(client, i, i, start())
    with pytest.raises(MessageError, match="round 0 is over"):
        drive(client, 0, 0, start())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"share": 10.0}, "This client has|this client has"),
        ({"share": math.nan}, "share=nan"),
        ({"local_steps": "diminishing1"}, "moves the model inside a round"),
        ({"local_steps": "often"}, "local_steps='often'"),
        ({"ledger": None}, "ledger=None"),
    ],
)
def test_bad_clients_are_refused(log_cosh, tmp_path, changes, match):
    ledger = changes.pop("ledger", ReleaseLedger(tmp_path, "client"))
    with pytest.raises(ValueError, match=match):
        AsyncClient(log_cosh(30), plan(), ClientPrivacy(1.0, 2.0), ledger, run="r", **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("local_steps", ["diminishing1", "diminishing2"])
def test_local_steps_are_the_papers_loop(log_cosh, local_steps):
    """The server ends a round where the client's own model does; there is no ε."""
    records = log_cosh(30)
    client = AsyncClient(
        *(records, plan(), ClientPrivacy(math.inf, 0.0), None),
        run="trial",
        local_steps=local_steps,
    )
    x = torch.ones(SIZE, dtype=torch.float64)
    update = drive(client, 2, 2, x).tensor("update")
    end = plan().move(x, 2, update)
    t = plan().gradients_before(2)
    for h, (_, (record,)) in enumerate(records.asked):
        eta = STEPS(t + h) if local_steps == "diminishing1" else STEPS(t)
        x = x - eta * records.gradients(x, [record])[0]
    torch.testing.assert_close(end, x)
    assert len(records.asked) > 1 and "epsilon" not in client.facts


def test_a_tree_ends_where_the_flat_federation_does(log_cosh, tmp_path):
    """Two aggregators of two clients under one server; replies doubled, one aggregator restarted."""
    the_plan = plan(lag=1)
    flat = AsyncServer("trial", the_plan, start(), 4)
    make = factory(log_cosh, tmp_path / "flat", the_plan, seed=9)
    clients = [make(c) for c in range(4)]
    for _, c in itertools.product(range(ROUNDS), range(4)):
        flat.receive(c, clients[c].answer(flat.request(c)))
    server = AsyncServer("trial", the_plan, start(), 2)
    nodes = [Aggregator(2), Aggregator(2)]
    make = factory(log_cosh, tmp_path / "tree", the_plan, seed=9)
    leaves = [make(c) for c in range(4)]
    for step in range(ROUNDS):
        for n, node in enumerate(nodes):
            request = server.request(n)
            node.offer(request)
            child_request = node.request(0)
            reply = leaves[2 * n].answer(child_request)
            node.receive(0, reply)
            node.receive(0, reply)
            if step == 2:  # it dies with half of a round, and asks again
                nodes[n] = node = Aggregator(2)
                node.offer(request)
                node.receive(0, leaves[2 * n].answer(node.request(0)))
            if step == 3:
                saved, nodes[n] = node.state_dict(), Aggregator(2)
                node = nodes[n]
                node.load_state_dict(saved)
            assert node.reply is None and node.request(0) is None
            node.receive(1, leaves[2 * n + 1].answer(node.request(1)))
            node.offer(request)
            server.receive(n, node.reply)
            server.receive(n, node.reply)
    assert server.is_done
    torch.testing.assert_close(server.point, flat.point)


def test_a_child_that_lost_the_model_gets_it_from_above(log_cosh, tmp_path):
    the_plan = plan(lag=3)
    server, node = AsyncServer("trial", the_plan, start(), 1), Aggregator(1)
    make = factory(log_cosh, tmp_path, the_plan)
    server._applied = [1]  # as if it had done a round, and has the model
    server._known = [1]
    node.offer(server.request(0))
    node.receive(0, make(0).answer(node.request(0)))
    assert Message.from_bytes(node.reply).kind == "lost"
    server.receive(0, node.reply)
    node.offer(server.request(0))
    node.receive(0, make(0).answer(node.request(0)))
    server.receive(0, node.reply)
    assert server.applied == [2]
