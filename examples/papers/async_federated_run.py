"""A federation in one process for the experiments of async_federated.py, and data dealt out to it."""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from async_federated_data import (
    TWO_DIGITS,
    LeNetRecords,
    LogisticRecords,
    binary,
    lenet,
    load,
    mnist,
)
from scratch_ledger import ScratchLedger
from sklearn.metrics import roc_auc_score
from torch import Tensor

from lightning_dp import Query, Term
from lightning_dp._noise import NoiseSource
from lightning_dp.federated import AsyncClient, AsyncPlan, AsyncServer, ClientPrivacy
from lightning_dp.federated.asynchronous import SampleSizes, StepSizes, rounds_for
from lightning_dp.federated.client import draw
from lightning_dp.federated.protocol import Records
from lightning_dp.functional import flatten

CLIENTS, MNIST_CLIENTS = 5, 4
GRADIENTS = 20_000  # K of the experiments without privacy, over all clients
LAG = 1  # 2 is in the part `lag`
TEST_SHARE = 0.2
LOSSES = {"strongly-convex": True, "convex": False}


@dataclass(eq=False, repr=False)
class WalkingClient(AsyncClient):
    """The paper's loop, without privacy: ŵ ← ŵ - η g after each record of a batch.

    Args:
        local_steps: η is η_t for each ("diminishing1") or the round's η̄_i ("diminishing2").
    """

    local_steps: str = "diminishing1"

    def update(
        self, i: int, point: Tensor, rng: np.random.Generator, source: NoiseSource
    ) -> Tensor:
        """U such that ŵ - η̄_i U is where the loop ends."""
        plan, each_round = self.plan, self.plan.step_size(i)
        total = torch.zeros_like(point)
        batch = draw(self.records, self.share * plan.sizes(i) / self.records.num_records, rng)
        for h, record in enumerate(rng.permutation(batch).tolist()):
            eta = each_round
            if self.local_steps == "diminishing1":
                eta = plan.steps(plan.gradients_before(i) + h)
            query = Query((Term(1.0, point),), math.inf, 0.0)
            step = self.records.bounded_sum(query, [record]).value * (eta / each_round)
            point, total = plan.move(point, i, step), total + step
        return total


@dataclass(frozen=True)
class LogSizes:
    """s_i = ⌈a (i + 2) / ln(i + 2)⌉: i / ln i, from where it is defined."""

    a: float

    def __call__(self, i: int) -> int:
        return math.ceil(self.a * (i + 2) / math.log(i + 2))


def federate(
    records: Sequence[Records],
    start: Tensor,
    plan: AsyncPlan,
    privacy: ClientPrivacy,
    seed: int,
    local_steps: str | None = None,
    share: float = 1.0,
) -> tuple[Tensor, float]:
    """The model at the end and the largest ε of a client; clients answer in a random order."""
    server = AsyncServer("paper", plan, start, len(records))
    make = AsyncClient if local_steps is None else partial(WalkingClient, local_steps=local_steps)
    clients = []
    for number, each in enumerate(records, len(records) * seed):
        own = replace(privacy, seed=number)
        clients.append(make(each, plan, own, ScratchLedger(), run="paper", share=share))
    rng = random.Random(seed)
    while not server.is_done:
        c = rng.randrange(len(records))
        if (request := server.request(c)) is not None:
            server.receive(c, clients[c].answer(request))
    spent = max(client.epsilon for client in clients)
    return server.point, spent


def strongly_convex(options: argparse.Namespace) -> list[bool]:
    """Return, for each of the losses that were asked for, whether it is strongly convex."""
    return [LOSSES[name] for name in options.loss]


# -- logistic regression ---------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """A data set dealt out to clients, and the rest for testing."""

    clients: list[tuple[Tensor, Tensor]]
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, name: str, folder: str, seed: int, *, biased: bool = False) -> Split:
        x, y = binary(name, folder)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(y)))
        held, train = order[: int(TEST_SHARE * len(y))], order[int(TEST_SHARE * len(y)) :]
        if biased:
            train = train[torch.argsort(y[train], stable=True)]
        parts = train.chunk(clients_of(name))
        if biased and name == TWO_DIGITS:  # the digits are not equally many
            parts = train.split([int((y[train] == digit).sum()) for digit in (-1, 1)])
        return cls([(x[part], y[part]) for part in parts], x[held], y[held])

    def records(self, *, strongly_convex: bool) -> list[LogisticRecords]:
        decay = 1 / sum(len(y) for _, y in self.clients) if strongly_convex else 0.0
        return [LogisticRecords(x, y, decay) for x, y in self.clients]

    def start(self) -> Tensor:
        return torch.zeros(self.x.shape[1])

    def accuracy(self, point: Tensor) -> float:
        return float(((self.x @ point > 0) == (self.y > 0)).float().mean())

    def auc(self, point: Tensor) -> float:
        return float(roc_auc_score(self.y.numpy() > 0, (self.x @ point).numpy()))


def clients_of(name: str) -> int:
    """Return how many clients a data set is dealt out to."""
    return 2 if name == TWO_DIGITS else CLIENTS


NO_PRIVACY = ClientPrivacy(math.inf, 0.0, target_epsilon=math.inf)


def plain_run(
    name: str,
    folder: str,
    sizes: SampleSizes,
    steps: StepSizes,
    local_steps: str,
    strongly_convex: bool,
    gradients: int,
    lag: int,
    biased: bool,
    seed: int,
) -> tuple[float, float]:
    """Accuracy and AUC without privacy: the model moves inside a round, as in the paper.

    ``sizes`` are those of all clients together, as is t in the step sizes.
    """
    split = Split.of(name, folder, seed, biased=biased)
    plan = AsyncPlan(rounds_for(sizes, gradients), sizes, steps, lag=lag)
    records = split.records(strongly_convex=strongly_convex)
    share = 1 / clients_of(name)
    point, _ = federate(records, split.start(), plan, NO_PRIVACY, seed, local_steps, share)
    return split.accuracy(point), split.auc(point)


# -- LeNet -----------------------------------------------------------------------------------


def lenet_run(
    folder: str,
    clients: int,
    sizes: SampleSizes,
    steps: StepSizes,
    biased: bool,
    gradients: int,
    seed: int,
) -> float:
    """Accuracy on the test set; biased clients have digits in order, ten of them one digit each."""
    images, digits, *test = mnist(folder)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(digits)))
    if biased:
        order = order[torch.argsort(digits[order], stable=True)]
    records = [LeNetRecords(images[part], digits[part]) for part in order.chunk(clients)]
    plan = AsyncPlan(rounds_for(sizes, gradients), sizes, steps, lag=LAG)
    start = flatten(list(lenet().parameters()))
    point, _ = federate(records, start, plan, NO_PRIVACY, seed, "diminishing2", 1 / clients)
    return right(point, *test)


@torch.no_grad()
def right(point: Tensor, images: Tensor, digits: Tensor) -> float:
    """The share of the digits that LeNet with these weights gets right."""
    model = lenet()
    load(list(model.parameters()), point)
    return float((model(images).argmax(1) == digits).float().mean())
