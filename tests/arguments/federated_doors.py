"""Doors by which numbers come into a federation."""

from __future__ import annotations

import torch

from lightning_dp import Constant, CubicNewton, Poisson
from lightning_dp.accounting import Gaussian
from lightning_dp.federated import (
    AsyncClient,
    AsyncPlan,
    AsyncServer,
    ClientPrivacy,
    PolynomialSizes,
    Quorum,
)
from lightning_dp.federated.asynchronous import InverseSteps, rounds_for
from lightning_dp.federated.cubic_newton import CubicNewtonClient, CubicNewtonPlan
from lightning_dp.federated.ledger import ReleaseLedger, Spending
from lightning_dp.federated.synchronous import (
    BVRLSGD,
    QueryClient,
    SynchronousServer,
)
from lightning_dp.noise_plan import NoisePlan
from tests.arguments.training_doors import door

SIZES = PolynomialSizes(a=0, b=16)
NOISE_PLAN = NoisePlan(1.0, Constant(), Poisson(), 0.5)


ASYNC_PLAN = AsyncPlan(2, PolynomialSizes(a=0, b=4), InverseSteps(0.1))


LEDGER = ReleaseLedger("/nowhere", "ten records")


class Ten:
    """Ten records that nobody asks."""

    num_records, unit, has_products = 10, "record", True

    def bounded_sum(self, query, records):
        raise NotImplementedError


FEDERATED = [
    door(AsyncServer, num_clients=2, run="trial", start=torch.zeros(1), plan=ASYNC_PLAN),
    door(
        AsyncClient,
        share=1.0,
        plan=ASYNC_PLAN,
        records=Ten(),
        ledger=LEDGER,
        run="trial",
        privacy=ClientPrivacy(1.0, 1.0, target_epsilon=3.0),
    ),
    door(PolynomialSizes, a=1.0, b=16.0, c=0.5, first=1),
    door(InverseSteps, eta0=0.1, beta=0.01),
    door(rounds_for, gradients=100.0, sizes=SIZES),
    door(
        AsyncPlan,
        rounds=3,
        lag=1,
        keep=2,
        mask_seed=1,
        max_grad_norm=1.0,
        noise_multiplier=2.0,
        share=1.0,
        sizes=SIZES,
        steps=InverseSteps(0.1),
    ),
    door(
        CubicNewtonPlan,
        clients=3,
        rounds=10,
        step_scale=1.0,
        whole_steps=False,
        noise_multiplier=1.0,
        min_batch_size=5.0,
        newton=CubicNewton(1.0, 0.0, inner_steps=2),
    ),
    door(Quorum, clients=2, wait=60.0, tries=3, patience=90.0),
    door(
        BVRLSGD,
        learning_rate=0.1,
        local_steps=2,
        diff_norm=1.0,
        noise_multiplier=1.0,
        sample_rate=0.1,
    ),
    door(
        ClientPrivacy,
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        target_epsilon=1.0,
        target_delta=1e-05,
        seed=3,
    ),
    door(
        Spending,
        rounds=3,
        target_epsilon=1.0,
        target_delta=1e-05,
        retain=1,
        run="trial",
        events=lambda i: [Gaussian(3.0)],
    ),
    door(
        SynchronousServer,
        rounds=3,
        num_clients=2,
        num_records=10,
        learning_rate=0.1,
        seed=3,
        run="trial",
        plan=NOISE_PLAN,
        start=torch.zeros(3),
    ),
    door(
        QueryClient,
        rounds=3,
        target_epsilon=1.0,
        target_delta=1e-05,
        client=0,
        num_clients=2,
        seed=3,
        run="trial",
        plan=NOISE_PLAN,
        records=Ten(),
        ledger=LEDGER,
    ),
    door(
        CubicNewtonClient,
        noise_multiplier=1.0,
        target_epsilon=1.0,
        target_delta=1e-05,
        sample_rate=0.5,
        seed=3,
        run="trial",
        plan=CubicNewtonPlan(CubicNewton(1.0, 0.0, inner_steps=1), clients=2, rounds=3),
        client=0,
        records=Ten(),
        ledger=LEDGER,
    ),
]
