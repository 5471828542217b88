"""A data set whose sums are short to write down, and a bad network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lightning_dp.boundary import BoundedSum, Query, bounded_sum
from lightning_dp.federated.protocol import AbstractClient, AbstractServer
from lightning_dp.gradients.materialised import MaterialisedGradients

SIZE = 4


class LogCosh:
    """Records of the loss log cosh(x·w - y), in float64; remembers what it was asked."""

    unit = "record"

    def __init__(self, num_records: int = 30, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_records, SIZE, generator=generator, dtype=torch.float64)
        self.y = self.x @ torch.arange(1.0, SIZE + 1, dtype=torch.float64) + 0.3
        self.asked: list[tuple[Query, list[int]]] = []

    @property
    def num_records(self) -> int:
        return len(self.y)

    def gradients(self, point: Tensor, records: Sequence[int]) -> Tensor:
        x, y = self.x[list(records)], self.y[list(records)]
        return torch.tanh(x @ point - y).unsqueeze(1) * x

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        self.asked.append((query, list(records)))
        zeros = torch.zeros(len(records), SIZE, dtype=torch.float64)
        rows = zeros + sum(t.weight * self.gradients(t.point, records) for t in query.terms)
        if query.coordinates is not None:
            rows = rows[:, query.coordinates]
        here = [torch.zeros(rows.shape[1], dtype=torch.float64)]
        return bounded_sum(MaterialisedGradients(here, [rows], 1.0), query.clip_norm)


def through_a_bad_network(
    server: AbstractServer,
    make_client: Callable[[int], AbstractClient],
    num_clients: int,
    seed: int,
    *,
    look: Callable[[], None] = lambda: None,
    faults: float = 0.2,
) -> int:
    """Run to the end; messages are lost, late, doubled, re-ordered, and clients restart.

    At most one request is in flight per client, but a client may get it twice and replies of all
    ages come back. Returns how often a client was asked.
    """
    rng = random.Random(seed)
    clients = {c: make_client(c) for c in range(num_clients)}
    under_way: list[tuple[int, bytes]] = []
    old: list[tuple[int, bytes]] = []
    asked = 0
    for _ in range(200_000):
        if server.is_done:
            return asked
        look()
        client = rng.choices(range(num_clients), [4**c for c in range(num_clients)])[0]  # 0 is slow
        if rng.random() < 0.6 and all(c != client for c, _ in under_way):
            request = server.request(client)
            if request is None or rng.random() < faults:  # nothing to do, or lost on the way
                continue
            assert server.request(client) == request
            if rng.random() < faults:
                clients[client] = make_client(client)  # it died and came back
            reply = clients[client].answer(request)
            asked += 1
            if rng.random() < faults:
                assert clients[client].answer(request) == reply  # delivered twice
            if rng.random() < faults:
                old.append((client, reply))  # late: the server will ask again
            else:
                under_way.append((client, reply))
        elif under_way and rng.random() < 0.7:
            client, reply = under_way.pop(rng.randrange(len(under_way)))
            server.receive(client, reply)
            if rng.random() < faults:
                old.append((client, reply))
        elif old:
            client, reply = rng.choice(old)
            server.receive(client, reply)
    raise AssertionError("it never ended")


@pytest.fixture
def log_cosh() -> type[LogCosh]:
    return LogCosh


@pytest.fixture
def bad_network() -> Callable[..., int]:
    return through_a_bad_network
