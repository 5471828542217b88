"""The asynchronous client: one noised sum of one model in a round, sent once, within its budget."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_dp._noise import NoiseSource
from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
)
from lightning_dp.federated.asynchronous import ConstantSteps, InverseSteps
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import Message

SIZE, CLIENTS = 4, 3
STEPS = InverseSteps(0.05, beta=0.01)


def test_between_models_a_client_moves_as_the_server_does(small, log_cosh, tmp_path):
    """The noise is in the local step too, with the server's sign: ŵ ← ŵ - η̄ U."""
    records = log_cosh(30)
    privacy = ClientPrivacy(1.0, 2.0, math.inf)
    ledger = ReleaseLedger(tmp_path, "client")
    client = AsyncClient(records, small.plan(lag=3), privacy, ledger, run="trial")
    point = torch.ones(SIZE, dtype=torch.float64)
    for i in range(3):
        update = small.drive(client, i, 0, point if i == 0 else None).tensor("update")
        asked = records.asked[-1][0].terms[0].point
        torch.testing.assert_close(asked, point)
        point = point - small.plan().step_size(i) * update
    fresh = torch.full((SIZE,), 7.0, dtype=torch.float64)
    small.drive(client, 3, 1, fresh)
    assert torch.equal(records.asked[-1][0].terms[0].point, fresh)


def test_one_noisy_sum_of_one_model_is_what_leaves(small, log_cosh, tmp_path):
    """2500 rounds of one record: mean q clip(g), variance q(1-q) clip² + z² C²; not a factor off."""
    records, rounds = log_cosh(1), 2500
    many = AsyncPlan(rounds, PolynomialSizes(0, 1), ConstantSteps(1e-9))
    privacy = ClientPrivacy(0.5, 3.0, math.inf)
    ledger = ReleaseLedger(tmp_path, "client")
    client = AsyncClient(records, many, privacy, ledger, run="trial", share=0.5)
    # Straight to what is made in a round: 2500 rounds through the disk take a minute.
    rng, source = np.random.default_rng(0), NoiseSource()
    facts = {"run": "trial", "round": 0, "counter": 0}
    asked = client._rounds.read(Message("round", facts, {"model": small.start()}), lambda: None)
    sums = torch.stack([asked.make(rng, source).tensor("update") for _ in range(rounds)])
    gradient = records.gradients(small.start(), [0])[0]
    clipped = gradient * min(1.0, 0.5 / float(gradient.norm()))
    spread = math.sqrt((1.5**2 + 0.25 * 0.25) / rounds)
    assert float((sums.mean(0) - 0.5 * clipped).abs().max()) < 5 * spread
    assert sums.var(0).mean() == pytest.approx(
        1.5**2 + 0.25 * float(clipped**2 @ torch.ones(4).double()) / 4, rel=0.08
    )
    assert all(query.clip_norm == 0.5 for query, _ in records.asked)


def test_a_process_for_every_message_is_one_client(small, log_cosh, tmp_path):
    """Lag 3 and one model: each new process goes on from ŵ of the one before."""
    same = small.factory(log_cosh, tmp_path / "same", small.plan(lag=3), seed=1)(0)
    make = small.factory(log_cosh, tmp_path / "new", small.plan(lag=3), seed=1)
    for i in range(3):
        model = small.start() + 1 if i == 0 else None
        expected = small.drive(same, i, 0, model)
        found = small.drive(make(0), i, 0, model)
        assert found.kind == "update"
        torch.testing.assert_close(found.tensor("update"), expected.tensor("update"))


def test_a_client_whose_latest_release_is_not_of_the_round_before_has_lost_the_model(
    small, log_cosh, tmp_path
):
    """Its own model would lack what it did meanwhile, by another ledger."""
    client = small.factory(log_cosh, tmp_path, small.plan(lag=4))(0)
    assert small.drive(client, 0, 0).kind == "lost"
    assert small.drive(client, 0, 0, small.start()).kind == "update"
    assert small.drive(client, 2, 0).kind == "lost"
    assert [small.drive(client, i, 0).kind for i in (1, 2)] == ["update", "update"]


def test_asked_again_the_same_bytes_come_also_from_a_new_process(small, log_cosh, tmp_path):
    make = small.factory(log_cosh, tmp_path, small.plan(lag=2))
    facts = {"run": "trial", "round": 0, "counter": 0}
    request = Message("round", facts, {"model": small.start()}).to_bytes()
    first = make(0)
    reply = first.answer(request)
    assert first.answer(request) == reply
    assert make(0).answer(request) == reply
    assert make(0).answer(Message("round", facts).to_bytes()) == reply
    second = small.drive(first, 1, 0).to_bytes()
    assert make(0).answer(request) == reply  # lag 2: the server may have gone back one round
    assert make(0).answer(Message("round", {**facts, "round": 1}).to_bytes()) == second
    assert sum(n for _, n in ReleaseLedger(tmp_path, "client 0").history()) == 2
    other = ReleaseLedger(tmp_path, "client 1").history()
    assert other == []


def test_a_budget_ends_before_the_round_that_would_exceed_it(
    small, log_cosh, bad_network, tmp_path
):
    """The client leaves, the others go on; ε is below the target and one more round is above."""
    the_plan = small.plan(lag=2, rounds=12)
    events = [PoissonGaussian(2.0, the_plan.sizes(i) / 30) for i in range(12)]
    target = PLDAccountant().epsilon([(e, 1) for e in events[:5]], 1e-5) * 1.001

    def make(c):
        budget = {"target_epsilon": target} if c == 1 else {}
        return small.factory(log_cosh, tmp_path, the_plan, privacy=budget)(c)

    server = AsyncServer("trial", the_plan, small.start(), CLIENTS)
    bad_network(server, make, CLIENTS, 3)
    assert server.applied == [12, 5, 12]
    assert make(1).epsilon <= target
    assert PLDAccountant().epsilon([(e, 1) for e in events[:6]], 1e-5) > target


def test_no_client_with_budget_ends_the_run(small, log_cosh, bad_network, tmp_path):
    server = AsyncServer("trial", small.plan(), small.start(), 2)
    make = small.factory(log_cosh, tmp_path, small.plan(), privacy={"target_epsilon": 1e-6})
    bad_network(server, make, 2, 0)
    assert (server.applied, server.reason) == ([0, 0], "no client has budget left")
    assert ReleaseLedger(tmp_path, "client 0").history() == []


def test_shares_scale_the_batches(small, log_cosh, tmp_path):
    ledger = ReleaseLedger(tmp_path, "client")
    privacy = ClientPrivacy(1.0, lambda i: 2.0 + i, math.inf)
    client = AsyncClient(log_cosh(30), small.plan(), privacy, ledger, run="trial", share=0.5)
    for i in range(2):
        small.drive(client, i, i, small.start())
    assert ledger.history() == [
        (PoissonGaussian(2.0, 0.05), 1),
        (PoissonGaussian(3.0, 2.5 / 30), 1),
    ]


@pytest.mark.parametrize("local_steps", ["diminishing1", "diminishing2"])
def test_local_steps_are_the_papers_loop(small, log_cosh, local_steps):
    """The server ends a round where the client's own model does; there is no ε."""
    records = log_cosh(30)
    client = AsyncClient(
        *(records, small.plan(), ClientPrivacy(math.inf, 0.0, math.inf, seed=1), None),
        run="trial",
        local_steps=local_steps,
    )
    x = torch.ones(SIZE, dtype=torch.float64)
    update = small.drive(client, 2, 2, x).tensor("update")
    end = small.plan().move(x, 2, update)
    t = small.plan().gradients_before(2)
    for h, (_, (record,)) in enumerate(records.asked):
        eta = STEPS(t + h) if local_steps == "diminishing1" else STEPS(t)
        x = x - eta * records.gradients(x, [record])[0]
    torch.testing.assert_close(end, x)
    assert len(records.asked) > 1 and "epsilon" not in client.facts
