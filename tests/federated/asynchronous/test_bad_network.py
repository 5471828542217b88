"""Asynchronous SGD under a bad network: each update once, bounded lag, no update lost."""

from __future__ import annotations

import math
import random

import pytest
import torch

from lightning_dp.accounting import PLDAccountant, PoissonGaussian
from lightning_dp.federated import AsyncPlan, AsyncServer, PolynomialSizes
from lightning_dp.federated.asynchronous import ConstantSteps
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import Message

ROUNDS, CLIENTS = 6, 3


@pytest.mark.parametrize(
    ("lag", "keep", "seed"),
    [(1, None, 0), (2, None, 1), (4, None, 2), (1, 3, 3), (2, 3, 4), (4, 3, 5)],
)
def test_each_update_is_applied_once_and_no_one_is_too_far_ahead(
    small, log_cosh, bad_network, tmp_path, lag, keep, seed
):
    server = small.Watched("trial", small.plan(lag, keep=keep), small.start(), CLIENTS)
    make = small.factory(log_cosh, tmp_path, server.plan)
    bad_network(server, make, CLIENTS, seed, look=server.check)
    assert len(server.updates) == ROUNDS * CLIENTS
    assert server.applied == [ROUNDS] * CLIENTS
    for c in range(CLIENTS):
        history = ReleaseLedger(tmp_path, f"client {c}").history()
        rates = [server.plan.sizes(i) / 30 for i in range(ROUNDS)]
        assert history == [(PoissonGaussian(2.0, q), 1) for q in rates]
        assert make(c).epsilon == PLDAccountant().epsilon(history, 1e-5)


def test_lags_of_more_than_one_happen(small, log_cosh, bad_network, tmp_path):
    """Else the tests above would test nothing."""
    server, seen = small.Watched("trial", small.plan(lag=4), small.start(), CLIENTS), set()
    bad_network(
        *(server, small.factory(log_cosh, tmp_path, server.plan), CLIENTS, 0),
        look=lambda: seen.add(max(server.applied) - server.round),
    )
    assert max(seen) == 4


def test_the_network_changes_nothing_when_rounds_are_synchronous(
    small, log_cosh, bad_network, tmp_path
):
    ends = []
    for seed, faults in ((0, 0.0), (1, 0.4), (2, 0.4)):
        server = AsyncServer("trial", small.plan(lag=1), small.start(), CLIENTS)
        make = small.factory(log_cosh, tmp_path / f"{seed}", server.plan, seed=50)
        bad_network(server, make, CLIENTS, seed, faults=faults)
        ends.append(server.point)
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(ends[2], ends[0], rtol=0, atol=1e-12)
    assert ends[0].norm() > 0.1


def test_without_noise_and_clipping_it_is_gradient_descent(small, log_cosh, bad_network, tmp_path):
    """All records in each batch, lag 1: x ← x - η Σ g over all clients."""
    full = AsyncPlan(5, PolynomialSizes(0, 30), ConstantSteps(0.01))
    server = AsyncServer("trial", full, small.start(), CLIENTS)
    make = small.factory(log_cosh, tmp_path, full, noise=0.0, privacy={"max_grad_norm": math.inf})
    bad_network(server, make, CLIENTS, 0)
    x = small.start()
    for _ in range(5):
        x = x - 0.01 * sum(log_cosh(30, seed=c).gradients(x, range(30)).sum(0) for c in range(3))
    torch.testing.assert_close(server.point, x)
    assert x.norm() > 0.5
    assert math.isinf(make(0).epsilon)


@pytest.mark.parametrize("lag", [1, 3])
def test_a_saved_server_goes_on_from_any_state(small, log_cosh, bad_network, tmp_path, lag):
    """Killed and restored again and again, between any two calls, it loses and doubles nothing."""
    rng = random.Random(1)
    holder = {"server": small.Watched("trial", small.plan(lag), small.start(), CLIENTS)}

    class Restored:
        def __getattr__(self, name):
            return getattr(holder["server"], name)

    def kill_and_restore():
        if rng.random() < 0.3:
            old = holder["server"]
            path = tmp_path / "server.pt"
            torch.save(old.state_dict(), path)
            new = small.Watched("trial", small.plan(lag), small.start(), CLIENTS)
            new.updates, new.over = old.updates, old.over
            new.load_state_dict(torch.load(path, weights_only=True))
            holder["server"] = new

    class Proxy(Restored):
        is_done = property(lambda self: holder["server"].is_done)

    bad_network(
        *(Proxy(), small.factory(log_cosh, tmp_path, small.plan(lag)), CLIENTS, 5),
        look=kill_and_restore,
    )
    assert len(holder["server"].updates) == ROUNDS * CLIENTS


def test_a_server_that_lost_its_latest_rounds_gets_the_same_updates_again(
    small, log_cosh, bad_network, tmp_path
):
    the_plan = small.plan(lag=2)
    make = small.factory(log_cosh, tmp_path, the_plan)
    server = small.Watched("trial", the_plan, small.start(), 2)
    saved = server.state_dict()
    for c, i in ((0, 0), (0, 1), (1, 0)):
        assert Message.from_bytes(server.request(c)).whole("round") == i
        server.receive(c, make(c).answer(server.request(c)))
    again = small.Watched("trial", the_plan, small.start(), 2)
    again.load_state_dict(saved)
    bad_network(again, make, 2, 0)
    for key, update in server.updates.items():
        assert torch.equal(again.updates[key], update)
