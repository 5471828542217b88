"""The parts of the numerical accountant: profiles, pmfs, mixtures of steps, products, curves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm

from lightning_dp.accounting import Gaussian, PoissonGaussian, StreamingRDPAccountant, epsilon
from lightning_dp.accounting._composition import sum_of_logs
from lightning_dp.accounting._grid import CurveSearch
from lightning_dp.accounting._grouping import Cell, Mixture, as_mixture
from lightning_dp.accounting._pmf import (
    backward_profile,
    discretise,
    forward_profile,
    replacement_profile,
)
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.accounting.pld import epsilon_curve
from lightning_dp.accounting.steps import Steps

RELATIONS = ("add_remove", "replace_one")
PROFILES = (forward_profile, backward_profile)
relations = st.sampled_from(RELATIONS)
pairs = st.tuples(st.floats(0.35, 20), st.one_of(st.floats(1e-4, 0.99), st.just(1 - 1e-9)))

# -- profiles ----------------------------------------------------------------------------------

EPSILONS = np.array([0.0, 0.01, 0.2, 1.0, 4.0])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(z=st.floats(0.5, 3), q=st.floats(0.01, 0.95))
def test_the_profile_of_an_exchange_is_the_integral_and_below_joint_convexity(oracle, z, q):
    """H_g(P||Q) <= q ((1-b) H_a(N1||N0) + b H_a(N2||N0)), a = 1 + (g-1)/q, b = g/a.

    Advanced joint convexity (Balle, Barthe, Gaboardi, arXiv 1807.01647v2, Theorem 2): the part
    (1-q) N(0) is common to both.
    """
    found = replacement_profile(EPSILONS, z, q)[0]
    for forward in (True, False):
        integral = oracle.one_step(EPSILONS, (z, q), "replace_one", forward)
        assert found == pytest.approx(integral, rel=1e-8, abs=1e-14)
    g = np.exp(EPSILONS)
    a = 1 + (g - 1) / q
    b = g / a

    def gaussian(distance: float) -> NDArray[np.float64]:
        mu, e = distance / z, np.log(a)
        return norm.sf(e / mu - mu / 2) - a * norm.sf(e / mu + mu / 2)

    bound = q * ((1 - b) * gaussian(1.0) + b * gaussian(2.0))
    assert np.all(found <= bound * (1 + 1e-9) + 1e-15)
    assert found[0] == pytest.approx(bound[0], rel=1e-9)  # a = b = 1: nothing is convex


@pytest.mark.parametrize(("z", "q"), [(0.5, 0.2), (0.8, 0.01), (1.0, 0.5), (3.0, 0.95)])
def test_no_other_pair_of_records_is_worse(z, q):
    """Random old and new records in the plane, norms at most 1, integrated on a lattice."""
    rng = np.random.default_rng(0)
    axis = np.linspace(-1 - 6 * z, 1 + 6 * z, 201)
    area = (axis[1] - axis[0]) ** 2
    x, y = np.meshgrid(axis, axis)

    def density(v: NDArray[np.float64]) -> NDArray[np.float64]:
        square = (x - v[0]) ** 2 + (y - v[1]) ** 2
        return np.exp(-square / (2 * z * z)) / (2 * math.pi * z * z)

    common = (1 - q) * density(np.zeros(2))

    def delta(old: NDArray[np.float64], new: NDArray[np.float64]) -> NDArray[np.float64]:
        p, r = common + q * density(old), common + q * density(new)
        return np.array([np.sum(np.maximum(p - g * r, 0)) * area for g in np.exp(EPSILONS)])

    worst = replacement_profile(EPSILONS, z, q)[0]
    exact = pytest.approx(worst, rel=4e-3, abs=1e-6)
    assert delta(np.array([1.0, 0]), np.array([-1.0, 0])) == exact
    for _ in range(25):
        old, new = rng.normal(size=(2, 2))
        old *= rng.uniform() ** 0.3 / np.linalg.norm(old)
        new *= rng.uniform() ** 0.3 / np.linalg.norm(new)
        for pair in ((old, new), (old / np.linalg.norm(old), np.zeros(2)), (old, -old)):
            assert np.all(delta(*pair) <= worst * (1 + 4e-3) + 1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    pair=pairs,
    relation=relations,
    backward=st.booleans(),
    limit=st.one_of(st.just(math.inf), st.floats(0.5, 3)),
)
def test_a_pmf_dominates_its_profile(pair, relation, backward, limit):
    h = 0.01
    pmf = discretise(*pair, h, -40.0, relation, backward, limit)
    x = (pmf.start + np.arange(pmf.probabilities.size)) * h
    assert x.max() <= limit + h
    for at in (0.0, 0.005, 0.1, 0.333, 1.0, 2.5):
        true, _ = PROFILES[backward](np.array([at]), *pair, relation)
        shown = pmf.infinity + np.sum(pmf.probabilities * np.maximum(-np.expm1(at - x), 0))
        assert shown >= true[0] * (1 - 1e-12)
    total = pmf.probabilities.sum() + pmf.infinity
    assert 1 - 1e-12 <= total <= (1 + 1e-7 if limit == math.inf else 1.5)


# -- many distinct steps as mixtures of few ----------------------------------------------------

SEEN = np.concatenate(([0.0], np.geomspace(1e-3, 12.0, 40)))


def random_steps(seed: int, size: int = 600) -> Steps:
    rng = np.random.default_rng(seed)
    z = np.exp(rng.uniform(np.log(0.5), np.log(2.5), size))
    q = np.exp(rng.uniform(np.log(0.2), 0.0, size))
    return Steps(z, q, rng.integers(1, 9, size).astype(float))


def gap(steps: Steps, mixture: Mixture, relation: str) -> tuple[float, float]:
    """Least and largest (mixture - step) / step over all steps, directions and epsilons."""
    relative = []
    for cell in mixture.cells:
        nodes = [mixture.nodes[c] for c in cell.corners]
        members = steps.at(cell.members)
        for profile in PROFILES:
            corners = np.stack([profile(SEEN, z, q, relation)[0] for z, q in nodes])
            own_pairs = (members.noise_multipliers, members.sample_rates)
            for row, z, q in zip(cell.weights(), *own_pairs, strict=True):
                own = profile(SEEN, z, q, relation)[0]
                seen = own > 1e-9
                relative.append((row @ corners - own)[seen] / own[seen])
    values = np.concatenate(relative)
    return float(values.min()), float(values.max())


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_mixture_of_corners_dominates_the_step_to_second_order(relation):
    steps = random_steps(0)
    wide, narrow = (as_mixture(steps, relation, spacing, exact=32) for spacing in (0.3, 0.1))
    assert not wide.is_exact and wide.total == steps.total
    (least, most), (_, fine) = gap(steps, wide, relation), gap(steps, narrow, relation)
    assert least >= -1e-9
    assert most > 0.01  # it is an interpolation, not the step itself
    assert fine < most / 4


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    members=st.sampled_from([1, 20, 300]),  # beyond 64 members the series is used
    wide=st.floats(1e-3, 0.6),  # the larger, the more halving
    seed=st.integers(0, 99),
)
def test_sums_of_logarithms_are_those_of_every_step(members, wide, seed):
    rng = np.random.default_rng(seed)
    u, v = rng.uniform(0, 1, (2, members))
    counts = np.cumsum(rng.integers(0, 4, (3, members)), axis=0).astype(float)
    counts[-1] += 1
    cell = Cell((0, 1, 2, 3), u, v, counts[-1], np.arange(members))
    corners = 0.9 + wide * (rng.normal(size=(4, 40, 2)) @ np.array([1, 1j])) / 5
    logs, least, truncation = sum_of_logs(cell, counts, list(corners))
    factors = cell.weights() @ corners
    expected = np.log(factors).T @ counts.T
    assert np.exp(logs - expected) == pytest.approx(np.ones(logs.shape), abs=1e-9 + truncation)
    assert 0 <= truncation < 1e-7
    assert np.all(least <= np.abs(factors).min(axis=0) * (1 + 1e-12))
    assert np.all(least > 0.4 * np.abs(factors).min(axis=0))


# -- epsilon along a plan ----------------------------------------------------------------------

_RNG = np.random.default_rng(0)
_Z, _Q = _RNG.uniform(0.8, 2.5, 200), np.exp(_RNG.uniform(-6.0, -3.0, 200))
PLANS = {
    "constant": lambda t: PoissonGaussian(1.2, 0.02),
    "decay": lambda t: PoissonGaussian(3.0 * 0.999**t, 0.02),
    "many distinct": lambda t: PoissonGaussian(float(_Z[t % 200]), float(_Q[t % 200])),
    "large samples": lambda t: PoissonGaussian(20.0 + 0.01 * t, 0.5),
    "sometimes full": lambda t: Gaussian(60.0) if t % 7 == 0 else PoissonGaussian(1.5, 0.01),
    "spike": lambda t: PoissonGaussian(0.5 if t == 100 else 4.0, 0.01),
}
SPENT = [(PoissonGaussian(1.0, 0.01), 200), (Gaussian(5.0), 1)]
SETTINGS = [("add_remove", 1e-5, []), ("replace_one", 1e-10, []), ("add_remove", 1e-6, SPENT)]
# Neighbours share a grid with a longer run: 8 lengths near each other in each stretch.
LENGTHS = sorted(
    {0, 1, 2, 3, 10, 40, 41, 150, 400, 1500, *range(380, 400, 5), *range(1000, 1500, 100)}
)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "relation", "delta", "spent"),
    [
        pytest.param(name, *setting, marks=[] if i % 3 == k and i < 4 else [pytest.mark.slow])
        for i, name in enumerate(PLANS)
        for k, setting in enumerate(SETTINGS)
    ],
)
def test_a_curve_is_one_evaluation_for_each_length(name, relation, delta, spent):
    plan = PLANS[name]
    curve = epsilon_curve(plan, LENGTHS, delta, relation, spent=spent)
    for steps, value in zip(LENGTHS, curve, strict=True):
        if steps in (0, 1, 41, 400, 1000):
            exact = epsilon([*spent, *((plan(t), 1) for t in range(steps))], delta, relation)
            # Both are at most about 1e-3 above the truth.
            assert exact * (1 - 1e-3) <= value <= exact * 1.005 + 1e-9


@pytest.mark.parametrize("worse", [False, True])
def test_the_worse_direction_of_a_curve_counts(monkeypatch, worse):
    monkeypatch.setattr(
        CurveSearch,
        "_group",
        lambda self, run, search, least: np.full(
            run.size, 0.2 if search.backward == worse else 0.1
        ),
    )
    assert list(epsilon_curve(PoissonGaussian(0.1, 0.5), [1, 2], 1e-5)) == [0.2, 0.2]


def test_a_curve_of_one_event_of_full_batches_of_no_noise_and_of_others():
    event, judge = PoissonGaussian(1.2, 0.02), StreamingRDPAccountant()
    one = epsilon_curve(event, LENGTHS, 1e-5)
    assert one == pytest.approx(epsilon_curve(lambda t: event, LENGTHS, 1e-5), rel=1e-9)
    full = epsilon_curve(Gaussian(30.0), [1, 10, 1000], 1e-5)
    exact = [gdp_epsilon(math.sqrt(n) / 30, 1e-5) for n in (1, 10, 1000)]
    assert full == pytest.approx(exact, rel=1e-9)
    silent = epsilon_curve(lambda t: Gaussian(0.0 if t == 5 else 5.0), [5, 6, 7], 1e-5)
    assert silent[0] < 5 and np.all(np.isinf(silent[1:]))
    renyi = epsilon_curve(event, [10, 100], 1e-5, accountant=judge)
    assert list(renyi) == [judge.epsilon([(event, n)], 1e-5) for n in (10, 100)]


def test_lengths_may_come_in_any_order_and_shape():
    event = PoissonGaussian(1.2, 0.02)
    a, b, c = epsilon_curve(event, [100, 10, 100], 1e-5)
    assert a == c > 1.5 * b > 0
    assert epsilon_curve(event, [[100, 10], [10, 100]], 1e-5).shape == (2, 2)
    assert epsilon_curve(event, [], 1e-5).size == 0
    for lengths in ([-1], [1.5], [math.nan], ["a"], [2**63 + 5], [2**70]):
        with pytest.raises(ValueError, match=r"at_steps=.* must be integers"):
            epsilon_curve(Gaussian(1.0), lengths, 1e-5)
    with pytest.raises(ValueError, match="delta="):
        epsilon_curve(Gaussian(1.0), [1], math.nan)
    with pytest.raises(ValueError, match=r"relation=.* must be"):
        epsilon_curve(Gaussian(1.0), [1], 1e-5, "swap")
