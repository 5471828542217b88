"""Poisson batches with a limit: who is in them, and what they cost, against all of small cases."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import scipy.stats
from dp_accounting.dp_event import SelfComposedDpEvent, TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import PLDAccountant as GooglePLD
from dp_accounting.privacy_accountant import NeighboringRelation

from lightning_dp import Poisson, PrivacyConfig, TruncatedPoisson, UserLevel
from lightning_dp._noise import random_generator
from lightning_dp._refusals import RefusedSetting
from lightning_dp._world import World
from lightning_dp.accounting import (
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    delta,
    epsilon,
)
from lightning_dp.accounting._pmf import node_of
from lightning_dp.accounting.events import TruncatedGaussian, event_from_dict
from lightning_dp.noise_plan import Budget
from lightning_dp.sampling import AbstractSampling, BatchPlan
from lightning_dp.schedules import AbstractAdaptiveSchedule, Exponential
from lightning_dp.strategies.data import check_limit

BATCHES = BatchPlan(1000, 0.05, chunks_per_step=1, steps_per_epoch=20)
LIMITED = TruncatedPoisson(65)


# -- who is in a batch ------------------------------------------------------------------------------


def test_no_batch_is_above_the_limit_and_smaller_ones_are_poisson():
    sizes = []
    for seed in range(400):
        plain = Poisson().draw(1000, 0.05, random_generator(seed))
        cut = TruncatedPoisson(55).draw(1000, 0.05, random_generator(seed))
        assert len(set(cut.tolist())) == len(cut) == min(55, len(plain))
        assert set(cut.tolist()) <= set(plain.tolist())
        sizes.append(len(plain))
    assert max(sizes) > 55 > min(sizes)


def test_those_who_are_left_are_a_uniform_choice():
    counts, rng, trials = np.zeros(40), random_generator(3), 8000
    for _ in range(trials):
        counts[TruncatedPoisson(5).draw(40, 0.25, rng)] += 1
    size = np.arange(41)
    rate = np.minimum(size, 5) @ scipy.stats.binom(40, 0.25).pmf(size) / 40
    spread = ((counts - trials * rate) ** 2).sum() / (trials * rate * (1 - rate))
    assert 1e-4 < scipy.stats.chi2(40).cdf(spread) < 1 - 1e-4


def test_a_limit_that_would_cut_most_batches_is_refused(plan_of):
    assert plan_of(LIMITED) == plan_of(Poisson())
    assert plan_of(TruncatedPoisson(51), world_size=2).sample_rate == 0.1
    with pytest.raises(RefusedSetting, match=r"draws 50 records a step on average.*limit of 85"):
        plan_of(TruncatedPoisson(50))


def test_what_it_costs_is_asked_for_with_the_records_of_a_process():
    with pytest.raises(RefusedSetting, match=r"TruncatedPoisson\(limit=65\).*Trainer's run"):
        LIMITED.event(1.0, 0.05)
    events = [LIMITED.among(BATCHES, ranks).event(1.0, 0.05) for ranks in (1, 3)]
    assert events == [TruncatedGaussian(1.0, 0.05, 65, n) for n in (1000, 334)]
    assert [event_from_dict(event.to_dict()) for event in events] == events


# -- several processes -------------------------------------------------------------------------------


def test_one_record_less_moves_others_to_another_process_and_its_limit():
    """Records of even places have +1, others -1: whose limit they share is in the spread of the sum."""
    rng, sampling, rate, draws = random_generator(2), TruncatedPoisson(52), 0.05, 2000
    signs = np.where(np.arange(2000) % 2 == 0, 1.0, -1.0)
    shares = {}
    for less, data in (("none", signs), ("the middle", np.delete(signs, 1000))):
        parts = [data[rank::2] for rank in (0, 1)]
        sums = [
            sum(part[sampling.draw(len(part), rate, rng)].sum() for part in parts)
            for _ in range(draws)
        ]
        noised = np.array(sums) + 4.0 * rng.standard_normal(draws)
        shares[less] = float(np.mean(np.abs(noised) > 14))
    event = sampling.among(BatchPlan(2000, rate, 1, 20), 2).event(4.0, rate)
    seen = shares["the middle"] - math.exp(0.4) * shares["none"]
    assert seen > 0.04 > 1e-6 > delta(event, 0.4)  # no event of a step: so it is refused


@pytest.mark.parametrize("processes", [1, 2])
def test_a_limit_in_several_processes_needs_records_that_keep_their_places(processes):
    world, by_user = World(0, processes), UserLevel([0, 1], most_rows=2)
    for relation, unit in itertools.product(("add_remove", "replace_one"), (None, by_user)):
        config = PrivacyConfig(
            target_epsilon=1.0, target_delta=1e-5, sampling=LIMITED, relation=relation, unit=unit
        )
        if processes == 1 or (relation, unit) == ("replace_one", None):
            check_limit(config, world)
        else:
            with pytest.raises(RefusedSetting, match="meet the limit of another process"):
                check_limit(config, world)


# -- what it costs -----------------------------------------------------------------------------------


def mixture(values, record, rate, limit):
    """Weights and means of the sum over all samples, and all choices from them, of small data."""
    people = [*values, record] if record is not None else list(values)
    found: dict[float, float] = {}
    for drawn in itertools.product((False, True), repeat=len(people)):
        sample = [value for value, is_in in zip(people, drawn, strict=True) if is_in]
        weight = math.prod(rate if is_in else 1 - rate for is_in in drawn)
        choices = list(itertools.combinations(sample, min(limit, len(sample))))
        for chosen in choices:
            mean = round(sum(chosen), 9)
            found[mean] = found.get(mean, 0.0) + weight / len(choices)
    return found


def profile(pmf, h, eps):
    losses = (pmf.start + np.arange(pmf.probabilities.size)) * h
    return pmf.infinity + float(pmf.probabilities @ -np.expm1(np.minimum(eps - losses, 0.0)))


X = np.linspace(-20, 20, 8001)


def density(found, z):
    weights = list(found.values())
    return np.array(weights) @ scipy.stats.norm.pdf(X, np.array(list(found))[:, None], z)


@pytest.mark.few(8)
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("z", [0.7, 2.0])
@pytest.mark.parametrize(("limit", "rate"), [(1, 0.3), (2, 0.3), (2, 0.7), (3, 0.5), (4, 0.9)])
def test_no_small_data_set_tells_more(relation, z, limit, rate):
    """All data of up to four values and a record, by integrals over the release."""
    for others in ([-1], [1, 1], [-1, -1, -1], [-1, -1, 1], [-1, -1, -1, -1]):
        node = node_of(TruncatedGaussian(z, rate, limit, len(others)))
        pmfs = [node.pmf(5e-3, -34.0, relation, backward, math.inf) for backward in (False, True)]
        swapped = [None] if relation == "add_remove" else [-1.0, 0.0]
        for without in swapped:
            p = density(mixture(others, 1.0, rate, limit), z)
            q = density(mixture(others, without, rate, limit), z)
            for eps in (0.0, 0.3, 1.0, 2.5):
                for a, b, pmf in ((p, q, pmfs[0]), (q, p, pmfs[1])):
                    true = float(np.maximum(a - math.exp(eps) * b, 0).sum() * (X[1] - X[0]))
                    assert true <= profile(pmf, 5e-3, eps) * (1 + 1e-4) + 1e-9


def test_a_record_pushed_out_is_what_the_charge_is_about():
    """With the limit reached for sure, hardly less than the charge is true."""
    others = [-1.0] * 6
    p, q = (density(mixture(others, record, 0.95, 1), 0.7) for record in (1.0, None))
    true = float(np.maximum(p - math.e * q, 0).sum() * (X[1] - X[0]))
    poisson = delta(PoissonGaussian(0.7, 0.95 / 6), 1.0)
    assert true > 1.5 * poisson
    assert true < delta(TruncatedGaussian(0.7, 0.95, 1, 6), 1.0)


@pytest.mark.parametrize(("limit", "excess"), [(120, 0.02), (140, 0.01), (160, 2e-3)])
def test_it_is_never_below_another_accountant_and_close(limit, excess):
    """An accountant that averages over how far a sample is too large, and so may be a little lower."""
    oracle = GooglePLD(NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
    one = TruncatedSubsampledGaussianDpEvent(10_001, 0.01, limit, 1.0)
    oracle.compose(SelfComposedDpEvent(one, 300))
    expected = oracle.get_epsilon(1e-5)
    found = epsilon([(TruncatedGaussian(1.0, 0.01, limit, 10_000), 300)], 1e-5)
    assert expected * (1 - 2e-3) <= found <= expected * (1 + excess)


@pytest.mark.parametrize("accountant", [PLDAccountant(), StreamingRDPAccountant()], ids=repr)
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_it_costs_as_much_as_poisson_without_the_limit_and_half_the_noise_with_it(
    accountant, relation
):
    def cost(event):
        return accountant.epsilon([(event, 200), (Gaussian(9.0), 2)], 1e-5, relation)

    never = TruncatedGaussian(1.0, 0.02, 1001, 1000)
    always = TruncatedGaussian(1.0, 0.999, 1, 1000)
    assert (never.chance_of_limit, always.chance_of_limit) == (0.0, 1.0)
    assert cost(never) == pytest.approx(cost(PoissonGaussian(1.0, 0.02)), rel=1e-4)
    assert cost(always) == pytest.approx(cost(PoissonGaussian(0.5, 0.999)), rel=1e-4)
    costs = [cost(TruncatedGaussian(1.0, 0.02, limit, 1000)) for limit in (15, 25, 35, 50)]
    assert costs == sorted(costs, reverse=True) and costs[0] > 1.5 * costs[-1]


@pytest.mark.parametrize(("limit", "n", "q"), [(1, 1, 0.3), (50, 1000, 0.05), (90, 1000, 0.05)])
def test_the_chance_of_the_limit_is_a_binomial_tail(limit, n, q):
    k = np.arange(limit, n + 1)
    tail = float(np.exp(scipy.stats.binom(n, q).logpmf(k)).sum())
    assert tail <= TruncatedGaussian(1.0, q, limit, n).chance_of_limit <= tail * (1 + 1e-5)


@pytest.mark.parametrize("n", [2**31 - 1, 2**32 + 120, 10**10, 10**15])
def test_the_chance_of_the_limit_is_right_for_any_number_of_records(n):
    tail = scipy.stats.poisson(100).sf(109)  # of so many records a binomial number is one
    assert TruncatedGaussian(1.0, 100 / n, 110, n).chance_of_limit == pytest.approx(tail, rel=1e-5)
    steps = [(PoissonGaussian(0.05, 100 / n), n)]  # each with little noise
    assert epsilon(steps, 1e-5) == pytest.approx(30_463.4, rel=1e-5)


@pytest.mark.parametrize("backward", [False, True])
def test_a_pmf_has_mass_at_both_ends_whatever_the_chance(backward):
    """Moments are taken from there: with nothing at an end, what is outside would be lost."""
    for limit in (1, 90, 150, 400, 1001):
        node = node_of(TruncatedGaussian(1.0, 0.05, limit, 1000))
        masses = node.pmf(1e-2, -30.0, "add_remove", backward, math.inf).probabilities
        assert masses[0] > 0 < masses[-1]


def test_zero_out_is_refused():
    for ask in (delta, epsilon):
        with pytest.raises(RefusedSetting, match=r"takes the place of another.*'add_remove' or"):
            ask([(TruncatedGaussian(1.0, 0.05, 65, 1000), 1)], 1e-5, "zero_out")


@dataclass(frozen=True)
class Own(AbstractSampling):
    """A limit of one's own, whose event costs less than its pair."""

    has_pairs: ClassVar[bool] = False

    def draw(self, shard_size, sample_rate, rng):
        return Poisson().draw(shard_size, sample_rate, rng)[:65]

    def event(self, noise_multiplier, sample_rate):
        return TruncatedGaussian(noise_multiplier, sample_rate, 65, 1000)


@dataclass(frozen=True)
class AtRunTime(AbstractAdaptiveSchedule):
    """Chooses the noise at run time."""

    def __call__(self, step):
        return 1.0

    def init(self):
        return {}

    def now(self, state, step):
        return 1.0

    def observe(self, state, released):
        return state


@pytest.mark.parametrize("sampling", [LIMITED, Own()])
@pytest.mark.parametrize("schedule", [Exponential(0.1), AtRunTime()])
def test_noise_that_changes_is_refused(sampling, schedule):
    """No guard adds up what is no pair, so nothing would keep noise chosen at run time to a budget."""
    with pytest.raises(ValueError, match="needs the same noise"):
        PrivacyConfig(
            target_epsilon=1.0, target_delta=1e-5, sampling=sampling, noise_schedule=schedule
        )


# -- in a plan -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_a_budget_is_met_and_affords_the_steps(relation):
    config = PrivacyConfig(
        target_delta=1e-5, target_epsilon=2.0, sampling=LIMITED, relation=relation
    )
    budget = Budget(config, BATCHES, [(PoissonGaussian(2.0, 0.05), 10)])
    scale = budget.scale(60, 0, 0.0)
    found = budget.plan(scale, 0, 60)
    whole = [*budget.spent, *found.history(0, 60)]
    assert found.event(7) == TruncatedGaussian(scale, 0.05, 65, 1000)
    assert 1.99 < PLDAccountant().epsilon(whole, 1e-5, relation) <= 2.0
    assert budget.affordable(found, 0, 60) >= 60
    assert 0 < budget.affordable(budget.plan(0.9 * scale, 0, 60), 0, 60) < 60
