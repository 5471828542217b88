"""Sums of logarithms of mixtures, by series and halving, against every step by itself."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_dp.accounting._composition import sum_of_logs
from lightning_dp.accounting._grouping import Cell

LENGTHS, FREQUENCIES = 3, 40


def random_cell(members: int) -> tuple[Cell, np.ndarray]:
    rng = np.random.default_rng(members)
    u, v = rng.uniform(0, 1, (2, members))
    counts = np.cumsum(rng.integers(0, 4, (LENGTHS, members)), axis=0).astype(float)
    counts[-1] += 1
    return Cell((0, 1, 2, 3), u, v, counts[-1], np.arange(members)), counts


@pytest.mark.parametrize("members", [1, 20, 300])  # beyond 64 members the series is used
@pytest.mark.parametrize("wide", [1e-3, 0.05, 0.6])  # the larger, the more halving
def test_the_sums_are_those_of_every_step(members: int, wide: float) -> None:
    cell, counts = random_cell(members)
    rng = np.random.default_rng(1)
    corners = 0.9 + wide * (rng.normal(size=(4, FREQUENCIES, 2)) @ np.array([1, 1j])) / 5
    logs, least, truncation = sum_of_logs(cell, counts, list(corners))
    factors = cell.weights() @ corners
    expected = np.log(factors).T @ counts.T
    assert np.exp(logs - expected) == pytest.approx(np.ones(logs.shape), abs=1e-10 + truncation)
    assert 0 <= truncation < 1e-7
    assert np.all(least <= np.abs(factors).min(axis=0) * (1 + 1e-12))
    assert np.all(least > 0.5 * np.abs(factors).min(axis=0))
