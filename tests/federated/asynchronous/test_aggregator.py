"""A tree of aggregators ends where the flat federation does."""

from __future__ import annotations

import itertools

import torch

from lightning_dp.federated import AsyncServer
from lightning_dp.federated.asynchronous import Aggregator
from lightning_dp.federated.messages import Message

ROUNDS = 6


def test_a_tree_ends_where_the_flat_federation_does(small, log_cosh, tmp_path):
    """Two aggregators of two clients under one server; replies doubled, one aggregator restarted."""
    the_plan = small.plan(lag=1)
    flat = AsyncServer("trial", the_plan, small.start(), 4)
    make = small.factory(log_cosh, tmp_path / "flat", the_plan, seed=9)
    clients = [make(c) for c in range(4)]
    for _, c in itertools.product(range(ROUNDS), range(4)):
        flat.receive(c, clients[c].answer(flat.request(c)))
    server = AsyncServer("trial", the_plan, small.start(), 2)
    nodes = [Aggregator(2), Aggregator(2)]
    make = small.factory(log_cosh, tmp_path / "tree", the_plan, seed=9)
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


def test_a_child_that_lost_the_model_gets_it_from_above(small, log_cosh, tmp_path):
    the_plan = small.plan(lag=3)
    server, node = AsyncServer("trial", the_plan, small.start(), 1), Aggregator(1)
    make = small.factory(log_cosh, tmp_path, the_plan)
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
