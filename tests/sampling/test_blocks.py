"""Batches that depend on each other: parts that take turns, a fixed order, and what they cost."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import scipy.stats
from dp_accounting.dp_event import (
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant as GooglePLD

from lightning_dp import (
    BandedNoise,
    CyclicPoisson,
    FixedOrder,
    IndependentNoise,
    LambdaCGD,
    Poisson,
    PrivacyConfig,
    RandomAllocation,
)
from lightning_dp._noise import random_generator
from lightning_dp.accounting import (
    ApproximateDP,
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    epsilon,
)
from lightning_dp.accounting.calibration import affordable_steps
from lightning_dp.accounting.events import (
    CyclicRound,
    FixedOrderPass,
    counted,
    event_from_dict,
)
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.journal import Charges
from lightning_dp.accounting.pld import epsilon_curve
from lightning_dp.noise_plan import Budget, costliest_events
from lightning_dp.sampling import BatchPlan
from lightning_dp.sampling.blocks import AbstractBlockSampling
from lightning_dp.sampling.loader import ChunkSampler

BATCHES = BatchPlan(1000, 0.05, chunks_per_step=1, steps_per_epoch=20)


def draws(sampling, steps, batches=BATCHES, rank=0, world_size=1, seed=0, start=0):
    draw = sampling.begin(
        batches, range(rank, batches.num_records, world_size), random_generator(seed, 3)
    )
    rng = random_generator(seed, 1)
    return [draw(step, batches.sample_rate, rng) for step in range(start, start + steps)]


def chunks(sampling, draw, steps, batches=BATCHES, **options):
    sampler = ChunkSampler(
        batches, sampling, rank=0, world_size=1, limit=10**9, seed=0, draw=draw, **options
    )
    found = []
    while len(found) < steps:
        found += list(sampler)
    return found


# -- parts that take turns ----------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 3])
def test_no_record_takes_part_twice_in_as_many_steps_as_there_are_parts(start):
    found = draws(CyclicPoisson(7), 60, start=start)
    for i, batch in enumerate(found):
        assert len(set(batch.tolist())) == len(batch)
        for other in found[i + 1 : i + 7]:
            assert not set(batch.tolist()) & set(other.tolist())


def test_each_record_takes_part_as_often_as_in_poisson_batches():
    """Over blocks, since a part lasts for one: uniform parts, and rate b q within them."""
    counts, blocks, rounds = np.zeros(1000), 60, 5
    for seed in range(blocks):
        for batch in draws(CyclicPoisson(8), 8 * rounds, seed=seed):
            counts[batch] += 1
    trials, rate = blocks * rounds, 8 * 0.05
    spread = ((counts - trials * rate) ** 2).sum() / (trials * rate * (1 - rate))
    assert 1e-3 < scipy.stats.chi2(1000).cdf(spread) < 1 - 1e-3
    assert abs(counts.mean() / trials - rate) < 4 * math.sqrt(rate * (1 - rate) / trials / 1000)


def test_the_part_of_a_record_does_not_depend_on_others():
    """One record more at the end leaves all others where they were."""
    more = BatchPlan(1001, 0.05, 1, 20)
    parts = []
    for batches in (BATCHES, more):
        draw = CyclicPoisson(4).begin(batches, range(batches.num_records), random_generator(5, 3))
        parts.append([set(draw(t, 0.25, random_generator(0)).tolist()) - {1000} for t in range(4)])
    assert parts[0] == parts[1]
    assert set().union(*parts[0]) == set(range(1000))  # b q = 1 takes all of a part


def test_ranks_share_the_records_and_parts_are_drawn_anew_in_each_block():
    shards = [
        set(np.concatenate(draws(CyclicPoisson(2), 40, rank=r, world_size=3))) for r in range(3)
    ]
    assert [max(each) for each in shards] <= [333, 332, 332]
    first, second = (np.concatenate(draws(CyclicPoisson(4), 1, seed=seed)) for seed in range(2))
    assert set(first.tolist()) != set(second.tolist())


def test_one_part_is_poisson_sampling_to_the_record():
    draw = CyclicPoisson(1).begin(BATCHES, range(1000), random_generator(0, 3))
    assert chunks(CyclicPoisson(1), draw, 40) == chunks(Poisson(), lambda *_: None, 40)


# -- one record less ---------------------------------------------------------------------------------


class Equal(RandomAllocation):
    """Allocates as a shuffle does, so that a record takes a place away from others."""

    def begin(self, batches, shard, rng, start=0):
        order, size = rng.permutation(len(shard)), -(-len(shard) // batches.steps_per_epoch)
        return lambda step, rate, rng: order[step * size : (step + 1) * size]


def steps_of_each(sampling, names, world_size, rng):
    """The steps of an epoch of two in which each record is, in all processes."""
    batches, found = BatchPlan(len(names), 0.4, 1, 2), dict.fromkeys(names, ())
    for rank in range(world_size):
        shard = range(rank, len(names), world_size)
        is_block = isinstance(sampling, AbstractBlockSampling)
        draw = sampling.begin(batches, shard, rng) if is_block else None
        for step in range(2):
            drawn = draw(step, 0.4, rng) if draw else sampling.draw(len(shard), 0.4, rng)
            for place in drawn:
                found[names[shard[place]]] += (step,)
    return found


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("sampling", [Poisson(), CyclicPoisson(2), RandomAllocation(), Equal()])
def test_without_one_record_others_are_drawn_as_with_it_wherever_it_is(sampling, world_size):
    """Also those that are in another process then: as where the record takes no part, or takes part."""
    rng, rows = random_generator(3), dict[object, Counter]()
    for names in ("abcd", "acd"):
        for _ in range(1000):
            found = steps_of_each(sampling, names, world_size, rng)
            own = found.pop("b", "without")
            rows.setdefault(own, Counter())[tuple(found.values())] += 1
    kinds = set().union(*rows.values())
    table = np.array([[row[kind] for kind in kinds] for row in rows.values()])
    p_value = scipy.stats.chi2_contingency(table).pvalue
    assert p_value < 1e-9 if type(sampling) is Equal else p_value > 1e-4


# -- a fixed order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("start", [0, 7])
def test_records_come_back_after_exactly_a_pass(shuffle, start):
    found = draws(FixedOrder(shuffle), 60, start=start)
    seen: dict[int, list[int]] = {}
    for t, batch in enumerate(found):
        for record in batch.tolist():
            seen.setdefault(record, []).append(t)
    assert len(seen) == 1000
    assert all(np.diff(steps).tolist() == [20, 20] for steps in seen.values())


def test_batches_are_those_of_a_loader_without_shuffling():
    plan = FixedOrder().plan(
        num_records=53, batch_size=5, accumulate=2, world_size=1, loader_length=11
    )
    found = draws(FixedOrder(), 7, plan)
    assert [batch.tolist() for batch in found[:6]] == [
        list(range(start, min(start + 10, 53))) for start in range(0, 53, 10)
    ]
    assert found[6].tolist() == found[0].tolist()


def test_ranks_have_the_order_of_a_distributed_loader_and_all_records():
    plan = FixedOrder().plan(
        num_records=51, batch_size=8, accumulate=1, world_size=2, loader_length=4
    )
    found = [draws(FixedOrder(), 4, plan, rank, 2) for rank in range(2)]
    assert sorted(np.concatenate([2 * np.concatenate(f) + r for r, f in enumerate(found)])) == list(
        range(51)
    )
    assert [len(batch) for batch in found[0]] == [8, 8, 8, 2]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loader_of_all_records_on_each_rank_makes_no_batches_without_records(accumulate):
    """Plan for the loader of a stream, which Lightning leaves whole: it has no sampler to divide."""
    plan = FixedOrder().plan(
        num_records=24, batch_size=2, accumulate=accumulate, world_size=2, loader_length=12
    )
    assert plan.steps_per_epoch == 6 // accumulate
    found = [draws(FixedOrder(), plan.steps_per_epoch, plan, rank, 2) for rank in range(2)]
    assert {len(batch) for of_rank in found for batch in of_rank} == {2 * accumulate}


def test_a_batch_larger_than_the_data_is_all_of_them():
    plan = FixedOrder().plan(
        num_records=5, batch_size=8, accumulate=1, world_size=2, loader_length=1
    )
    assert [len(draws(FixedOrder(), 1, plan, rank, 2)[0]) for rank in range(2)] == [3, 2]


@pytest.mark.parametrize("limit", [20, 13])
def test_the_order_goes_on_where_epochs_of_the_trainer_end_early(limit):
    draw, step = FixedOrder().begin(BATCHES, range(1000), random_generator(0)), 0
    sampler = ChunkSampler(
        BATCHES,
        FixedOrder(),
        rank=0,
        world_size=1,
        limit=limit,
        seed=0,
        draw=draw,
        first_step=lambda: step,
    )
    found = []
    for _epoch in range(3):
        for _, records in zip(range(limit), sampler, strict=False):
            found.append(records[0])
            step += 1
    assert found == [50 * (t % 20) for t in range(3 * limit)]


# -- what it costs ----------------------------------------------------------------------------------


def plan(sampling, noise, steps, z=1.0, **options):
    relation = "zero_out" if isinstance(sampling, FixedOrder) else "add_remove"
    config = PrivacyConfig(
        target_delta=1e-5,
        sampling=sampling,
        noise=noise,
        relation=relation,
        **{"noise_multiplier": z, **options},
    )
    return Budget(config, BATCHES, ()), Budget(config, BATCHES, ()).plan(z, 0, steps)


@pytest.mark.few(2)
@pytest.mark.parametrize(("steps", "rounds"), [(8, 2), (9, 3), (12, 3), (101, 26)])
def test_a_cyclic_run_is_as_many_poisson_rounds_as_another_accountant_finds(steps, rounds):
    _, found = plan(CyclicPoisson(4), BandedNoise(4), steps, z=1.3)
    history = found.history(0, steps)
    oracle = GooglePLD()
    one = PoissonSampledDpEvent(0.2, GaussianDpEvent(1.3))
    oracle.compose(SelfComposedDpEvent(one, rounds))
    assert sum(count for _, count in history) == rounds
    assert PLDAccountant().epsilon(history, 1e-5) == pytest.approx(
        oracle.get_epsilon(1e-5), rel=2e-3
    )
    assert PLDAccountant().epsilon(history, 1e-5) == epsilon(
        [(PoissonGaussian(1.3, 0.2), rounds)], 1e-5
    )


@pytest.mark.parametrize("passes", [1, 2, 5])
@pytest.mark.parametrize("steps", [-3, 0])
def test_a_fixed_order_is_exactly_gaussian(passes, steps):
    steps += 20 * passes
    _, found = plan(FixedOrder(), IndependentNoise(), steps, z=3.0)
    value = PLDAccountant().epsilon(found.history(0, steps), 1e-5, "zero_out")
    assert value == pytest.approx(gdp_epsilon(math.sqrt(passes) / 3.0, 1e-5), rel=1e-9)
    for noise in (LambdaCGD(0.9), BandedNoise(30)):
        _, found = plan(FixedOrder(), noise, steps, z=3.0)
        c = np.abs(np.linalg.inv(_toeplitz(found.noise.inverse(20 * passes))))
        sens = np.linalg.norm(c[:, ::20].sum(1)) / found.noise.column_norm
        value = PLDAccountant().epsilon(found.history(0, steps), 1e-5, "zero_out")
        assert value == pytest.approx(gdp_epsilon(sens / 3.0, 1e-5), rel=1e-6)


def _toeplitz(column):
    return scipy.linalg.toeplitz(column, np.zeros(len(column)))


def test_charges_cover_steps_and_are_counted_as_such():
    _, found = plan(CyclicPoisson(4), BandedNoise(4), 10)
    events = [event for event, _ in [(found.event(t), 1) for t in (0, 4, 8)]]
    assert [event.num_steps for event in events] == [4, 4, 2]
    charges = Charges({"a run": [(event, 1) for event in events]})
    assert (charges.steps, charges.total) == (10, 3)
    assert [event_from_dict(event.to_dict()) for event in events] == events
    assert [found.charges_before(t) for t in (0, 1, 4, 5, 8, 10)] == [0, 1, 1, 2, 2, 3]
    assert (found.charges(4, 4), found.charges(3, 2), found.steps_of(2, 0)) == (1, 1, 8)


def test_a_block_that_begins_later_counts_from_its_own_start():
    budget, _ = plan(FixedOrder(), LambdaCGD(0.9), 60)
    later = budget.plan(1.0, 25, 40)
    assert [later.charges(25, n) for n in (1, 20, 21, 40)] == [1, 1, 2, 2]
    first = budget.plan(1.0, 0, 40)
    assert [later.event(t) for t in (25, 45)] == [first.event(t) for t in (0, 20)]
    assert later.later(25)(1) == later.event(45)


class OwnOrder(FixedOrder):
    """A scheme of a user's own, whose later charges cost more."""


@pytest.mark.parametrize(
    ("sampling", "noise"),
    [
        (CyclicPoisson(4), BandedNoise(4)),
        (FixedOrder(), IndependentNoise()),
        (FixedOrder(), LambdaCGD(0.9)),
        (FixedOrder(), BandedNoise(30)),
        (OwnOrder(), LambdaCGD(0.9)),
    ],
    ids=repr,
)
def test_a_budget_is_met_and_affords_whole_charges(sampling, noise):
    budget, _ = plan(sampling, noise, 60, noise_multiplier=None, target_epsilon=2.0)
    scale = budget.scale(60, 0, 0.0)
    found = budget.plan(scale, 0, 60)
    events = [(found.event(step), 1) for step in range(0, 60, found.window)]
    assert 1.99 < PLDAccountant().epsilon(events, 1e-5, budget.config.relation) <= 2.0
    assert counted(found.history(0, 60)) == counted(events)
    assert budget.affordable(found, 0, 60) >= 60
    tight = budget.plan(0.9 * scale, 0, 60)
    affordable = budget.affordable(tight, 0, 60)
    assert 0 < affordable < 60 and affordable % tight.window == 0
    history = tight.history(0, affordable)
    assert PLDAccountant().epsilon(history, 1e-5, budget.config.relation) <= 2.0
    assert type(budget.guard(found, 0, 60, 60)) is FixedGuard


def test_full_batches_in_a_fixed_order_keep_the_fixed_guard():
    whole = BatchPlan(1000, 1.0, 1, 1)
    config = PrivacyConfig(
        target_delta=1e-5, target_epsilon=2.0, sampling=FixedOrder(), relation="zero_out"
    )
    budget = Budget(config, whole, ())
    assert type(budget.guard(budget.plan(3.0), 0, 5, 5)) is FixedGuard


@pytest.mark.parametrize(
    ("sampling", "noise"), [(CyclicPoisson(4), BandedNoise(4)), (FixedOrder(), LambdaCGD(0.9))]
)
def test_a_lost_charge_costs_at_most_the_costliest(sampling, noise):
    _, found = plan(sampling, noise, 60)
    ((first, event),) = costliest_events(found, 0, 60)["events"]
    worst = event_from_dict(event)
    assert first == 0 and worst.num_steps == 1
    for t in (0, 20, 40):
        assert worst.pair[0] <= found.event(t).pair[0] * (1 + 1e-12)
        assert worst.pair[1] == found.event(t).pair[1]


# -- relations ------------------------------------------------------------------------------------------


PASSES = [(FixedOrderPass(4.0, 100), 9)]


@pytest.mark.parametrize("accountant", [PLDAccountant(), StreamingRDPAccountant()], ids=repr)
def test_add_remove_is_refused_for_a_fixed_order_with_the_cure(accountant):
    for history in (PASSES, [(PoissonGaussian(1.0, 0.01), 9), *PASSES]):
        for ask in (
            lambda h: accountant.epsilon(h, 1e-5),
            lambda h: accountant.delta(h, 1.0),
            lambda h: epsilon_curve(h[-1][0], [9], 1e-5, accountant=accountant),
            lambda h: epsilon_curve(lambda t: h[-1][0], [9], 1e-5, accountant=accountant),
            lambda h: affordable_steps(lambda t: h[-1][0], 9, 3.0, 1e-5, accountant=accountant),
        ):
            with pytest.raises(ValueError, match=r"relation='add_remove' has no bound.*zero_out"):
                ask(history)
        assert accountant.epsilon(history, 1e-5, "zero_out") > 0
    assert accountant.epsilon([(FixedOrderPass(4.0), 0)], 1e-5) == 0
    twice = accountant.epsilon([(Gaussian(4.0 / 3 / 2), 1)], 1e-5)
    assert accountant.epsilon(PASSES, 1e-5, "replace_one") == pytest.approx(twice, rel=1e-9)


@pytest.mark.parametrize("accountant", [PLDAccountant(), StreamingRDPAccountant()], ids=repr)
def test_zero_out_costs_what_add_remove_does_elsewhere(accountant):
    external = ApproximateDP(0.5, 1e-7, relation="add_remove", what="a table")
    for history in (
        [(PoissonGaussian(0.7, 0.02), 300)],
        [(PoissonGaussian(2.0, 0.3), 50), (Gaussian(5.0), 2), (CyclicRound(1.0, 0.1, 4), 3)],
        [(PoissonGaussian(1.0, 0.02), 30), (external, 1)],
    ):
        alike = [accountant.epsilon(history, 1e-5, r) for r in ("zero_out", "add_remove")]
        assert alike[0] == alike[1] > 0
        alike = [accountant.delta(history, 0.5, r) for r in ("zero_out", "add_remove")]
        assert alike[0] == alike[1] > 0


def test_declared_guarantees_speak_of_zero_out_where_they_can():
    def costs(stated, asked):
        return ApproximateDP(0.5, 0.0, relation=stated, what="a table").costs(asked)[0]

    assert [costs("add_remove", "zero_out"), costs("zero_out", "zero_out")] == [0.5, 0.5]
    assert costs("zero_out", "replace_one") == 1.0
    for stated, asked in (("zero_out", "add_remove"), ("replace_one", "zero_out")):
        with pytest.raises(ValueError, match=r"replacing a record only|says nothing about"):
            costs(stated, asked)
