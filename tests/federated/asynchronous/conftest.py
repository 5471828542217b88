"""A small plan, clients that can be made again, and a server that is watched."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
)
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import Message

SIZE, ROUNDS = 4, 6
STEPS = InverseSteps(0.05, beta=0.01)


def plan(lag=1, rounds=ROUNDS, **changes) -> AsyncPlan:
    return AsyncPlan(rounds, PolynomialSizes(1.5, 3), STEPS, lag=lag, **changes)


def start() -> torch.Tensor:
    return torch.zeros(SIZE, dtype=torch.float64)


def factory(log_cosh, folder, the_plan, noise=2.0, **changes):
    """Makes client c again, on the ledger that it had."""
    privacy = {"max_grad_norm": 1.0, "noise_multiplier": noise, "target_epsilon": math.inf}
    privacy |= changes.pop("privacy", {})

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


def drive(client: AsyncClient, i: int, k: int, model=None) -> Message:
    facts = {"run": "trial", "round": i, "counter": k}
    tensors = {} if model is None else {"model": model}
    return Message.from_bytes(client.answer(Message("round", facts, tensors).to_bytes()))


@pytest.fixture
def small() -> SimpleNamespace:
    """What these tests share."""
    return SimpleNamespace(plan=plan, start=start, factory=factory, drive=drive, Watched=Watched)
