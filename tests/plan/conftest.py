"""Noise that takes no time to calibrate, and settings and signals to give advice about."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from lightning_dp.accounting.gdp import mu_of_budget
from lightning_dp.boundary import Query, Release, Term
from lightning_dp.plan import plan_training
from lightning_dp.plan.advice import OptimizerSetting, Setting
from lightning_dp.plan.signal import SignalTracker

ADAM = OptimizerSetting("Adam", "adam", 1e-3)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibrate by the central limit theorem, mu² = q² T (exp(1/z²) - 1): hundreds of plans are made."""

    def calibrated(rate, steps, epsilon, delta, relation):
        mu = mu_of_budget(epsilon, delta) / {"add_remove": 1, "replace_one": 2}[relation]
        if rate == 1:
            return math.sqrt(steps) / mu
        return math.log1p((mu / rate) ** 2 / steps) ** -0.5

    def allows(plan, excess):
        return plan.changed(steps=plan.steps).excess <= excess

    monkeypatch.setattr("lightning_dp.plan.training_plan.calibrated_noise", calibrated)
    monkeypatch.setattr("lightning_dp.plan.suggestion.allows", allows)


@cache
def calibrated(num_records=22_000, batch_size=128, epochs=2, epsilon=3.0, delta=1e-5) -> Setting:
    """The setting of a calibrated run of Adam on 11 million weights."""
    plan = plan_training(
        num_records, batch_size, epochs=epochs, target_epsilon=epsilon, target_delta=delta
    )
    return Setting(
        num_records=num_records,
        batch_size=plan.records_per_step,
        steps=plan.steps,
        planned_steps=plan.steps,
        steps_per_epoch=math.ceil(num_records / batch_size),
        noise_multiplier=plan.noise_multiplier,
        clip_norm=1.0,
        size=11_000_000,
        weight_size=0.09,
        target_epsilon=epsilon,
        target_delta=delta,
        relation="add_remove",
        optimizer=ADAM,
        is_constant=True,
    )


@pytest.fixture
def setting() -> Any:
    def make(changed=None, **arguments):
        return replace(calibrated(**arguments), **(changed or {}))

    return make


@pytest.fixture
def signal_of() -> Any:
    """The signal of releases whose gradient is along one direction, with a strength per step."""

    def make(strengths, size=1000, seed=0):
        generator, tracker = torch.Generator().manual_seed(seed), SignalTracker()
        direction = torch.nn.functional.normalize(torch.randn(size, generator=generator), dim=0)
        for step, strength in enumerate(strengths):
            value = strength * direction + torch.randn(size, generator=generator)
            tracker.observe(Query((Term(),), 1.0, 1.0), Release(value, 1.0), step)
        return tracker.signal()

    return make
