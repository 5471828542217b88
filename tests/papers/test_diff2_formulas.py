"""The noise of the DIFF2 paper is that of Proposition 4.1, and more than its ε needs."""

from __future__ import annotations

import math

import pytest
from diff2_formulas import paper_noise

from lightning_dp import Diff2
from lightning_dp.accounting.gdp import gdp_epsilon


# n = 16,512, R = 2000, ε = 3, δ = 1e-5, u = 1.25.
@pytest.mark.parametrize(
    ("interval", "sigmas"),
    [
        (6, (0.004287, 0.019148)),
        (20, (0.002346, 0.020448)),
        (60, (0.001368, 0.020800)),
        (200, (0.000742, 0.020927)),
        (1, (0.009382, 0.0)),
    ],
)
def test_noise_of_the_paper(interval, sigmas):
    noise = paper_noise(Diff2(interval), 3.0, 1e-5, steps=2000, num_records=16_512)
    assert noise == pytest.approx(sigmas, abs=5e-7)


@pytest.mark.parametrize("interval", [6, 20, 60, 200])
def test_noise_of_the_paper_has_less_privacy_left_over_than_it_says(interval):
    """Replace-one: z on the sum is n σ / 2. The paper's noise for ε = 3 is good for 2.34."""
    noise = paper_noise(Diff2(interval), 3.0, 1e-5, steps=2000, num_records=16_512)
    restarts = math.ceil(2000 / interval)
    z1, z2 = (16_512 * sigma / 2 for sigma in noise)
    mu = math.sqrt(restarts / z1**2 + (2000 - restarts) / z2**2)
    assert gdp_epsilon(mu, 1e-5) == pytest.approx(2.34, abs=0.005)
