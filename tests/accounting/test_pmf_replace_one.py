"""Exchanging one record: the pair (1-q) N(0) + q N(1), (1-q) N(0) + q N(-1) is the worst one."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

import lightning_dp.accounting as accounting
from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting._pmf import replacement_profile

STEPS = [(0.5, 0.2), (0.8, 0.01), (1.0, 0.5), (2.0, 0.1), (3.0, 0.95)]
EPSILONS = np.array([0.0, 0.01, 0.2, 1.0, 4.0])


def profile(z: float, q: float) -> NDArray[np.float64]:
    return replacement_profile(EPSILONS, z, q)[0]


@pytest.mark.parametrize(("z", "q"), STEPS)
def test_profile_is_the_integral(oracle: SimpleNamespace, z: float, q: float) -> None:
    integral = oracle.one_step(EPSILONS, (z, q), "replace_one", True)
    assert profile(z, q) == pytest.approx(integral, rel=1e-9, abs=1e-15)
    mirrored = oracle.one_step(EPSILONS, (z, q), "replace_one", False)
    assert profile(z, q) == pytest.approx(mirrored, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("z", "q"), STEPS)
def test_profile_keeps_below_the_bound_by_joint_convexity(z: float, q: float) -> None:
    """H_g(P||Q) <= q ((1-b) H_a(N1||N0) + b H_a(N2||N0)), a = 1 + (g-1)/q, b = g/a.

    Advanced joint convexity (Balle, Barthe, Gaboardi, arXiv 1807.01647v2, Theorem 2): the part
    (1-q) N(0) is common to both.
    """
    g = np.exp(EPSILONS)
    a = 1 + (g - 1) / q
    b = g / a

    def gaussian(distance: float) -> NDArray[np.float64]:
        mu, e = distance / z, np.log(a)
        return norm.sf(e / mu - mu / 2) - a * norm.sf(e / mu + mu / 2)

    bound = q * ((1 - b) * gaussian(1.0) + b * gaussian(2.0))
    assert np.all(profile(z, q) <= bound * (1 + 1e-9) + 1e-15)
    # Equality where nothing is convex: epsilon = 0 has a = b = 1.
    assert profile(z, q)[0] == pytest.approx(bound[0], rel=1e-9)


@pytest.mark.parametrize(("z", "q"), STEPS)
def test_no_other_pair_of_records_is_worse(z: float, q: float) -> None:
    """Random old and new records in the plane, norms at most 1, integrated on a lattice."""
    rng = np.random.default_rng(0)
    axis = np.linspace(-1 - 6 * z, 1 + 6 * z, 301)
    area = (axis[1] - axis[0]) ** 2
    x, y = np.meshgrid(axis, axis)

    def density(v: NDArray[np.float64]) -> NDArray[np.float64]:
        square = (x - v[0]) ** 2 + (y - v[1]) ** 2
        return np.exp(-square / (2 * z * z)) / (2 * math.pi * z * z)

    common = (1 - q) * density(np.zeros(2))

    def delta(old: NDArray[np.float64], new: NDArray[np.float64]) -> NDArray[np.float64]:
        p, r = common + q * density(old), common + q * density(new)
        return np.array([np.sum(np.maximum(p - g * r, 0)) * area for g in np.exp(EPSILONS)])

    worst = profile(z, q)
    assert delta(np.array([1.0, 0]), np.array([-1.0, 0])) == pytest.approx(
        worst, rel=2e-3, abs=1e-7
    )
    for _ in range(25):
        old, new = rng.normal(size=(2, 2))
        old *= rng.uniform() ** 0.3 / np.linalg.norm(old)
        new *= rng.uniform() ** 0.3 / np.linalg.norm(new)
        for pair in ((old, new), (old / np.linalg.norm(old), np.zeros(2)), (old, -old)):
            assert np.all(delta(*pair) <= worst * (1 + 2e-3) + 1e-7)


def test_full_batches_are_twice_as_sensitive() -> None:
    assert accounting.epsilon(Gaussian(2.0), 1e-5, "replace_one") == pytest.approx(
        accounting.epsilon(Gaussian(1.0), 1e-5), rel=1e-12
    )


@pytest.mark.parametrize("q", [0.01, 0.2])
def test_sampled_steps_cost_between_add_remove_and_twice_the_sensitivity_at_twice_the_rate(
    q: float,
) -> None:
    event = PoissonGaussian(1.5, q)
    exchanged = accounting.epsilon([(event, 100)], 1e-5, "replace_one")
    assert exchanged > 1.3 * accounting.epsilon([(event, 100)], 1e-5)
    assert exchanged < accounting.epsilon([(PoissonGaussian(0.75, q), 100)], 1e-5)
