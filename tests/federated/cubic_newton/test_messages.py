"""DP-FCRN on a bad network, with processes that die, and over Flower."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_dp.accounting import PoissonGaussian
from lightning_dp.federated import AsyncServer
from lightning_dp.federated.cubic_newton import CubicNewtonClient
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import Message

EVENT = PoissonGaussian(0.8, 0.5)


def ask(server, client, number):
    return client.answer(server.request(number) or b"")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_order_and_repetition_change_nothing(federation, order):
    federation = federation.but(rounds=2)
    server, late = federation.server(), []
    clients = [federation.client(number) for number in range(3)]
    while not server.is_done:
        k = server.round
        for number in order:
            before = server.point
            reply = ask(server, clients[number], number)
            server.receive(number, reply)
            moved = server.point
            assert not torch.equal(before, moved)
            for old in [*late, (number, reply)]:
                server.receive(*old)
            assert torch.equal(server.point, moved)
            late.append((number, reply))
        assert server.round == k + 1
    again = replace(federation, folder=federation.folder / "again")
    torch.testing.assert_close(server.point, again.in_turn(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_a_bad_network_changes_neither_the_model_nor_the_ledgers(federation, bad_network, seed):
    run = federation.but(rounds=6)
    server = run.server()
    asked = bad_network(server, run.client, 3, seed, faults=0.4)
    assert asked > 18
    alone = replace(run, folder=run.folder / "alone")
    torch.testing.assert_close(server.point, alone.in_turn(), rtol=0, atol=1e-12)
    assert [run.ledger(c).history() for c in range(3)] == [[(EVENT, 6)]] * 3


def test_all_of_a_round_start_at_the_model_that_it_began_with(federation):
    server = federation.server()
    first = server.request(1)
    server.receive(0, ask(server, federation.client(0), 0))
    assert server.request(0) is None
    assert server.request(1) == first
    assert torch.equal(Message.from_bytes(first).tensor("model"), federation.start)
    assert not torch.equal(server.point, federation.start)


def test_server_and_clients_go_on_from_every_state(federation, tmp_path):
    server = federation.server()
    while not server.is_done:
        for number in range(3):
            reply = ask(server, federation.client(number), number)
            assert ask(server, federation.client(number), number) == reply
            server.receive(number, reply)
            torch.save(server.state_dict(), tmp_path / "server.pt")
            server = federation.server()
            server.load_state_dict(torch.load(tmp_path / "server.pt", weights_only=True))
    alone = replace(federation, folder=federation.folder / "alone")
    torch.testing.assert_close(server.point, alone.in_turn(), rtol=0, atol=1e-12)
    assert [federation.ledger(c).history() for c in range(3)] == [[(EVENT, 3)]] * 3


def test_a_state_of_another_plan_is_refused(federation):
    state = federation.server().state_dict()
    with pytest.raises(ValueError, match=r"plan differs.*inner_steps=5"):
        federation.but(inner_steps=5).server().load_state_dict(state)


# -- over Flower -----------------------------------------------------------------------------------


class Weights(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.x = nn.Parameter(start.clone())


def over_flower(run, folder, seed, faults):
    pytest.importorskip("flwr", reason="needs lightning-dp[federated]")
    from lightning_dp.federated.flower import client_app, server_app
    from lightning_dp.federated.flower.loopback import Faults, LoopbackGrid

    def of(context) -> int:
        return int(context.node_config["partition-id"])

    def protocol(context, name, records, ledger):
        number = of(context)
        return CubicNewtonClient(
            *(records, run.plan, ledger),
            **{"run": name, "client": number, "seed": run.seed + number, "target_delta": 1e-5},
            **{"noise_multiplier": run.noise_multiplier, "sample_rate": run.sample_rate},
            target_epsilon=math.inf,
        )

    client = client_app(
        lambda context: run.client(of(context)).records, protocol, folder / "ledgers"
    )
    server = server_app(
        lambda context: Weights(run.start),
        lambda context, name, start: AsyncServer(name, run.plan, start, 3),
        num_clients=3,
        folder=folder / "server",
        poll_interval=0.001,
        patience=20,
    )
    LoopbackGrid(client, 3, Faults(**faults), seed=seed).start(server)
    state = torch.load(folder / "server" / "model.pt", weights_only=True)
    return state["x"]


BAD = {"late": 0.4, "lost": 0.15, "undelivered": 0.1, "duplicated": 0.15, "restarted": 0.1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("seed", "faults"), [(0, {}), (1, BAD), (2, BAD)])
def test_over_flower_it_ends_at_the_same_model(federation, tmp_path, seed, faults):
    end = over_flower(federation, tmp_path, seed, faults)
    torch.testing.assert_close(end, federation.in_turn(), rtol=0, atol=1e-12)
    for client in range(3):
        found = ReleaseLedger(tmp_path / "ledgers", f"client-{client}").history()
        assert Counter(dict(found)) == Counter({EVENT: 3})
