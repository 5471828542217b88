"""Asynchronous SGD: bounded lag, each update once, one noised sum of one model, plans and sequences."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_dp.accounting import PoissonGaussian
from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
)
from lightning_dp.federated.asynchronous import InverseSteps, rounds_for
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import Message, MessageError
from tests.federated.zoo import (
    CLIENTS,
    RECORDS,
    ROUNDS,
    SIZE,
    LogCosh,
    Z,
    asynchronous,
    history,
    through_a_bad_network,
)

STEPS = InverseSteps(0.05, beta=0.01)
START = torch.zeros(SIZE, dtype=torch.float64)


def plan(lag: int = 1, rounds: int = ROUNDS, **changes) -> AsyncPlan:
    return AsyncPlan(rounds, PolynomialSizes(1.5, 3), STEPS, lag=lag, **changes)


def client(folder, the_plan: AsyncPlan, noise=Z, share=1.0, seed=None) -> AsyncClient:
    privacy = ClientPrivacy(1.0, noise, math.inf, seed=seed)
    ledger = ReleaseLedger(folder, "data")
    return AsyncClient(LogCosh(), the_plan, privacy, ledger, run="trial", share=share)


def drive(client: AsyncClient, i: int, model=START) -> Message:
    facts = {"run": "trial", "round": i}
    return Message.from_bytes(client.answer(Message("round", facts, {"model": model}).to_bytes()))


@pytest.mark.parametrize("clip_norm", [math.inf, 1e-20, 1e20])
def test_a_clip_norm_that_bounds_nothing_is_refused_before_a_round(tmp_path, clip_norm):
    privacy = ClientPrivacy(clip_norm, lambda i: float(i), math.inf)
    with pytest.raises(ValueError, match=r"max_grad_norm=1\.0|finite max_grad_norm"):
        AsyncClient(LogCosh(), plan(), privacy, ReleaseLedger(tmp_path, "data"), run="trial")


class Watched(AsyncServer):
    """Writes down every update that changed the model, and checks what must hold at any time."""

    def __post_init__(self):
        super().__post_init__()
        self.updates, self.furthest = {}, 0
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
        expected = self.start
        for (i, _), update in self.updates.items():
            expected = self.plan.move(expected, i, update)
        torch.testing.assert_close(self.point, expected)
        k, lag = self.round, self.plan.lag
        assert all((i, c) in self.updates for i in range(k) for c in range(self.num_clients))
        assert all(n <= k + lag for n in self.applied)
        self.furthest = max(self.furthest, max(self.applied) - k)
        for c in range(self.num_clients):
            if (request := self.request(c)) is None:
                continue
            message = Message.from_bytes(request)
            i = message.whole("round")
            assert i == self.applied[c] < k + lag
            model = self.over[k] if i == k else self.point  # has all of this client's updates
            assert torch.equal(message.tensors["model"], model)


@pytest.mark.parametrize(("lag", "keep", "seed"), [(1, None, 0), (2, 3, 4), (4, None, 2)])
def test_each_update_is_applied_once_and_no_one_is_too_far_ahead(tmp_path, lag, keep, seed):
    the_plan = plan(lag, keep=keep)
    server = Watched("trial", the_plan, START, CLIENTS)
    make = asynchronous(the_plan).clients(tmp_path, seed=None)
    through_a_bad_network(server, make, seed, look=server.check)
    assert len(server.updates) == ROUNDS * CLIENTS and server.furthest == lag
    rates = [the_plan.sizes(i) / RECORDS for i in range(ROUNDS)]
    for c in range(CLIENTS):
        assert history(tmp_path, f"client-{c}") == [(PoissonGaussian(Z, q), 1) for q in rates]


def test_a_server_that_goes_on_has_the_precision_of_its_state(tmp_path):
    the_plan = plan(lag=2)
    one = AsyncServer("trial", the_plan, START + 0.1, 2)
    other = AsyncServer("trial", the_plan, START.float(), 2)  # it only says how many there are
    other.load_state_dict(one.state_dict())
    make = asynchronous(the_plan).clients(tmp_path)
    for c in (0, 0, 1, 1):
        request = one.request(c)
        assert other.request(c) == request
        reply = make(c).answer(request)
        assert one.receive(c, reply) and other.receive(c, reply)
        torch.testing.assert_close(other.point, one.point, rtol=0, atol=0)


# -- the client --------------------------------------------------------------------------------


def test_shares_scale_the_batches_and_noise_may_depend_on_the_round(tmp_path):
    one = client(tmp_path, plan(), noise=lambda i: 2.0 + i, share=0.5)
    for i in range(2):
        drive(one, i)
    assert history(tmp_path) == [
        (PoissonGaussian(2.0, 0.05), 1),
        (PoissonGaussian(3.0, 2.5 / 30), 1),
    ]


# -- plans and sequences -----------------------------------------------------------------------


def test_noise_and_batches_are_those_that_were_charged_whatever_a_function_gives_later(tmp_path):
    """Of functions that give less noise, and more records, each time that they are asked."""
    asked = []

    class Seen(LogCosh):
        def bounded_sum(self, query, records):
            asked.append(query.noise_multiplier)
            return super().bounded_sum(query, records)

    def noise(i):
        noise.left = max(noise.left / 2, 0.01)
        return noise.left

    def sizes(i):
        sizes.now = min(sizes.now + 1, RECORDS)
        return sizes.now

    noise.left, sizes.now = 64.0, 1
    ledger, privacy = ReleaseLedger(tmp_path, "data"), ClientPrivacy(1.0, noise, math.inf)
    impure = AsyncClient(Seen(), AsyncPlan(2, sizes, STEPS), privacy, ledger, run="trial")
    for i in range(2):
        drive(impure, i)
    assert [event.noise_multiplier for event, _ in ledger.history()] == asked == [32.0, 16.0]


def test_the_papers_sequences_have_the_papers_rounds():
    """Examples 3 and E.2.1: 183 rounds of 16 + ⌈1.322 i⌉, 1563 of 16; 80 of 5 x 50; 20 of 5 x 200."""
    assert rounds_for(PolynomialSizes(1.322, 16), 25_000) == 183
    sizes = {16: 25_000, 50: 4000, 100: 4000, 200: 4000, 500: 4000, 700: 4000, 1000: 4000}
    found = [rounds_for(PolynomialSizes(0, s), total) for s, total in sizes.items()]
    assert found == [1563, 80, 40, 20, 8, 6, 4]
    assert PolynomialSizes(50, c=0.5, first=1)(7) == math.ceil(50 * math.sqrt(8))


@pytest.mark.parametrize("keep", [None, 1])
def test_an_update_that_could_leave_the_range_of_the_dtype_changes_nothing(keep):
    steps = InverseSteps(1e21)
    agreed = AsyncPlan(2, PolynomialSizes(0, 8), steps, keep=keep)
    server = AsyncServer("trial", agreed, torch.ones(2), 3)
    update = torch.ones(keep or 2)

    def receive(c: int, value: float) -> bool:
        return server.receive(
            c, Message("update", {"round": 0}, {"update": value * update}).to_bytes()
        )

    assert receive(0, 4e16) and bool(torch.isfinite(server.point).all())
    before = server.point
    with pytest.raises(MessageError, match="may not be finite"):
        receive(1, 4e17)
    assert torch.equal(server.point, before) and server.applied == [1, 0, 0]
    assert receive(1, 4e10)


def test_a_client_does_no_round_that_it_may_not_do_yet():
    server = AsyncServer("trial", plan(rounds=2), START, 2)

    def receive(c: int, i: int, value=0.1) -> bool:
        update = Message("update", {"round": i}, {"update": START + value})
        return server.receive(c, update.to_bytes())

    for bad, match in (
        ((0, 1), "round 1, which it was not asked for"),
        ((0, 0, 1e305), "not finite"),
    ):
        with pytest.raises(MessageError, match=match):
            receive(*bad)
    assert receive(0, 0) and not receive(0, 0)  # it came twice
    assert receive(1, 0) and server.applied == [1, 1] and not server.is_done
