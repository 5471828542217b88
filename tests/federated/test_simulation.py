"""The planning simulation agrees with the state machine, event by event."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import simulate_async as simulation
import torch

from lightning_dp.federated import AsyncPlan, AsyncServer, PolynomialSizes
from lightning_dp.federated.asynchronous import InverseSteps, rounds_for
from lightning_dp.federated.protocol import Message


@pytest.fixture(autouse=True)
def few_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "GRADIENTS", 300)


def by_events(world, sizes, lag: int, rounds: int) -> float:
    """The server machine, fed in the order of a virtual clock; the time of the last update."""
    n = world.num_clients
    plan = AsyncPlan(rounds, sizes, InverseSteps(1e-3), lag=lag)
    server = AsyncServer("trial", plan, torch.zeros(1), n)
    speeds, events, now = world.speeds(), [], 0.0
    free = world.latencies(0, 0)
    heard = {0: np.zeros(n)}  # when each client hears that k rounds are over
    waiting: dict[int, int] = dict.fromkeys(range(n), 0)
    held: set[tuple[int, int]] = set()

    def let_go():
        for c, i in list(waiting.items()):
            if i < min(rounds, server.round + lag):
                begin = max(free[c], heard[i - lag + 1][c] if i >= lag else 0.0)
                free[c] = begin + sizes(i) * speeds[c] + world.stalls(i)[c]
                heapq.heappush(events, (free[c] + world.latencies(i, 1)[c], c, i))
                waiting.pop(c)
                if i + 1 < rounds:
                    waiting[c] = i + 1

    let_go()
    while events:
        now, c, i = heapq.heappop(events)
        k = server.round
        held.add((c, i))  # the simulation lets updates of one client overtake each other
        while (c, server.applied[c]) in held:
            facts = {"round": server.applied[c]}
            server.receive(c, Message("update", facts, {"update": torch.ones(1)}).to_bytes())
        for over in range(k + 1, server.round + 1):
            heard[over] = now + world.latencies(over, 0)
        for _ in range(rounds):
            let_go()
    assert server.is_done
    return now


@pytest.mark.parametrize("lag", [1, 2, 5])
@pytest.mark.parametrize("sizes", [PolynomialSizes(0, 30), PolynomialSizes(5, 10)])
def test_the_times_are_those_of_the_state_machine(lag, sizes):
    world = simulation.World(num_clients=7, stall=0.3, stall_length=20.0, seed=lag)
    rounds = rounds_for(sizes, 300)
    outcome = simulation.asynchronous(world, sizes, lag)
    assert outcome.rounds == rounds
    assert outcome.seconds == pytest.approx(by_events(world, sizes, lag, rounds), rel=1e-12)
