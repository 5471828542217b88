"""A small federation of logistic regressions, and the same in NumPy with dense Hessians."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_dp import CubicNewton
from lightning_dp._noise import random_generator
from lightning_dp.boundary import BoundedSum, Query, bounded_sum
from lightning_dp.federated import AsyncServer
from lightning_dp.federated.cubic_newton import CubicNewtonClient, CubicNewtonPlan
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.gradients.materialised import MaterialisedGradients
from lightning_dp.sparsify import shared_mask
from tests.normal_values import NormalValues

CLIENTS, RECORDS, SIZE = 3, 12, 5
START = torch.linspace(-0.5, 0.5, SIZE, dtype=torch.float64)
NEWTON = CubicNewton(
    strong_convexity=0.1,
    hessian_lipschitz=0.7,
    inner_steps=4,
    max_grad_norm=0.5,
    max_hessian_norm=0.3,
    keep=3,
    mask_seed=17,
    box=1.5,
    weight_decay=0.02,
    max_step_size=1.5,
)
PLAN = CubicNewtonPlan(NEWTON, clients=CLIENTS, rounds=3, step_scale=0.7)


def data(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(RECORDS, SIZE, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).double()


class Logistic:
    """The answer of each record, by automatic differentiation."""

    unit = "record"
    num_records = RECORDS

    def __init__(self, client: int) -> None:
        self.x, self.y = data(client)
        self.asked: list[list[int]] = []

    def bounded_sum(self, query: Query, records: Sequence[int]) -> BoundedSum:
        self.asked.append(list(records))
        if not records:
            size = SIZE if query.coordinates is None else len(query.coordinates)
            return BoundedSum(torch.zeros(size, dtype=torch.float64), query.clip_norm)
        places = torch.as_tensor(list(records))
        return summed(query, rows_of(query, self.x[places], self.y[places]))


def rows_of(query: Query, x: Tensor, y: Tensor) -> Tensor:
    """(records, d)."""
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    gradient = torch.func.grad(lambda point, x, y: loss(x @ point, y))

    def of_record(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(SIZE, dtype=torch.float64)
        for term in query.terms:

            def there(point: Tensor) -> Tensor:
                return gradient(point, x, y)

            part = there(term.point)
            if term.direction is not None:
                part = torch.func.jvp(there, (term.point,), (term.direction,))[1]
            total = total + term.weight * part
        return total

    return torch.func.vmap(of_record)(x, y)


def summed(query: Query, rows: Tensor) -> BoundedSum:
    kept = rows if query.coordinates is None else rows[:, query.coordinates]
    return bounded_sum(MaterialisedGradients([kept[:0].sum(0)], [kept], 1.0), query.clip_norm)


@dataclass(frozen=True)
class Federation:
    """A plan, what all clients choose, and where their ledgers are."""

    folder: Path
    plan: CubicNewtonPlan = PLAN
    noise_multiplier: float = 0.8
    sample_rate: float = 0.5
    seed: int | None = 5
    privacy: dict[str, Any] = field(default_factory=dict)
    start: Tensor = START

    def but(self, **changes: Any) -> Federation:
        """With other arguments of the federation, its plan or its estimator."""
        newton = {k: changes.pop(k) for k in [*changes] if hasattr(NEWTON, k)}
        plan = {k: changes.pop(k) for k in [*changes] if hasattr(PLAN, k)}
        estimator = plan.pop("newton", self.plan.newton)
        plan = replace(self.plan, newton=replace(estimator, **newton), **plan)
        return replace(self, plan=plan, **changes)

    def ledger(self, client: int) -> ReleaseLedger:
        return ReleaseLedger(self.folder, f"client {client}")

    def client(self, client: int, records: Any = None) -> CubicNewtonClient:
        """Made again, on the ledger that it had."""
        seed = None if self.seed is None else self.seed + client
        return CubicNewtonClient(
            *(records or Logistic(client), self.plan, self.ledger(client)),
            run="trial",
            client=client,
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            seed=seed,
            **{"target_epsilon": math.inf, "target_delta": 1e-5, **self.privacy},
        )

    def server(self) -> AsyncServer:
        return AsyncServer("trial", self.plan, self.start, self.plan.clients)

    def in_turn(self) -> Tensor:
        """The model at the end, on a good network."""
        server = self.server()
        clients = [self.client(number) for number in range(self.plan.clients)]
        while not server.is_done:
            for number, client in enumerate(clients):
                server.receive(number, client.answer(server.request(number) or b""))
        return server.point

    def by_hand(self) -> Any:
        """Algorithms 1 and 2 and the rules for noise, with dense Hessians."""
        plan, x = self.plan, START.numpy().copy()
        for t in range(plan.rounds):
            moves = np.zeros(SIZE)
            for i in range(plan.clients):
                newton = plan.newton
                mask = shared_mask(newton.mask_seed + i, t, SIZE, newton.kept(SIZE)).numpy()
                c = np.arange(SIZE) if plan.whole_steps else mask
                moved = np.zeros(SIZE)
                moved[c] = self._round_by_hand(i, t, x, c)
                moves[mask] += SIZE / len(mask) * moved[mask]
            x = x + plan.step_scale * moves / plan.clients
        return x

    def _round_by_hand(self, i: int, t: int, x: Any, c: Any) -> Any:
        n, q, tau = self.plan.newton, self.sample_rate, self.plan.newton.inner_steps
        key = int(random_generator(self.seed + i, 2, t).integers(2**62))
        noise = NormalValues(random_generator(key, 0, 0, 0))
        sample = random_generator(self.seed + i, 1, t)
        a, y = (part.numpy() for part in data(i))
        p = 1 / (1 + np.exp(-a @ x))
        g = ((p - y)[:, None] * a)[:, c]
        h = ((p * (1 - p))[:, None, None] * a[:, :, None] * a[:, None, :])[:, c][:, :, c]
        v, average = np.zeros(len(c)), np.zeros(len(c))
        for s in range(tau):
            if s == 0 or n.fresh_batches:
                batch = np.arange(RECORDS)
                if q < 1:
                    size = sample.binomial(RECORDS, q)
                    batch = sample.choice(RECORDS, size=size, replace=False, shuffle=False)
            length = np.linalg.norm(v)
            bound = math.sqrt(len(c) / SIZE) * (n.max_grad_norm + n.max_hessian_norm * length)
            u = (g + h @ v)[batch]
            u = u * np.minimum(1, bound / np.linalg.norm(u, axis=1, keepdims=True))
            total = u.sum(0)
            if self.noise_multiplier:
                z = self.noise_multiplier * (1 if n.fresh_batches else math.sqrt(tau))
                total = total + z * bound * noise(len(c))
            slope = total / (q * RECORDS) + n.weight_decay * (x[c] + v)
            slope = slope + n.hessian_lipschitz / 2 * length * v
            step = min(2 / (n.strong_convexity * (s + 2)), n.max_step_size or math.inf)
            v = np.clip(x[c] + v - step * slope, -(n.box or math.inf), n.box or math.inf) - x[c]
            average = average + 2 * (s + 1) / (tau * (tau + 1)) * v
        return average


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Three clients, three rounds of four inner steps, k = 3 of d = 5."""
    return Federation(tmp_path / "ledgers")
