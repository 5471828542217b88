"""Ask, charge, answer, noise, tell, post-process: in this order and no other."""

from __future__ import annotations

import io
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting.events import PoissonRound
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.journal import read_journal
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import (
    BoundedSum,
    Query,
    Release,
    State,
    Term,
    add_noise,
    begin_with_noise,
)
from lightning_dp.estimators import AbstractEstimator, Diff2, Storm, Traits, share_of_noise
from lightning_dp.mechanism import BudgetExhausted, Mechanism
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.postprocessing import LaplacianSmoothing, Momentum
from lightning_dp.sampling import FullBatch, Poisson
from lightning_dp.schedules import (
    AbstractAdaptiveSchedule,
    AbstractSchedule,
    Constant,
    Exponential,
)


class RecordingLedger(Ledger):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def charge(self, event: Any) -> None:
        super().charge(event)
        self.calls.append("charge")


class RecordingNoise(NoiseSource):
    def __init__(self, calls: list[str]) -> None:
        super().__init__(seed=0)
        self.calls = calls

    def add_normal(self, vector: Tensor, std: float) -> None:
        self.calls.append("noise")
        super().add_normal(vector, std)


def test_a_step_asks_charges_answers_noises_tells_and_postprocesses_in_this_order(trial):
    calls: list[str] = []
    mechanism = trial.make(
        estimator=trial.Asking(calls),
        postprocessing=(trial.Doubled(calls), trial.Doubled(calls)),
        ledger=RecordingLedger(calls),
        noise=RecordingNoise(calls),
    )
    for number in range(2):
        mechanism.ask(trial.params)
        calls.append("answer")
        mechanism.answer(BoundedSum(torch.ones(trial.size), 1.0))
        mechanism.tell(trial.params)
        assert mechanism.step == number + 1

    one_step = ["charge", "answer", "noise", "tell", "post-process 6", "post-process 6"]
    assert calls == ["init", "ask 0", *one_step, "ask 1", *one_step]


def test_the_step_is_charged_on_the_disk_before_ask_returns(tmp_path, trial):
    mechanism = trial.make(noise_multiplier=1.5, directory=tmp_path)
    for number in (1, 2, 3):
        mechanism.ask(trial.params)
        assert mechanism.ledger.journal_path is not None
        runs = read_journal(mechanism.ledger.journal_path)[1]
        assert runs == {"run-1": [(PoissonGaussian(1.5, trial.rate), number)]}
        mechanism.tell(trial.params)
    mechanism.ledger.end()


def test_a_charge_that_fails_prevents_the_query(tmp_path, trial):
    resource = pytest.importorskip("resource")
    mechanism = trial.make(directory=tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            mechanism.ask(trial.params)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)

    assert mechanism.query is None
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before answer\(\)"):
        mechanism.answer(BoundedSum(torch.ones(trial.size), 1.0))
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before tell\(\)"):
        mechanism.tell(trial.params)


def test_a_step_cannot_be_answered_or_told_twice(trial):
    mechanism = trial.make()
    trial.step(mechanism, torch.ones(trial.size))
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before answer\(\)"):
        mechanism.answer(BoundedSum(torch.ones(trial.size), 1.0))
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before tell\(\)"):
        mechanism.tell(trial.params)


def test_a_step_that_was_not_finished_is_charged_and_its_answers_are_forgotten(trial):
    mechanism = trial.make(noise_multiplier=0.0)
    mechanism.ask(trial.params)
    mechanism.answer(BoundedSum(torch.full((trial.size,), 1e6), 1.0))

    estimate = trial.step(mechanism, torch.ones(trial.size))

    assert torch.equal(estimate, torch.ones(trial.size) / trial.batch_size)
    assert mechanism.ledger.steps == 2
    assert mechanism.step == 1


def test_a_dropped_step_stays_charged(trial):
    mechanism = trial.make()
    mechanism.ask(trial.params)
    mechanism.drop()
    assert mechanism.query is None
    assert mechanism.ledger.steps == 1
    with pytest.raises(RuntimeError, match="No step was begun"):
        mechanism.tell(trial.params)


# -- a sum that begins with its noise, which is drawn while the gradients are computed -----------


SIZE = 100_001
PARAMS = (torch.zeros(SIZE - 1), torch.zeros(1))
QUERY = Query((Term(),), clip_norm=0.5, noise_multiplier=3.0)


def noise(source: NoiseSource, size: int, std: float) -> Tensor:
    values = torch.zeros(size)
    source.add_normal(values, std)
    return values


class Threads(NoiseSource):
    """Counts the vectors that threads were given."""

    begun = 0

    def begin_normal(self, vector: Tensor, std: float) -> Callable[[], None]:
        self.begun += 1
        return super().begin_normal(vector, std)


def estimate(mechanism: Mechanism, parts: list[Tensor], *, is_begun: bool, adds: bool) -> Tensor:
    """Of one step, whose chunks have these sums; added to the sum so far, or made by themselves."""
    query = mechanism.ask(PARAMS)
    assert query is not None
    for part in parts:
        if is_begun:
            mechanism.begin_noise(PARAMS)  # once a step, whatever chunks there are
        so_far = mechanism.so_far
        if so_far is not None and adds:
            so_far.value.add_(part)
            mechanism.answer(so_far)
        else:
            mechanism.answer(BoundedSum(part.clone(), query.sensitivity))
    return mechanism.tell(PARAMS)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_begun_sum_is_released_with_the_same_noise_once(count, adds, trial):
    parts = [torch.randn(SIZE) for _ in range(count)]
    begun, plain = Threads(seed=4), Threads(seed=4)
    for _ in range(2):
        first = estimate(trial.make(noise=begun), parts, is_begun=True, adds=adds)
        late = trial.make(noise=plain, spares_memory=True)
        second = estimate(late, parts, is_begun=False, adds=adds)
        torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
    assert begun.begun == 2 and plain.begun == 0
    expected = sum(parts) + noise(NoiseSource(seed=4), SIZE, 1.0)
    fresh = estimate(trial.make(noise=NoiseSource(4)), parts, is_begun=True, adds=adds)
    torch.testing.assert_close(fresh * trial.batch_size, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spares_memory", [False, True])
def test_a_step_without_any_answer_releases_the_noise_that_was_drawn(spares_memory, trial):
    mechanism = trial.make(noise=NoiseSource(seed=2), spares_memory=spares_memory)
    mechanism.ask(PARAMS)
    mechanism.begin_noise(PARAMS)  # which has begun, or not
    released = mechanism.tell(PARAMS) * trial.batch_size
    torch.testing.assert_close(released, noise(NoiseSource(seed=2), SIZE, 1.0))


def test_a_step_that_is_begun_again_releases_noise_that_no_other_does(trial):
    mechanism = trial.make(noise=NoiseSource(seed=2))
    for _ in range(2):
        mechanism.ask(PARAMS)
        mechanism.begin_noise(PARAMS)
    source = NoiseSource(seed=2)
    drawn = [noise(source, SIZE, 1.0) for _ in range(3)]
    released = mechanism.tell(PARAMS) * trial.batch_size
    mechanism.ask(PARAMS)
    later = mechanism.tell(PARAMS) * trial.batch_size
    for half in (slice(SIZE // 2), slice(SIZE // 2, SIZE)):  # drawn by two streams
        # Where no thread had come to the first beginning, the second takes its values.
        (place,) = (k for k in range(2) if torch.allclose(released[half], drawn[k][half]))
        assert torch.allclose(later[half], drawn[1 - place][half]) or torch.allclose(
            later[half], drawn[2][half]
        )


def test_each_rank_begins_with_the_noise_of_its_share():
    shares = [World(rank, 3).share(SIZE) for rank in range(3)]
    for rank, share in enumerate(shares):
        begun = begin_with_noise(QUERY, PARAMS, NoiseSource(7, rank), World(rank, 3))()
        own = torch.zeros(SIZE, dtype=torch.bool)
        own[share] = True
        assert torch.equal(begun.value != 0, own)
        expected = noise(NoiseSource(7, rank), int(own.sum()), 1.5)
        torch.testing.assert_close(begun.value[share], expected)
        assert (begun.clip_norm, begun.noise_std) == (0.5, 1.5)


def test_the_noise_of_a_count_begins_with_it():
    query = replace(QUERY, count_weight=0.75)  # C' = 0.5 · 1.25
    begun = begin_with_noise(query, PARAMS, NoiseSource(1), World())()
    torch.testing.assert_close(begun.value, noise(NoiseSource(1), SIZE + 1, 3 * 0.625))
    released = add_noise(begun, 3.0, NoiseSource(1), World())
    assert released.value is begun.value and released.noise_std == pytest.approx(3 * 0.625)


@pytest.mark.parametrize("noise_multiplier", [1.5, 6.0, 0.0])
def test_a_sum_that_began_with_other_noise_is_not_released(noise_multiplier):
    begun = begin_with_noise(QUERY, PARAMS, NoiseSource(), World())()
    with pytest.raises(ValueError, match=r"began with noise of standard deviation 1\.5"):
        add_noise(begun, noise_multiplier, NoiseSource(), World())


# -- what an estimate is, and what is charged for it ---------------------------------------------


def test_without_noise_the_estimate_is_the_sum_over_the_expected_batch_size(trial):
    mechanism = trial.make(noise_multiplier=0.0)
    first, second = torch.arange(6.0), torch.full((6,), 0.5)

    estimate = trial.step(mechanism, first, second)

    torch.testing.assert_close(estimate, (first + second) / trial.batch_size)


def test_an_empty_batch_releases_pure_noise_and_is_charged(trial):
    mechanism = trial.make()
    estimate = trial.step(mechanism)
    assert (estimate != 0).all()
    assert estimate.dtype == torch.float32
    assert mechanism.ledger.steps == mechanism.step == 1
    assert torch.equal(trial.step(trial.make(noise_multiplier=0.0)), torch.zeros(trial.size))


def test_each_step_is_charged_as_the_plan_says(trial):
    mechanism = trial.make(noise_multiplier=2.0, schedule=Exponential(rate=0.5))
    planned = [mechanism.plan.event(number) for number in range(4)]

    for _ in range(4):
        trial.step(mechanism)

    assert [event for event, _ in mechanism.ledger.history()] == planned
    assert planned[0] == PoissonGaussian(2.0, trial.rate)
    assert planned[3] == PoissonGaussian(2.0 * math.exp(-1.5), trial.rate)


def test_more_noise_than_planned_is_charged_as_planned(trial):
    # The plan is an envelope: ε may not depend on noise that was chosen after seeing releases.
    mechanism = trial.make(noise_multiplier=2.0, estimator=trial.Asking(factor=1.5))
    trial.step(mechanism)
    assert mechanism.ledger.history() == [(PoissonGaussian(2.0, trial.rate), 1)]


def test_postprocessors_are_applied_in_order(trial):
    total = torch.ones(trial.size)
    states = (Momentum(0.5), trial.Doubled())
    mechanism = trial.make(noise_multiplier=0.0, postprocessing=states)

    trial.step(mechanism, total)
    estimate = trial.step(mechanism, torch.zeros(trial.size))

    # The average of 1 and 0 with weights 1/3 and 2/3, then doubled.
    torch.testing.assert_close(estimate, torch.full((trial.size,), 2 / 3 / trial.batch_size))


@dataclass(frozen=True)
class Remembering(AbstractAdaptiveSchedule):
    """Keeps the latest release, and asks for more noise the longer it is."""

    def __call__(self, step: int) -> float:
        return 1.0

    def init(self) -> State:
        return {"latest": [torch.zeros(())]}

    def now(self, state: State, step: int) -> float:
        return 1.0 + float(state["latest"][0].norm())

    def observe(self, state: State, released: Tensor) -> State:
        return {"latest": [released]}


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"estimator": Diff2(5, diff_norm=1e-3)},
        {"estimator": Storm(0.5)},
        {"estimator": Diff2(5, diff_norm=1e-3), "postprocessing": (LaplacianSmoothing(1.0),)},
        {"postprocessing": (Momentum(0.5),)},
        {"schedule": Remembering()},
    ],
    ids=str,
)
def test_what_is_done_to_a_gradient_in_place_is_no_part_of_the_next_step(trial, parts):
    def estimates(do):
        mechanism = trial.make(noise_multiplier=0.1, **parts)
        found = []
        for _ in range(3):
            params = [torch.full_like(each, float(len(found))) for each in trial.params]
            mechanism.ask(params)
            estimate = mechanism.tell(params)
            found.append(estimate.clone())
            do(estimate)
        return torch.stack(found)

    assert torch.equal(estimates(Tensor.zero_), estimates(lambda estimate: None))


# -- the state that a mechanism saves: enough to go on, and released values only -----------------


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("saved_after", [0, 1, 3])
def test_a_resumed_mechanism_continues_the_trajectory_of_the_uninterrupted_one(saved_after, trial):
    totals = [torch.randn(trial.size, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def fresh(noise: NoiseSource) -> Mechanism:
        return trial.make(
            noise=noise,
            schedule=Exponential(0.3),
            estimator=trial.Asking(),
            postprocessing=(Momentum(0.8),),
        )

    whole = fresh(NoiseSource(5))
    expected = [trial.step(whole, total) for total in totals]

    noise = NoiseSource(5)
    first = fresh(noise)
    before = [trial.step(first, total) for total in totals[:saved_after]]
    resumed = fresh(noise)
    resumed.load_state_dict(through_a_checkpoint(first.state_dict()))
    after = [trial.step(resumed, total) for total in totals[saved_after:]]

    torch.testing.assert_close(torch.stack(before + after), torch.stack(expected))
    assert resumed.step == 6
    assert resumed.state_dict()["estimator"] == {"told": 6}


def test_in_the_middle_of_a_step_the_state_holds_released_values_only(trial):
    mechanism = trial.make(postprocessing=(Momentum(0.5),))
    trial.step(mechanism, torch.ones(trial.size))
    before = through_a_checkpoint(mechanism.state_dict())
    mechanism.ask(trial.params)
    mechanism.answer(BoundedSum(torch.full((trial.size,), 12345.0), 1.0))

    state = mechanism.state_dict()

    assert set(state) == {
        "step",
        "ahead",
        "estimator",
        "postprocessing",
        "schedule",
        "unasked",
        "left_over",
        "signal",
        "clip_norm",
        "noise",
    }
    assert (before.pop("ahead"), state.pop("ahead")) == (
        0,
        1,
    )  # steps that are charged, a public count
    assert repr(state) == repr(before)


def test_a_sum_that_is_not_noised_does_not_print_its_values(trial):
    total = BoundedSum(torch.full((trial.size,), 12345.0), 1.0)
    assert "12345" not in repr(total)
    assert repr(total) == "BoundedSum(clip_norm=1.0, noise_std=None)"
    mechanism = trial.make()
    mechanism.ask(trial.params)
    mechanism.answer(total)
    assert "12345" not in repr(mechanism)


# -- what a mechanism refuses, before anything is charged ----------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_step_beyond_the_limit_is_refused_before_anything_is_charged_or_asked(limit, trial):
    calls: list[str] = []
    mechanism = trial.make(estimator=trial.Asking(calls), limit=limit)
    for _ in range(limit):
        assert not mechanism.exhausted
        trial.step(mechanism)
    asked = list(calls)

    assert mechanism.exhausted
    with pytest.raises(BudgetExhausted, match=f"another step after {limit}"):
        mechanism.ask(trial.params)

    assert mechanism.ledger.steps == limit
    assert calls == asked


def test_charges_of_unfinished_steps_count_towards_the_limit(trial):
    mechanism = trial.make(limit=2)
    mechanism.ask(trial.params)
    trial.step(mechanism)
    assert mechanism.step == 1
    assert mechanism.exhausted


@pytest.mark.parametrize("clip_norm", [0.5, 1.01, 2.0, math.inf, math.nan])
def test_an_answer_with_another_bound_than_asked_for_is_refused(clip_norm, trial):
    mechanism = trial.make()
    mechanism.ask(trial.params)
    with pytest.raises(RuntimeError, match=f"bounded by {clip_norm}, the query asked for"):
        mechanism.answer(BoundedSum(torch.ones(trial.size), clip_norm))


@pytest.mark.parametrize("factor", [0.999, 0.5, 0.0])
def test_an_estimator_that_asks_for_less_noise_than_planned_is_refused_and_not_charged(
    factor, trial
):
    mechanism = trial.make(estimator=trial.Asking(factor=factor))
    with pytest.raises(RuntimeError, match=r"below the planned 1\.0: the plan is an envelope"):
        mechanism.ask(trial.params)
    assert mechanism.ledger.steps == 0
    assert mechanism.query is None


@dataclass(frozen=True)
class Broken(AbstractSchedule):
    value: float

    def __call__(self, step: int) -> float:
        return self.value


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_schedule_that_is_not_positive_is_refused_and_not_charged(value, trial):
    mechanism = trial.make(schedule=Broken(value))
    with pytest.raises(ValueError, match=f"gives {value} at step 0"):
        mechanism.ask(trial.params)
    assert mechanism.ledger.steps == 0


def test_a_full_batch_plan_books_plain_gaussians():
    assert NoisePlan(1.5, Constant(), FullBatch(), 1.0).event(3) == Gaussian(1.5)


# -- several queries on one batch: charged as one, and never with less noise than was planned ----


@dataclass(frozen=True)
class Round(AbstractEstimator):
    """Asks queries with these multipliers on one batch."""

    multipliers: tuple[float, ...]
    says: int = 0
    asks: int = 99

    @property
    def traits(self) -> Traits:
        return Traits(queries_per_step=self.says or len(self.multipliers))

    def init(self, params: Sequence[Tensor]) -> State:
        return {"asked": 0}

    def ask(self, state: State, params: Sequence[Tensor], step: int, z: float) -> Query | None:
        asked = state["asked"]
        return Query((Term(),), 1.0, self.multipliers[asked]) if asked < self.asks else None

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor | None, State]:
        asked = state["asked"] + 1
        done = asked == len(self.multipliers)
        return (released.value if done else None), {"asked": 0 if done else asked}


def mechanism_of(estimator: AbstractEstimator, z: float) -> Mechanism:
    ledger = Ledger()
    ledger.begin("run")
    plan = NoisePlan(z, Constant(), Poisson(), 0.1, estimator)
    return Mechanism(plan, (), ledger, FixedGuard(math.inf), 10, NoiseSource(0), World())


THREE = [torch.zeros(3)]


def one_round(machine: Mechanism) -> list[bool]:
    """Make a round; one True for each further query that was answered."""
    answered: list[bool] = []

    def answer() -> None:
        machine.answer(BoundedSum(torch.zeros(3), 1.0))
        answered.append(True)

    machine.ask(THREE)
    machine.tell(THREE, answer)
    return answered


@pytest.mark.parametrize("z", [0.37, 1.0, 1.1, 3.3])
def test_equal_shares_of_the_noise_are_never_below_the_plan_by_rounding(z):
    for queries in (*range(1, 40), 100, 1000, 12345):
        shares = (share_of_noise(z, queries),) * queries
        together = PoissonRound(shares, 1.0).pair[0]
        assert z <= together <= z * (1 + 1e-12)
        one_round(mechanism_of(Round(shares[:50]), z))


def test_unequal_shares_are_composed():
    one_round(mechanism_of(Round((2.0, 3.0, 6.0)), 1 / math.sqrt(1 / 4 + 1 / 9 + 1 / 36) - 1e-12))


@pytest.mark.parametrize("multipliers", [(1.0, 1.0), (1.5, 1.5, 1.7), (1.5, 0.5), (1.5, 1.5, 0.0)])
def test_booking_a_round_as_one_of_its_queries_is_refused_before_the_data_are_touched(multipliers):
    machine = mechanism_of(Round(multipliers), 1.0)
    machine.ask(THREE)
    answers: list[None] = []
    with pytest.raises(RuntimeError, match=r"queries on one batch.*the plan is an envelope"):
        machine.tell(THREE, lambda: answers.append(None))
    assert len(answers) < len(multipliers) - 1 and machine.step == 0
    assert not machine.is_begun and machine.query is None
    assert machine.ledger.steps == 1  # what was asked is charged


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"says": 2}, r"no estimate after 2 queries at step 0.*queries_per_step=2"),
        ({"asks": 1}, "asks nothing at step 0, and has no estimate"),
    ],
)
def test_an_estimator_asks_as_often_as_it_says_until_it_has_an_estimate(options, match):
    machine = mechanism_of(Round((9.0, 9.0, 9.0), **options), 1.0)
    machine.ask(THREE)
    with pytest.raises(RuntimeError, match=match):
        machine.tell(THREE, lambda: None)


@dataclass(frozen=True)
class LateRound(Round):
    """Asks nothing at first, and then a query after all."""

    def ask(self, state: State, params: Sequence[Tensor], step: int, z: float) -> Query | None:
        return super().ask(state, params, step, z) if state["asked"] else None


def test_a_step_that_asked_nothing_and_was_not_charged_asks_nothing_later():
    machine = mechanism_of(LateRound((9.0, 9.0, 9.0)), 1.0)
    assert machine.ask(THREE) is None
    answers: list[None] = []
    with pytest.raises(RuntimeError, match="asked nothing at step 0, which was not charged"):
        machine.tell(THREE, lambda: answers.append(None))
    assert not answers and machine.query is None
    assert machine.ledger.steps == 0


def test_further_queries_need_somebody_who_answers():
    machine = mechanism_of(Round((2.0, 2.0)), 1.0)
    machine.ask(THREE)
    with pytest.raises(RuntimeError, match="needs answer_again="):
        machine.tell(THREE)


def test_a_round_that_breaks_off_is_charged_and_begun_again():
    machine = mechanism_of(Round((2.0, 2.0)), 1.0)
    machine.ask(THREE)

    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.tell(THREE, fail)
    assert machine.state_dict()["estimator"] == {"asked": 0}
    assert one_round(machine) == [True]
    assert (machine.step, machine.ledger.steps) == (1, 2)
