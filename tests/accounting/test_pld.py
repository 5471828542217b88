"""The reporting accountant against closed forms, quadrature and other people's accountants."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from lightning_dp.accounting import (
    ZCDP,
    ApproximateDP,
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    _composition,
    _grid,
    delta,
    epsilon,
)
from lightning_dp.accounting._grid import GridSearch, Target
from lightning_dp.accounting._grouping import as_mixture
from lightning_dp.accounting._pmf import discretise, forward_profile
from lightning_dp.accounting.events import PoissonRound
from lightning_dp.accounting.gdp import LittleNoise, gdp_delta, gdp_epsilon
from lightning_dp.accounting.guards import GDPGuard
from lightning_dp.accounting.steps import merge

P = PoissonGaussian
RELATIONS = ("add_remove", "replace_one")
each_relation = pytest.mark.parametrize("relation", RELATIONS)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def logs(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers whose logarithms are drawn evenly."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


# -- one step and two, exactly -----------------------------------------------------------------


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    z=logs(0.25, 20),
    q=st.one_of(logs(1e-4, 1), st.just(1 - 1e-9)),
    relation=st.sampled_from(RELATIONS),
)
def test_one_step_is_the_hockey_stick_of_the_subsampled_gaussian(oracle, z, q, relation):
    for at in (0.0, 0.05, 0.5, 3.0, 9.0):
        exact = oracle.exact_delta(at, [(z, q)], relation)
        if exact > 1e-13:
            assert exact * (1 - 1e-9) <= delta([P(z, q)], at, relation) <= exact * 1.01
    for at in (1e-1, 1e-5, 1e-10):
        exact = oracle.exact_epsilon(at, [(z, q)], relation)
        assert exact * (1 - 1e-9) <= epsilon([P(z, q)], at, relation) <= exact * 1.0005 + 1e-6


@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    steps=st.tuples(*[st.tuples(logs(0.5, 3), logs(0.02, 1))] * 2).map(list),
    relation=st.sampled_from(RELATIONS),
)
def test_two_steps_are_the_quadrature(oracle, steps, relation):
    events, points = [P(*step) for step in steps], (0.2, 1.5, 5.0)
    profile = PLDAccountant().profile([(event, 1) for event in events], points, relation)
    for at, read in zip(points, profile, strict=True):
        exact = oracle.exact_delta(at, steps, relation)
        if exact > 1e-12:
            assert exact * (1 - 1e-9) <= delta(events, at, relation) <= exact * 1.01
            assert exact * (1 - 1e-9) <= read <= exact * 1.02
    exact = oracle.exact_epsilon(1e-5, steps, relation)
    assert exact * (1 - 1e-9) <= epsilon(events, 1e-5, relation) <= exact * 1.0005 + 1e-6


DECLARED = ApproximateDP(0.5, 1e-6, "add_remove", "a histogram")
PROFILED = {
    "sampled": [(P(1.0, 0.01), 1000)],
    "many": [(P(1 + i / 100, 0.02), 3) for i in range(40)],
    "beside full batches": [(P(3.0, 0.3), 300), (Gaussian(8.0), 5)],
    "full batches": [(Gaussian(8.0), 5)],
    "declared": [(P(1.0, 0.01), 1000), (DECLARED, 1)],
    "declared alone": [(DECLARED, 1)],
    "no noise": [(P(0.0, 0.01), 1)],
    "little noise": [(P(0.02, 1e-4), 10)],
    "nothing": [],
}


@pytest.mark.few(6)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    "history",
    [
        pytest.param(history, id=name, marks=[pytest.mark.slow] * (name == "many"))
        for name, history in PROFILED.items()
    ],
)
def test_a_profile_is_close_to_delta_at_each_of_its_points(history, relation):
    points = (0.0, 0.8, 5.0)
    single = [delta(history, at, relation) for at in points]
    read = PLDAccountant().profile(history, points, relation)
    assert read == pytest.approx(single, rel=0.02, abs=1e-15)
    assert read[::2] == pytest.approx(single[::2], rel=1e-3, abs=1e-15)


def test_a_profile_of_no_point_is_refused():
    with pytest.raises(ValueError, match="epsilons is empty"):
        PLDAccountant().profile(PROFILED["sampled"], ())


@pytest.mark.parametrize("backward", [False, True])
def test_each_direction_is_the_hockey_stick_of_its_pair(oracle, backward):
    """Removing a record and adding one are different pairs; both are computed, the larger counts."""
    step = (0.3, 0.7)
    exact, other = (
        float(oracle.one_step(0.2, step, "add_remove", b)) for b in (not backward, backward)
    )
    steps, target = merge([(P(*step), 1)]), Target(epsilon=0.2)
    value = GridSearch(2.5e-4, 0.04, (), "add_remove", target, backward).value(steps, 0.0)
    assert exact * (1 - 1e-9) <= value <= exact * 1.001
    assert value != pytest.approx(other, rel=0.02)


@pytest.mark.parametrize("worse", [False, True])
def test_the_worse_direction_counts(monkeypatch, worse):
    def value(search, *_):
        return 0.2 if search.backward == worse else 0.1

    monkeypatch.setattr(GridSearch, "value", value)
    monkeypatch.setattr(GridSearch, "_profile", lambda search, *_: [value(search)])
    assert delta(P(0.1, 0.5), 0.5) == epsilon(P(0.1, 0.5), 1e-5) == 0.2


# -- many steps, in brackets -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "count", "relation"),
    [((0.8, 0.1), 20, "replace_one"), ((2.0, 0.3), 50, "add_remove")],
)
def test_many_steps_lie_between_rounding_all_losses_down_and_up(oracle, step, count, relation):
    lower, upper = (
        oracle.bucket_epsilon(1e-5, [step] * count, relation, h=2e-4, up=up) for up in (False, True)
    )
    assert lower <= epsilon([(P(*step), count)], 1e-5, relation) <= upper * 1.0005
    assert upper < 1.01 * lower


def assert_in_bracket(oracle, history, h, width, deltas=(1e-5, 1e-8, 1e-12), relation="add_remove"):
    lower, upper = (
        oracle.dp_accounting_epsilons(list(deltas), history, h / 4 if not up else h, up, relation)
        for up in (False, True)
    )
    for at, low, high in zip(deltas, lower, upper, strict=True):
        assert low <= epsilon([(P(*s), n) for s, n in history], at, relation) <= high * 1.007
        assert high < width * low + 0.01  # the bracket says something


def random_history(seed: int, distinct: int) -> list[tuple[tuple[float, float], int]]:
    rng = np.random.default_rng(seed)
    scale = math.exp(rng.uniform(-0.5, 1.5))
    z = scale * np.exp(rng.uniform(-0.4, 0.4, distinct))
    q = np.exp(rng.uniform(math.log(0.002), math.log(0.3), distinct))
    pairs = zip(z.tolist(), q.tolist(), strict=True)
    return [(pair, int(rng.integers(1, 40))) for pair in pairs]


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))]
)
def test_random_histories_lie_in_the_bracket_of_dp_accounting(oracle, seed):
    assert_in_bracket(oracle, random_history(seed, 1 + seed % 9), 1e-3, 1.2)


@pytest.mark.slow
def test_more_steps_than_are_kept_apart_lie_in_the_bracket_of_dp_accounting(oracle):
    z = np.geomspace(2.0, 0.8, 36)
    history = [((float(v), 0.01 + 0.0005 * i), 2) for i, v in enumerate(z)]
    assert_in_bracket(oracle, history, 2e-3, 1.04)


@pytest.mark.parametrize(
    ("history", "at"),
    [
        pytest.param([((0.8, 0.02), 500)], 1e-9, marks=pytest.mark.slow),
        ([((3.0, 0.5), 100), ((5.0, 0.9), 10), ((4.0, 1.0), 5)], 1e-6),
    ],
)
def test_exchanging_a_record_lies_in_the_bracket_of_dp_accounting(oracle, history, at):
    assert_in_bracket(oracle, history, 2e-4, 1.05, [at], "replace_one")


@pytest.mark.parametrize(
    ("step", "count", "h", "least", "most"),
    [
        ((30.0, 1e-2), 10, 2e-6, 1e-4, 1e-2),  # a small epsilon
        ((20.0, 0.01), 100, 1e-5, 5e-3, 5e-2),
        ((0.45, 0.02), 100, 2e-3, 10, 60),  # a large epsilon
        ((0.7, 0.2), 40, 2e-3, 15, 100),
    ],
)
def test_extreme_epsilons_lie_in_the_bracket_of_dp_accounting(oracle, step, count, h, least, most):
    assert_in_bracket(oracle, [(step, count)], h, 1.2, [1e-5])
    assert least < epsilon([(P(*step), count)], 1e-5) < most


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.builds(P, logs(0.4, 100), logs(1e-4, 0.8)), st.integers(1, 10**4)),
        min_size=3,
        max_size=3,
    ),
    logs(1e-10, 1e-3),
)
def test_random_histories_are_below_rdp_and_invert(history, at):
    e = epsilon(history, at)
    assert e <= StreamingRDPAccountant().epsilon(history, at) * (1 + 1e-9) + 1e-7
    if e > 1e-4:  # where delta is steep, an accuracy of epsilon is many per cent of delta
        assert epsilon(history, delta(history, e)) == pytest.approx(e, rel=5e-3)


# -- reference values --------------------------------------------------------------------------

RATES = [min(1.0, (16 + math.ceil(1.322 * i)) / 10_000) for i in range(183)]  # federated
DECAYS = ((1.0, 0.8138), (0.25, 2.535), (1 / 30, 17.77))  # of the last noise, and the scale
REGRESSION = ((0.1, 11.04, 22.0), (0.2, 5.89, 11.7), (0.3, 4.10, 8.05))
REFERENCES = [
    ([(P(1.0, 0.01), 1000)], 1e-5, 1.829, 1.5e-3),
    ([(P(0.8, 0.02), 500)], 1e-5, 4.668, 1.5e-3),
    ([(P(2.0, 0.1), 200)], 1e-6, 3.806, 1.5e-3),
    ([(P(1.0, 1.0), 10)], 1e-5, 17.857, 1.5e-3),
    ([(P(5.0, 0.001), 10)], 1e-5, 0.0012080047, 5e-3),  # 0.0027 on dp-accounting's usual grid
    ([(P(0.347, 1e-4), 40_000)], 1e-5, 9.199, 1.5e-3),  # asymptotic GDP would say 5.73
    ([(P(1.2, 0.01), 300), (P(1.0, 0.01), 300), (P(0.9, 0.01), 400)], 1e-5, 1.945, 1e-3),
    # Five queries on one sample, then as independently sampled steps; and ten.
    ([(PoissonRound((1.5,) * 5, 0.01), 1000)], 1e-5, 5.25, 1.2e-3),
    ([(P(1.5, 0.01), 5000)], 1e-5, 2.17, 2.8e-3),
    ([(PoissonRound((3.0,) * 10, 0.01), 1000)], 1e-5, 2.05, 3e-3),
    ([(P(3.0, 0.01), 10_000)], 1e-5, 1.3195, 1e-3),
    # 19,550 tiny steps: connect-the-dots on a fixed grid of 1e-3 says 0.100.
    ([(P(37.8, 128 / 50_000), 19_550)], 1e-5, 0.02565, 6e-3),
    # (4, 1e-8) allows mu^2 = 0.5134; 0.1963 rho-zCDP, mu^2 = 0.3926, is 3.456 and not 4.
    ([(Gaussian(0.5134**-0.5), 1)], 1e-8, 4.0, 1e-3),
    ([(Gaussian((2 * 0.1963) ** -0.5), 1)], 1e-8, 3.456, 6e-4),
    ([(P(8.0, q), 1) for q in RATES], 5.5e-8, 0.1145, 5e-3),
    ([(P(1.423, q), 1) for q in RATES], 5.5e-8, 1.0, 5e-3),
    ([(P(0.837, 16e-4), 1563)], 5.5e-8, 1.0, 5e-3),
    ([(P(1.293, 137e-4), 183)], 5.5e-8, 1.0, 5e-3),
    *(
        ([(P(scale * last ** (t / 999), 0.01), 1) for t in range(1000)], 1e-5, 3.0, 4e-3)
        for last, scale in DECAYS
    ),
    *(([(P(z, 128 / 50_000), 19_550)], 1e-5, e, 3e-3) for e, z, _ in REGRESSION),
    # By the central limit: mu^2 = T q^2 (e^(1/z^2) - 1).
    ([(P(10.0, 0.001), 10**6)], 1e-5, gdp_epsilon(math.sqrt(math.expm1(0.01)), 1e-5), 5e-3),
    ([(P(200.0, 0.001), 100)], 1e-6, 1.75e-4, 0.75),
    ([(P(0.5, 0.1), 3000)], 1e-6, 301.0, 3e-3),
    # 0.07438 by dp-accounting, extrapolated from grids of 1.6e-4 and 8e-5: rare large losses next to
    # a bulk, and no tilt makes both visible.
    (
        [
            (P(0.8316, 2.772e-5), 23),
            (P(46.95, 0.1811), 1),
            (P(5.141, 0.0109), 27),
            (P(1.6194, 1.209e-4), 18),
        ],
        *(1.076e-11, 0.07438, 1e-3),
    ),
]
EXCHANGES = [
    ([(Gaussian((2 * 0.1963) ** -0.5), 1)], 1e-8, 7.44, 1.4e-3),
    *(([(P(z, 128 / 50_000), 19_550)], 1e-5, e, 1e-2) for e, _, z in REGRESSION),
]


@pytest.mark.parametrize(
    ("history", "at", "expected", "rtol", "relation"),
    [
        *((*each, "add_remove") for each in REFERENCES),
        *((*each, "replace_one") for each in EXCHANGES),
    ],
)
def test_reference_values(history, at, expected, rtol, relation):
    assert epsilon(history, at, relation) == pytest.approx(expected, rel=rtol)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("z", "q", "steps", "at", "relation", "truth"),
    [  # by convolution on a grid of 2^20 losses that keeps the mean
        (1.0, 1e-5, 1000, 1e-5, "add_remove", 0.00070183305),
        (1.0, 1e-5, 1000, 1e-5, "replace_one", 0.0012326115),
        pytest.param(*(0.8, 1e-6, 10**6, 1e-8, "add_remove", 0.0079986199), marks=pytest.mark.slow),
        (0.8, 1e-6, 10**6, 1e-8, "replace_one", 0.012609428),
    ],
)
def test_rare_records_do_not_loosen_epsilon(z, q, steps, at, relation, truth):
    assert truth * (1 - 1e-5) <= epsilon([(P(z, q), steps)], at, relation) <= 1.01 * truth


# -- full batches ------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    z=st.lists(logs(0.3, 1e3), min_size=1, max_size=50),
    at=logs(1e-12, 0.1),
    relation=st.sampled_from(RELATIONS),
)
def test_full_batches_are_exact(z, at, relation):
    """delta = Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu), however q = 1 is said."""
    mu = (1 if relation == "add_remove" else 2) * math.sqrt(math.fsum(1 / v**2 for v in z))
    found = epsilon([Gaussian(v) for v in z], at, relation)
    assert epsilon([P(v, 1.0) for v in z], at, relation) == found
    second = math.exp(found + norm.logcdf(-mu / 2 - found / mu))
    exact = float(norm.cdf(mu / 2 - found / mu)) - second
    assert exact <= at * (1 + 1e-6) + 1e-15
    assert found == 0 or exact == pytest.approx(at, rel=1e-6, abs=1e-15)
    if found > 0:
        assert gdp_delta(mu, found) <= at * (1 + 1e-14)  # its own rounding
        assert gdp_delta(mu, found) == pytest.approx(at, rel=1e-6)


@each_relation
def test_the_grid_meets_the_exact_formula_next_to_full_batches(relation):
    """No shortcut is taken with a sampled step, nor when nearly all take part."""
    full = [(Gaussian(float(z)), 1) for z in np.linspace(20.0, 60.0, 1000)]
    alone = epsilon(full, 1e-6, relation)
    beside = epsilon([*full, (P(50.0, 1e-4), 1)], 1e-6, relation)
    nearly = epsilon([(P(e.pair[0], 1 - 1e-12), 1) for e, _ in full], 1e-6, relation)
    assert alone * (1 - 1e-9) <= beside <= alone * 1.0005
    assert nearly == pytest.approx(alone, rel=2e-3)
    few = [(Gaussian(0.02), 1), (P(1.0, 0.01), 10)]
    assert 1 <= epsilon(few, 1e-5, relation) / epsilon(few[:1], 1e-5, relation) < 1.1


@pytest.mark.parametrize("q", [0.01, 0.2])
def test_exchanging_costs_between_removing_and_twice_the_sensitivity(q):
    event = P(1.5, q)
    exchanged = epsilon([(event, 100)], 1e-5, "replace_one")
    assert 1.3 * epsilon([(event, 100)], 1e-5) < exchanged < epsilon([(P(0.75, q), 100)], 1e-5)


def test_limits_of_gdp():
    assert gdp_delta(0.0, 1.0) == gdp_epsilon(1e-9, 0.1) == 0.0
    assert gdp_delta(math.inf, 1.0) == 1.0 and gdp_epsilon(math.inf, 0.1) == math.inf
    for mu in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"mu=.* must be"):
            gdp_delta(mu, 1.0)
    for mu in (2e6, 1e12, 1e40):  # rounded up
        at = gdp_epsilon(mu, 1e-5)
        assert mu * mu / 2 <= at <= mu * (mu / 2 + 4.3) * (1 + 1e-14)
        assert gdp_delta(mu, at) <= 1e-5 and gdp_delta(mu, 0.4 * mu * mu) == 1.0
    assert gdp_epsilon(1.0001e6, 1e-5) == pytest.approx(gdp_epsilon(0.9999e6, 1e-5), rel=5e-4)


# -- errors are paid for -----------------------------------------------------------------------


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.integers(0, 100), st.sampled_from([1e-5, 1e-12]), st.sampled_from(RELATIONS))
def test_grouping_costs_at_most_half_a_per_cent_and_never_helps(seed, at, relation):
    rng = np.random.default_rng(seed)
    z = math.exp(rng.uniform(-0.3, 1.5)) * np.exp(rng.uniform(-0.7, 0.7, 200))
    q = np.exp(rng.uniform(-7.0, -2.0, 200))
    history = [
        (P(a, b), int(rng.integers(1, 4))) for a, b in zip(z.tolist(), q.tolist(), strict=True)
    ]
    grouped = epsilon(history, at, relation)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_grid, "_EXACT", 10**9)
        alone = epsilon(history, at, relation)
    assert grouped != alone  # the interpolation was in use
    assert alone * (1 - 5e-4) <= grouped <= alone * 1.005


@pytest.mark.parametrize(
    ("range_z", "range_q", "relation"),
    [((0.4, 1.0), (1e-3, 1e-3), "add_remove"), ((5, 50), (0.1, 0.9), "replace_one")],
)
def test_interpolation_is_pessimistic_over_wide_ranges(range_z, range_q, relation):
    rng = np.random.default_rng(1)
    z, q = rng.uniform(*range_z, 300), rng.uniform(*range_q, 300)
    history = [(P(a, b), 1) for a, b in zip(z, q, strict=True)]
    exact = PLDAccountant(spacing=1e-3).epsilon(history, 1e-5, relation)
    grouped = PLDAccountant(spacing=0.25).epsilon(history, 1e-5, relation)
    assert exact * (1 - 3e-4) <= grouped <= exact * 1.2


def test_ten_thousand_distinct_steps_are_interpolated_closely():
    history = [(P(float(z), 0.01), 1) for z in np.geomspace(3.0, 1.0, 10_000)]
    fine = PLDAccountant(spacing=0.01).epsilon(history, 1e-5)
    assert fine * (1 - 2e-4) <= epsilon(history, 1e-5) <= fine * 1.005


def test_a_window_that_is_too_narrow_is_paid_for_in_delta(monkeypatch):
    """Mass that wraps around, or is outside, is added to delta."""
    history = [(P(1.0, 0.05), 100)]
    truth = delta(history, 1.0)
    mixture = as_mixture(merge(history), "add_remove", 0.1, exact=32)
    search = GridSearch(2.5e-4, 0.04, (), "add_remove", Target(epsilon=1.0))
    plan = search.plan(mixture, 0.0, math.inf)
    grid, (z, q) = plan.grid, mixture.nodes[0]

    def found(ends: tuple[float, float]) -> float:
        return _composition.compose(
            mixture,
            lambda node: discretise(z, q, grid.h, plan.log_tail, "add_remove", False, plan.limit),
            _composition.Grid(grid.h, grid.tilt, ends, grid.tilts),
        ).delta(1.0)

    assert found(grid.ends) == pytest.approx(truth, rel=1e-2)
    monkeypatch.setattr(_composition, "_MOST_OUTSIDE", math.inf)
    narrow = [found((-2.0, high)) for high in (3.0, 2.0, 1.5, 1.1)]
    assert min(narrow) >= truth * (1 - 1e-2)
    assert narrow[-1] > truth * 1.05  # this one paid


# -- where no grid fits ------------------------------------------------------------------------

LOTS, TINY = 10**15, P(1e-6, 0.01)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(logs(0.02, 0.099), logs(1e-3, 0.5), st.sampled_from(RELATIONS))
def test_a_step_of_little_noise_is_bounded_by_the_chance_to_take_part(z, q, relation):
    found = LittleNoise.of(merge([(P(z, q), 1)]), relation)
    for share in (0.2, 0.9, 1.0, 1.3):
        at = np.array([share * 0.5 / z**2])
        exact = float(forward_profile(at, z, q, relation)[0][0])  # the worse direction here
        assert exact <= found.delta(share * 0.5 / z**2) * (1 + 1e-9) + 1e-14
        if share < 0.5 and z < 0.05:
            assert found.delta(share * 0.5 / z**2) <= 1.01 * exact


@each_relation
def test_many_steps_of_little_noise_are_bounded_a_little_above_the_grid(relation):
    steps = merge([(P(0.05, 0.01), 100), (P(0.06, 0.004), 50)])
    target = Target(log_delta=math.log(1e-5))
    on_grid = GridSearch(2.5e-4, 0.04, (), relation, target).worst_direction(steps)
    factor = 1.0 if relation == "add_remove" else 4.0  # Gaussians at twice the distance
    assert on_grid <= LittleNoise.of(steps, relation).epsilon(1e-5) <= 1.5 * factor * on_grid


def declared(what: str, epsilon: float, delta: float = 0.0) -> ApproximateDP:
    return ApproximateDP(epsilon, delta, relation="add_remove", what=what)


@pytest.mark.parametrize("accountant", [PLDAccountant(), StreamingRDPAccountant()])
@each_relation
@pytest.mark.parametrize(
    "history",
    [
        [(TINY, 100)],
        [(P(1e-30, 0.01), 100)],
        [(Gaussian(1e-60), 3), (P(1.0, 0.01), 1000)],
        [(P(1e-3, 1e-9), 10)],
        [(P(1.0, 0.01), LOTS)],
        [(P(1e200, 0.01), 10)],
        [(TINY, 10), (declared("a table", 1.0, 1e-6), 1)],
        [(TINY, 10), (ZCDP(1e8, relation="add_remove", what="a census"), 1)],
        [(P(1.0, 0.01), 9), (declared("x", 1e8), 1)],
    ],
)
def test_an_answer_is_finite_and_quick_where_no_grid_fits(accountant, relation, history):
    found = accountant.epsilon(history, 1e-5, relation)
    assert 0 <= found < math.inf
    assert 0 <= accountant.delta(history, 5.0, relation) <= 1
    values = accountant.curve(TINY, np.array([1, 3]), 1e-5, relation, history)
    assert found <= values[0] <= values[1] < math.inf


@pytest.mark.parametrize("at", [1e-12, 1e-20, 1e-30])
def test_a_tiny_delta_is_that_of_its_epsilon(at):
    # Losses that were cut off at e^-30 would count in full.
    for step in (P(28.6, 0.12), P(1.0, 0.01), P(2.0, 1 - 1e-9)):
        found = delta([(step, 34)], epsilon([(step, 34)], at))
        assert 0.9 * at <= found <= 1.1 * at


def test_a_delta_above_the_chance_to_take_part_costs_next_to_nothing():
    assert epsilon(P(0.01, 1e-9), 1e-8) < 1e-8 and epsilon(P(0.05, 1e-6), 1e-4) < 1e-8


def test_next_to_no_noise_costs_what_the_largest_probable_number_of_releases_does():
    # P(more than 7 of 100 at rate 0.01) = 8e-6, P(more than 8) = 8e-7.
    assert 7 * 0.5e12 < epsilon([(TINY, 100)], 1e-5) < 8.01 * 0.5e12
    for z in (1e-160, 1e-310):  # whose squares would underflow: none
        assert epsilon([(P(z, 0.01), 1)], 1e-5) == math.inf
        assert StreamingRDPAccountant().delta([(Gaussian(z), 1)], 9.0) == 1.0
        assert not GDPGuard(1.0, 1e-5, "add_remove", []).fits(lambda z=z: Gaussian(z))
