"""The mechanism: ask, charge, answer, noise, tell, post-process, in this order and no other."""

from __future__ import annotations

import io
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp.accounting import Gaussian, PoissonGaussian
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.journal import read_journal
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.estimators import AbstractEstimator, MeanGradient, State
from lightning_dp.mechanism import BudgetExhausted, Mechanism
from lightning_dp.noise import NoiseSource
from lightning_dp.plan import NoisePlan
from lightning_dp.postprocessing import AbstractPostProcessor, Momentum
from lightning_dp.query import BoundedSum, Query, Release, Term
from lightning_dp.sampling import FullBatch, Poisson
from lightning_dp.schedules import AbstractSchedule, Constant, Exponential
from lightning_dp.world import World

RATE, BATCH_SIZE, SIZE = 0.1, 20.0, 6
PARAMS = [torch.zeros(2, 2), torch.zeros(2)]


@dataclass(frozen=True)
class Asking(AbstractEstimator):
    """Asks for a multiple of the planned noise, counts its steps and writes down its calls."""

    calls: list[str] = field(default_factory=list, repr=False)
    factor: float = 1.0
    clip_norm: float = 1.0

    def init(self, params: Sequence[Tensor]) -> State:
        self.calls.append("init")
        return {"told": 0}

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query:
        self.calls.append(f"ask {step}")
        return Query((Term(),), self.clip_norm, self.factor * noise_multiplier)

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor, State]:
        self.calls.append("tell")
        return released.value, {"told": state["told"] + 1}


@dataclass(frozen=True)
class Doubled(AbstractPostProcessor):
    """Doubles the estimate."""

    calls: list[str] = field(default_factory=list, repr=False)

    def init(self, params: Sequence[Tensor]) -> State:
        return {"size": sum(param.numel() for param in params)}

    def apply(self, state: State, estimate: Tensor) -> tuple[Tensor, State]:
        self.calls.append(f"post-process {state['size']}")
        return 2 * estimate, state


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

    def normal(self, size: int, device: torch.device) -> Tensor:
        self.calls.append("noise")
        return super().normal(size, device)


def make(
    *,
    noise_multiplier: float = 1.0,
    schedule: AbstractSchedule | None = None,
    estimator: AbstractEstimator | None = None,
    postprocessing: tuple[AbstractPostProcessor, ...] = (),
    ledger: Ledger | None = None,
    limit: float = math.inf,
    noise: NoiseSource | None = None,
    directory: Path | None = None,
) -> Mechanism:
    ledger = Ledger() if ledger is None else ledger
    ledger.begin("run-1", directory)
    schedule = Constant() if schedule is None else schedule
    return Mechanism(
        plan=NoisePlan(
            noise_multiplier,
            schedule,
            Poisson(),
            RATE,
            MeanGradient(1.0) if estimator is None else estimator,
        ),
        postprocessing=postprocessing,
        ledger=ledger,
        guard=FixedGuard(limit),
        num_records=BATCH_SIZE / RATE,
        noise=NoiseSource(0) if noise is None else noise,
        world=World(),
    )


def step(mechanism: Mechanism, *values: Tensor) -> Tensor:
    query = mechanism.ask(PARAMS)
    for value in values:
        mechanism.answer(BoundedSum(value, query.clip_norm))
    return mechanism.tell(PARAMS)


# -- order ---------------------------------------------------------------------------------------


def test_a_step_asks_charges_answers_noises_tells_and_postprocesses_in_this_order():
    calls: list[str] = []
    mechanism = make(
        estimator=Asking(calls),
        postprocessing=(Doubled(calls), Doubled(calls)),
        ledger=RecordingLedger(calls),
        noise=RecordingNoise(calls),
    )
    for number in range(2):
        mechanism.ask(PARAMS)
        calls.append("answer")
        mechanism.answer(BoundedSum(torch.ones(SIZE), 1.0))
        mechanism.tell(PARAMS)
        assert mechanism.step == number + 1

    one_step = ["charge", "answer", "noise", "tell", "post-process 6", "post-process 6"]
    assert calls == ["init", "ask 0", *one_step, "ask 1", *one_step]


def test_the_step_is_charged_on_the_disk_before_ask_returns(tmp_path):
    mechanism = make(noise_multiplier=1.5, directory=tmp_path)
    for number in (1, 2, 3):
        mechanism.ask(PARAMS)
        assert mechanism.ledger.journal_path is not None
        runs = read_journal(mechanism.ledger.journal_path)[1]
        assert runs == {"run-1": [(PoissonGaussian(1.5, RATE), number)]}
        mechanism.tell(PARAMS)
    mechanism.ledger.end()


def test_a_charge_that_fails_prevents_the_query(tmp_path):
    resource = pytest.importorskip("resource")
    mechanism = make(directory=tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            mechanism.ask(PARAMS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)

    assert mechanism.query is None
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before answer\(\)"):
        mechanism.answer(BoundedSum(torch.ones(SIZE), 1.0))
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before tell\(\)"):
        mechanism.tell(PARAMS)


def test_a_step_cannot_be_answered_or_told_twice():
    mechanism = make()
    step(mechanism, torch.ones(SIZE))
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before answer\(\)"):
        mechanism.answer(BoundedSum(torch.ones(SIZE), 1.0))
    with pytest.raises(RuntimeError, match=r"ask\(\) must come before tell\(\)"):
        mechanism.tell(PARAMS)


def test_a_step_that_was_not_finished_is_charged_and_its_answers_are_forgotten():
    mechanism = make(noise_multiplier=0.0)
    mechanism.ask(PARAMS)
    mechanism.answer(BoundedSum(torch.full((SIZE,), 1e6), 1.0))

    estimate = step(mechanism, torch.ones(SIZE))

    assert torch.equal(estimate, torch.ones(SIZE) / BATCH_SIZE)
    assert mechanism.ledger.steps == 2
    assert mechanism.step == 1


def test_a_dropped_step_stays_charged():
    mechanism = make()
    mechanism.ask(PARAMS)
    mechanism.drop()
    assert mechanism.query is None
    assert mechanism.ledger.steps == 1
    with pytest.raises(RuntimeError, match="No step was begun"):
        mechanism.tell(PARAMS)


# -- values --------------------------------------------------------------------------------------


def test_without_noise_the_estimate_is_the_sum_over_the_expected_batch_size():
    mechanism = make(noise_multiplier=0.0)
    first, second = torch.arange(6.0), torch.full((6,), 0.5)

    estimate = step(mechanism, first, second)

    torch.testing.assert_close(estimate, (first + second) / BATCH_SIZE)


def test_the_noise_of_the_estimate_is_multiplier_times_clip_norm_over_the_batch_size():
    mechanism = make(noise_multiplier=3.0, estimator=MeanGradient(0.5))
    params = [torch.zeros(20_000)]
    mechanism.ask(params)

    deviation = float(mechanism.tell(params).std())

    assert deviation == pytest.approx(3.0 * 0.5 / BATCH_SIZE, rel=0.03)


def test_an_empty_batch_releases_pure_noise_and_is_charged():
    mechanism = make()
    estimate = step(mechanism)
    assert (estimate != 0).all()
    assert estimate.dtype == torch.float32
    assert mechanism.ledger.steps == mechanism.step == 1
    assert torch.equal(step(make(noise_multiplier=0.0)), torch.zeros(SIZE))


def test_each_step_is_charged_as_the_plan_says():
    mechanism = make(noise_multiplier=2.0, schedule=Exponential(rate=0.5))
    planned = [mechanism.plan.event(number) for number in range(4)]

    for _ in range(4):
        step(mechanism)

    assert [event for event, _ in mechanism.ledger.history()] == planned
    assert planned[0] == PoissonGaussian(2.0, RATE)
    assert planned[3] == PoissonGaussian(2.0 * math.exp(-1.5), RATE)


def test_more_noise_than_planned_is_charged_as_planned():
    # The plan is an envelope: ε may not depend on noise that was chosen after seeing releases.
    mechanism = make(noise_multiplier=2.0, estimator=Asking(factor=1.5))
    step(mechanism)
    assert mechanism.ledger.history() == [(PoissonGaussian(2.0, RATE), 1)]


def test_postprocessors_are_applied_in_order():
    total = torch.ones(SIZE)
    states = (Momentum(0.5), Doubled())
    mechanism = make(noise_multiplier=0.0, postprocessing=states)

    step(mechanism, total)
    estimate = step(mechanism, torch.zeros(SIZE))

    # The average of 1 and 0 with weights 1/3 and 2/3, then doubled.
    torch.testing.assert_close(estimate, torch.full((SIZE,), 2 / 3 / BATCH_SIZE))


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_step_beyond_the_limit_is_refused_before_anything_is_charged_or_asked(limit):
    calls: list[str] = []
    mechanism = make(estimator=Asking(calls), limit=limit)
    for _ in range(limit):
        assert not mechanism.exhausted
        step(mechanism)
    asked = list(calls)

    assert mechanism.exhausted
    with pytest.raises(BudgetExhausted, match=f"another step after {limit}"):
        mechanism.ask(PARAMS)

    assert mechanism.ledger.steps == limit
    assert calls == asked


def test_charges_of_unfinished_steps_count_towards_the_limit():
    mechanism = make(limit=2)
    mechanism.ask(PARAMS)
    step(mechanism)
    assert mechanism.step == 1
    assert mechanism.exhausted


@pytest.mark.parametrize("clip_norm", [0.5, 1.01, 2.0, math.inf, math.nan])
def test_an_answer_with_another_bound_than_asked_for_is_refused(clip_norm):
    mechanism = make()
    mechanism.ask(PARAMS)
    with pytest.raises(RuntimeError, match=f"bounded by {clip_norm}, the query asked for"):
        mechanism.answer(BoundedSum(torch.ones(SIZE), clip_norm))


@pytest.mark.parametrize("factor", [0.999, 0.5, 0.0])
def test_an_estimator_that_asks_for_less_noise_than_planned_is_refused_and_not_charged(factor):
    mechanism = make(estimator=Asking(factor=factor))
    with pytest.raises(RuntimeError, match=r"below the planned 1\.0: the plan is an envelope"):
        mechanism.ask(PARAMS)
    assert mechanism.ledger.steps == 0
    assert mechanism.query is None


@dataclass(frozen=True)
class Broken(AbstractSchedule):
    value: float

    def __call__(self, step: int) -> float:
        return self.value


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_schedule_that_is_not_positive_is_refused_and_not_charged(value):
    mechanism = make(schedule=Broken(value))
    with pytest.raises(ValueError, match=f"gives {value} at step 0"):
        mechanism.ask(PARAMS)
    assert mechanism.ledger.steps == 0


def test_a_full_batch_plan_books_plain_gaussians():
    assert NoisePlan(1.5, Constant(), FullBatch(), 1.0).event(3) == Gaussian(1.5)


# -- state ---------------------------------------------------------------------------------------


def trajectory(mechanism: Mechanism, totals: list[Tensor]) -> list[Tensor]:
    return [step(mechanism, total) for total in totals]


def through_a_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("saved_after", [0, 1, 3])
def test_a_resumed_mechanism_continues_the_trajectory_of_the_uninterrupted_one(saved_after):
    totals = [torch.randn(SIZE, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def fresh(noise: NoiseSource) -> Mechanism:
        return make(
            noise=noise,
            schedule=Exponential(0.3),
            estimator=Asking(),
            postprocessing=(Momentum(0.8),),
        )

    expected = trajectory(fresh(NoiseSource(5)), totals)

    noise = NoiseSource(5)
    first = fresh(noise)
    before = trajectory(first, totals[:saved_after])
    resumed = fresh(noise)
    resumed.load_state_dict(through_a_checkpoint(first.state_dict()))
    after = trajectory(resumed, totals[saved_after:])

    torch.testing.assert_close(torch.stack(before + after), torch.stack(expected))
    assert resumed.step == 6
    assert resumed.state_dict()["estimator"] == {"told": 6}


def test_a_state_saved_is_not_changed_by_the_steps_after_it():
    mechanism = make(postprocessing=(Momentum(0.8),))
    step(mechanism, torch.ones(SIZE))
    state = mechanism.state_dict()
    before = state["postprocessing"][0]["average"].clone()

    step(mechanism, torch.ones(SIZE))

    assert state["step"] == 1
    assert torch.equal(state["postprocessing"][0]["average"], before)


def test_in_the_middle_of_a_step_the_state_holds_released_values_only():
    mechanism = make(postprocessing=(Momentum(0.5),))
    step(mechanism, torch.ones(SIZE))
    before = through_a_checkpoint(mechanism.state_dict())
    mechanism.ask(PARAMS)
    mechanism.answer(BoundedSum(torch.full((SIZE,), 12345.0), 1.0))

    state = mechanism.state_dict()

    assert set(state) == {"step", "estimator", "postprocessing", "schedule", "unasked"}
    assert repr(state) == repr(before)


def test_a_sum_that_is_not_noised_does_not_print_its_values():
    total = BoundedSum(torch.full((SIZE,), 12345.0), 1.0)
    assert "12345" not in repr(total)
    assert repr(total) == "BoundedSum(clip_norm=1.0)"
    mechanism = make()
    mechanism.ask(PARAMS)
    mechanism.answer(total)
    assert "12345" not in repr(mechanism)
