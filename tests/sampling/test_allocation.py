"""Each record in one batch of an epoch: who is in them, and what an epoch costs, from both sides."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from scipy.integrate import quad
from scipy.special import ndtr

from lightning_dp import IndependentNoise, PrivacyConfig, RandomAllocation
from lightning_dp._noise import random_generator
from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp.accounting import (
    ApproximateDP,
    Gaussian,
    PoissonGaussian,
    StreamingRDPAccountant,
    delta,
    epsilon,
)
from lightning_dp.accounting._pmf import AllocationNode
from lightning_dp.accounting.events import RandomAllocationEpoch, event_from_dict
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.journal import Charges
from lightning_dp.accounting.ledger import _costliest
from lightning_dp.accounting.pld import epsilon_curve
from lightning_dp.noise_plan import Budget, costliest_events
from lightning_dp.sampling import BatchPlan

BATCHES = BatchPlan(1000, 0.05, chunks_per_step=1, steps_per_epoch=20)


def epochs(z, t, number=1):
    return [(RandomAllocationEpoch(z, t, t), number)]


# -- who is in a batch ------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_epoch_has_each_record_once_and_another_allocation(start, ranks):
    found = []
    for rank in range(ranks):
        rng = random_generator(rank, 3)
        draw = RandomAllocation().begin(
            BATCHES, range(rank, BATCHES.num_records, ranks), rng, start
        )
        batches = [draw(step, 0.05, rng).tolist() for step in range(start, start + 60)]
        for first in (0, 20, 40):
            epoch = [record for batch in batches[first : first + 20] for record in batch]
            assert sorted(epoch) == list(range(len(range(rank, 1000, ranks))))
        assert batches[:20] != batches[20:40] != batches[40:]
        found.append(batches)
    assert ranks == 1 or found[0] != found[1]


def test_places_are_uniform_and_independent_of_the_epoch_before():
    rng, trials = random_generator(5, 3), 4000
    draw = RandomAllocation().begin(BatchPlan(6, 0.25, 1, 4), range(6), rng)
    places = np.zeros((trials, 6), dtype=int)
    for epoch in range(trials):
        for place in range(4):
            places[epoch, draw(4 * epoch + place, 0.25, rng)] = place
    for a, b in ((places[:, 0], places[:, 1]), (places[:-1, 2], places[1:, 2])):
        table = np.histogram2d(a, b, bins=4)[0]
        spread = ((table - len(a) / 16) ** 2).sum() / (len(a) / 16)
        assert 1e-4 < scipy.stats.chi2(15).cdf(spread) < 1 - 1e-4


def test_the_step_of_a_record_does_not_depend_on_others():
    drawn = []
    for num_records in (1000, 1001):
        plan, rng = BatchPlan(num_records, 0.05, 1, 20), random_generator(5, 3)
        draw = RandomAllocation().begin(plan, range(plan.num_records), rng)
        drawn.append([set(draw(step, 0.05, rng).tolist()) - {1000} for step in range(20)])
    assert drawn[0] == drawn[1]


def test_a_loader_that_read_ahead_finds_its_epoch_again():
    rng = random_generator(0, 3)
    draw = RandomAllocation().begin(BATCHES, range(BATCHES.num_records), rng)
    before = draw(19, 0.05, rng).tolist()
    draw(22, 0.05, rng)
    assert draw(19, 0.05, rng).tolist() == before
    for step in (45, 65, 85):
        draw(step, 0.05, rng)
    with pytest.raises(RefusedRun, match="long after its epoch"):
        draw(19, 0.05, rng)


def test_a_plan_has_one_over_t_as_its_rate(plan_of):
    plan = plan_of(RandomAllocation(), num_records=1010, batch_size=50, loader_length=21)
    assert (plan.sample_rate, plan.steps_per_epoch) == (1 / 21, 21)
    assert plan_of(RandomAllocation(), accumulate=4).steps_per_epoch == 5


# -- what an epoch costs: exactly for one and two steps ------------------------------------------------


@pytest.mark.parametrize("z", [0.3, 1.0, 4.0, 50.0])
def test_an_epoch_of_one_step_is_a_full_batch(z):
    for eps in (0.1 / z, 1 / z, 3 / z):
        exact = delta([(Gaussian(z), 3)], eps)
        assert exact * (1 - 1e-9) <= delta(epochs(z, 1, 3), eps) <= exact * (1 + 3e-3)


def two_steps(z, eps, backward):
    """δ of an epoch of two steps, by an integral over the first release."""
    # E_2 > c where x_2 > z^2 log c + 1/2; all within N(0, z^2), then N(1, z^2).
    g, s = math.exp(eps), z * z

    def chance(x, mean, least):
        at = s * math.log(least) + 0.5 if least > 0 else -math.inf
        return ndtr((mean - at) / z)

    def inner(x):
        first = math.exp((x - 0.5) / s)
        if backward:  # Q - g P where (E_1 + E_2) / 2 < 1 / g
            least = 2 / g - first
            if least <= 0:
                return 0.0
            low, high = 1 - chance(x, 0, least), 1 - chance(x, 1, least)
            return low - g * (first * low + high) / 2
        least = 2 * g - first
        low, high = chance(x, 0, least), chance(x, 1, least)
        return (first * low + high) / 2 - g * low

    def weighted(x):
        return inner(x) * math.exp(-x * x / (2 * s)) / (z * math.sqrt(2 * math.pi))

    kink = s * math.log(2 / g if backward else 2 * g) + 0.5
    ends = (-12 * z, 12 * z + 1)
    points = [kink] if ends[0] < kink < ends[1] else None
    return quad(weighted, *ends, points=points, limit=500, epsabs=1e-13, epsrel=1e-9)[0]


def profile(pmf, h, eps):
    losses = (pmf.start + np.arange(pmf.probabilities.size)) * h
    gain = -np.expm1(np.minimum(eps - losses, 0.0))
    return float(pmf.probabilities @ gain) + pmf.infinity


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("z", [0.6, 1.5, 5.0])
def test_an_epoch_of_two_steps_is_what_integrals_say(z, backward):
    h = 1e-3 / z
    pmf = AllocationNode(z, 2).pmf(h, -34.0, "add_remove", backward, math.inf)
    for eps in (0.0, 0.2 / z, 0.5 / z, 1.5 / z):
        exact = two_steps(z, eps, backward)
        found = profile(pmf, h, eps)
        assert exact * (1 - 1e-7) - 1e-13 <= found <= exact * (1 + 2e-3) + 1e-9


# -- what epochs cost: a bracket by sums of rounded ratios ---------------------------------------------


def bracket(z, t, number, eps, up, backward):
    """δ of some epochs with all ratios, and then all losses, rounded to one side: slow, and sure.

    The profile is the mean of a function that does not fall with the loss: under P for removing a
    record, under Q for adding one, whose loss falls with the ratio.
    """
    width, h, points = 2e-3, 1e-4, 2**17
    ratios_up = up != backward
    edges = width * np.arange(points + 1)
    x = z * z * np.log(np.maximum(edges, 1e-300)) + 0.5
    cells = [np.diff(ndtr((x - mean) / z)) for mean in (0.0, 1.0)]  # under Q, and with the record
    spectra = [np.fft.rfft(cell, 2 * points) for cell in cells]
    if backward:
        total = np.fft.irfft(spectra[0] ** t, 2 * points)
    else:
        total = np.fft.irfft(spectra[0] ** (t - 1) * spectra[1], 2 * points)
    total = np.maximum(total, 0.0)
    ratio = width * (np.arange(2 * points) + (t if ratios_up else 0)) / t
    with np.errstate(divide="ignore"):
        loss = np.log(ratio) * (-1 if backward else 1)
    kept = (total > 1e-17) & np.isfinite(loss)
    places = (np.ceil if up else np.floor)(loss[kept] / h).astype(int)
    masses = np.bincount(places - places.min(), total[kept])
    size = len(masses) * number
    composed = np.maximum(np.fft.irfft(np.fft.rfft(masses, size) ** number, size), 0.0)
    losses = (np.arange(size) + number * places.min()) * h
    rest = number * max(1 - total[kept].sum(), 0.0) + 1e-12 if up else 0.0
    return float(composed @ -np.expm1(np.minimum(eps - losses, 0.0))) + rest


@pytest.mark.few(3)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("z", "t", "number"), [(2.0, 7, 3), (3.0, 20, 5), (1.5, 12, 1)])
def test_epochs_are_between_the_bounds_of_rounded_ratios(z, t, number, backward):
    eps = 1.2 * math.sqrt(number / t) / z * 2
    low, high = (bracket(z, t, number, eps, up, backward) for up in (False, True))
    h = 2e-4
    pmf = AllocationNode(z, t).pmf(h, -34.0, "add_remove", backward, math.inf)
    size = pmf.probabilities.size * number
    masses = np.fft.irfft(np.fft.rfft(pmf.probabilities, size) ** number, size)
    losses = (np.arange(size) + number * pmf.start) * h
    found = float(np.maximum(masses, 0) @ -np.expm1(np.minimum(eps - losses, 0.0)))
    found += number * pmf.infinity
    assert 1e-5 < low < high < 1.25 * low
    assert low <= found <= min(high, low * 1.25) * (1 + 2e-3)
    assert low <= delta(epochs(z, t, number), eps) * (1 + 1e-9)


def test_many_epochs_are_what_chance_says():
    """Removing a record, by samples of the loss: within five standard errors."""
    z, t, number, eps = 1.0, 60, 4, 1.0
    rng, trials, log_sums = np.random.default_rng(0), 40_000, []
    for _ in range(trials // 2000):
        x = z * rng.standard_normal((2000, number, t))
        x[:, :, 0] += 1
        ratios = np.exp((x - 0.5) / z**2).mean(axis=2)
        log_sums.append(np.log(ratios).sum(axis=1))
    gains = -np.expm1(np.minimum(eps - np.concatenate(log_sums), 0.0))
    mean, error = gains.mean(), gains.std() / math.sqrt(trials)
    found = delta(epochs(z, t, number), eps)
    assert mean - 5 * error < found < (mean + 5 * error) * 1.01


@pytest.mark.parametrize(
    ("z", "t", "number", "to_delta", "low", "high"),
    [(1.5, 2, 3, 1e-5, 3.79953, 3.80445), (2.0, 20, 5, 1e-6, 1.14114, 1.15279)],
)
def test_it_is_between_the_published_bounds(z, t, number, to_delta, low, high):
    """Of PLD_accounting 2.0 (arXiv 2602.17284), to an accuracy of 0.02: 40 and 500 seconds."""
    assert low < epsilon(epochs(z, t, number), to_delta) < high


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("z", "t", "number"),
    [(1.0694, 117, 40), (2.3283, 117, 40), (4.6, 15, 40), (9.0, 6, 60), (0.62, 234, 3)],
)
def test_it_is_below_poisson_steps_of_the_same_noise(z, t, number):
    poisson = epsilon([(PoissonGaussian(z, 1 / t), t * number)], 1e-5)
    assert 0.93 * poisson < epsilon(epochs(z, t, number), 1e-5) < 0.995 * poisson


@pytest.mark.parametrize("z", [0.04, 0.06, 1e3, 1e5])
def test_very_small_and_large_noise_has_its_bound(z):
    found = epsilon(epochs(z, 100, 3), 1e-5)
    assert 0 <= found <= epsilon([(Gaussian(z), 3)], 1e-5) * (1 + 1e-3)
    assert epsilon(epochs(0.0, 100), 1e-5) == math.inf
    if z > 1:
        poisson = delta([(PoissonGaussian(z, 0.01), 300)], 0.0)
        assert delta(epochs(z, 100, 3), 0.0) == pytest.approx(poisson, rel=0.02)


@pytest.mark.few(8)
@pytest.mark.parametrize("to_delta", [1e-30, 1e-80, 1e-100, 1e-200, 1e-300])
@pytest.mark.parametrize("z", [0.05, 0.06, 0.1, 0.2, 0.5])
def test_masses_too_small_for_floats_are_not_lost(z, to_delta):
    found = epsilon(epochs(z, 1, 1), to_delta)
    assert found >= epsilon([(Gaussian(z), 1)], to_delta) * (1 - 1e-9)
    assert found >= epsilon(epochs(z, 30, 1), to_delta) >= found - math.log(31)


def test_it_composes_with_all_else_and_every_accountant_bounds_it():
    alone = epsilon(epochs(1.0, 100, 10), 1e-5)
    table = ApproximateDP(0.5, 1e-7, "add_remove", "a table")
    steps, own = [(PoissonGaussian(1.0, 0.01), 1000)], epochs(1.0, 100, 10)
    assert alone < epsilon([*own, (table, 1)], 1e-5) < alone + 0.51
    assert alone < epsilon([*own, *steps], 1e-5) < alone + epsilon(steps, 1e-5)
    assert alone == epsilon(own, 1e-5, "zero_out")
    assert StreamingRDPAccountant().epsilon(own, 1e-5) > alone
    curve = epsilon_curve(own[0][0], [0, 5, 10], 1e-5, spent=steps)
    assert curve[0] == pytest.approx(epsilon(steps, 1e-5), rel=1e-3)
    assert curve[2] == pytest.approx(epsilon([*own, *steps], 1e-5), rel=1e-3)
    mixed = epsilon_curve(lambda step: [*own, *steps][step % 2][0], [2, 4], 1e-5)
    assert mixed[1] == pytest.approx(epsilon([(own[0][0], 2), (steps[0][0], 2)], 1e-5), rel=1e-3)


def test_exchanged_records_are_refused():
    with pytest.raises(RefusedSetting, match=r"uses the secret.*'add_remove' or 'zero_out'"):
        epsilon(epochs(1.0, 100), 1e-5, "replace_one")


# -- in a plan -------------------------------------------------------------------------------------------


def test_an_epoch_is_one_charge_in_a_budget_that_is_met():
    config = PrivacyConfig(target_delta=1e-5, target_epsilon=2.0, sampling=RandomAllocation())
    budget = Budget(config, BATCHES, ())
    scale = budget.scale(60, 0, 0.0)
    found = budget.plan(scale, 0, 60)
    assert found.history(0, 60) == epochs(scale, 20, 3)
    assert 1.99 < epsilon(found.history(0, 60), 1e-5) <= 2.0
    assert budget.affordable(found, 0, 60) >= 60
    tight = budget.plan(0.9 * scale, 0, 60)
    fits = [epsilon(tight.history(0, steps), 1e-5) <= 2.0 for steps in (20, 40)]
    assert budget.affordable(tight, 0, 60) == 20 * sum(fits) > 0
    assert type(budget.guard(found, 0, 60, 60)) is FixedGuard
    short = budget.plan(scale, 5, 33)
    assert [short.event(step).steps for step in (5, 25)] == [20, 13]
    assert short.noise == IndependentNoise()
    events = [short.event(step) for step in (5, 25)]
    assert [event_from_dict(event.to_dict()) for event in events] == events
    assert Charges({"a run": [(event, 1) for event in events]}).steps == 33


def test_a_lost_epoch_costs_at_least_one():
    """A file knows an event of one step; with other epochs before it, a full batch is the bound."""
    config = PrivacyConfig(target_delta=1e-5, noise_multiplier=1.0, sampling=RandomAllocation())
    found = Budget(config, BATCHES, ()).plan(1.0, 0, 60)
    record = {"costliest": costliest_events(found, 0, 60)}
    assert _costliest(record, [], 2) == RandomAllocationEpoch(1.0, 20)
    assert _costliest(record, [(Gaussian(1.0), 3)], 2) == Gaussian(1.0)
