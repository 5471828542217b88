"""Public doors refuse objects of another kind by the argument's name, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_dp import losses_of_records
from lightning_dp.accounting import (
    Gaussian,
    epsilon,
    trade_off,
)
from lightning_dp.audit import check_isolation
from lightning_dp.federated import AsyncClient, AsyncPlan, AsyncServer, PolynomialSizes
from lightning_dp.federated.asynchronous import InverseSteps
from lightning_dp.plan import learning_rate, plan_training
from lightning_dp.schedules import DynamicGD, DynamicMomentum

STEPS = [(Gaussian(3.0), 10)]
PLAN = AsyncPlan(2, PolynomialSizes(a=0, b=4), InverseSteps(0.1))
BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-5}

CASES: list[tuple[str, Callable[..., Any]]] = [
    ("events", lambda bad: epsilon(bad, 1e-5)),
    ("history", lambda bad: trade_off(bad, 1e-5)),
    ("accountant", lambda bad: trade_off(STEPS, 1e-5, accountant=bad or "none")),
    ("logits", lambda bad: losses_of_records(bad, torch.ones(2, 3), shift=True)),
    ("labels", lambda bad: losses_of_records(torch.ones(2, 3, 4), bad, shift=True)),
    ("module", lambda bad: check_isolation(bad, torch.zeros(4, 3))),
    ("plan", lambda bad: learning_rate(bad, 0.1)),
    ("noise", lambda bad: plan_training(100, 4, steps=3, noise=bad or "none", **BUDGET)),
    ("plan", lambda bad: AsyncServer("run", bad, torch.zeros(1), 2)),
    ("start", lambda bad: AsyncServer("run", PLAN, bad, 2)),
    ("plan", lambda bad: AsyncClient(object(), bad, None, None, run="run")),  # type: ignore[arg-type]
    ("privacy", lambda bad: AsyncClient(object(), PLAN, bad, None, run="run")),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("name", "call"), CASES)
def test_an_object_of_another_kind_is_refused_by_its_name(name, call):
    for bad in (None, 3, "a", {"a": 1}, object()):
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
            call(bad)


def test_numbers_of_steps_that_nobody_could_make_are_refused():
    with pytest.raises(ValueError, match=r"steps are more than can be made: lower kappa"):
        DynamicGD.recommended_steps(kappa=1e308, alpha=0.1)
    with pytest.raises(ValueError, match=r"steps are more than can be made.*raise alpha or eta0"):
        DynamicMomentum.recommended_steps(kappa=10.0, eta0=5e-324, alpha=0.1)
