"""Noise that takes no time to calibrate: hundreds of plans are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from lightning_dp.accounting.gdp import mu_of_budget
from lightning_dp.plan.noise import IndependentNoise


@dataclass(frozen=True)
class CentralLimit(IndependentNoise):
    """z of many Poisson steps: mu² = q² T (exp(1/z²) - 1)."""

    name = "central limit"

    def calibrated(self, sample_rate, steps, epsilon, delta, relation):
        mu = mu_of_budget(epsilon, delta) / {"add_remove": 1, "replace_one": 2}[relation]
        if sample_rate == 1:
            return math.sqrt(steps) / mu
        return math.log1p((mu / sample_rate) ** 2 / steps) ** -0.5


@pytest.fixture
def quick() -> IndependentNoise:
    return CentralLimit()
