"""Every client says what may ever be spent on its data."""

from __future__ import annotations

import math

import pytest

from lightning_dp import CubicNewton
from lightning_dp.federated import (
    ClientPrivacy,
    CubicNewtonClient,
    CubicNewtonPlan,
    QueryClient,
    ReleaseLedger,
)
from lightning_dp.plan import NoisePlan
from lightning_dp.sampling import FullBatch
from lightning_dp.schedules import Constant


def clients(log_cosh, folder):
    """Makers of each kind of client, from a budget."""
    ledger, plan = ReleaseLedger(folder, "data"), NoisePlan(2.0, Constant(), FullBatch(), 1.0)
    newton = CubicNewtonPlan(CubicNewton(1.0, 0.0, 2), clients=1, rounds=2)
    shared = {"run": "trial", "target_delta": 1e-5}
    return [
        lambda **budget: ClientPrivacy(1.0, 2.0, **budget),
        lambda **budget: QueryClient(log_cosh(), plan, ledger, rounds=2, **shared, **budget),
        lambda **budget: CubicNewtonClient(
            log_cosh(), newton, ledger, client=0, noise_multiplier=2.0, **shared, **budget
        ),
    ]


def test_a_client_has_no_budget_by_default(log_cosh, tmp_path):
    for make in clients(log_cosh, tmp_path):
        with pytest.raises(TypeError, match="target_epsilon"):
            make()
        for budget in (None, 0.0, -1.0, math.nan):
            with pytest.raises(ValueError, match="target_epsilon="):
                make(target_epsilon=budget)
        make(target_epsilon=math.inf)
        make(target_epsilon=3.0)
