"""Budget guards: a step that would exceed the budget is refused, whatever noise is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dp._refusals import RefusedSetting
from lightning_dp._world import World
from lightning_dp.accounting import Gaussian, PoissonGaussian, StreamingRDPAccountant, epsilon
from lightning_dp.accounting.calibration import affordable_steps
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.accounting.guards import AbstractGuard, FixedGuard, GDPGuard, RDPGuard
from lightning_dp.accounting.rdp import OneOrderAccountant
from lightning_dp.boundary import State
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.config import PrivacyConfig
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import BatchPlan, FullBatch, Poisson
from lightning_dp.schedules import AbstractAdaptiveSchedule
from tests.zoo import private

BUDGET = 2.0
DELTA = 1e-5


@dataclass(frozen=True)
class ByNorm(AbstractAdaptiveSchedule):
    """A toy: noise that follows the norm of what was released."""

    factor: float = 1.0
    least: float = 0.7
    envelope: bool = False

    @property
    def is_envelope(self) -> bool:
        return self.envelope

    def __call__(self, step: int) -> float:
        return 1.0

    def init(self) -> State:
        return {"norm": 0.0}

    def now(self, state: State, step: int) -> float:
        return self.least + self.factor * math.tanh(state["norm"])

    def observe(self, state: State, released: Tensor) -> State:
        return {"norm": float(released.norm())}


def affordable(guard: AbstractGuard, events: list[AbstractEvent]) -> int:
    """The number of these events that the guard lets pass, one after another."""
    for number, event in enumerate(events):
        if not guard.fits(lambda event=event: event):
            return number
        guard.book(event)
    return len(events)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    noises=st.lists(st.floats(9.0, 60.0), min_size=1, max_size=6),
    spent=st.integers(0, 3),
    relation=st.sampled_from(["add_remove", "replace_one"]),
)
def test_gdp_stops_at_the_last_step_that_the_exact_formula_allows(noises, spent, relation):
    before = [(Gaussian(20.0), spent)]
    guard = GDPGuard(BUDGET, DELTA, relation, before)
    events: list[AbstractEvent] = [Gaussian(noises[t % len(noises)]) for t in range(3000)]
    steps = affordable(guard, events)
    after = [[*before, *events[:n]] for n in (steps, steps + 1)]
    assert epsilon(after[0], DELTA, relation) <= BUDGET * (1 + 1e-12)
    assert steps == 3000 or epsilon(after[1], DELTA, relation) > BUDGET
    assert guard.claim(DELTA) == pytest.approx(BUDGET, rel=1e-9)
    assert guard.claim(1e-7) == pytest.approx(gdp_epsilon(guard.mu, 1e-7))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    noises=st.lists(st.floats(0.95, 1.4), min_size=1, max_size=3),
    spent=st.integers(0, 100),
    expected=st.integers(300, 500),
)
def test_rdp_is_never_looser_than_its_order_and_hardly_tighter_than_all_orders(
    noises, spent, expected
):
    before = [(PoissonGaussian(1.0, 0.01), spent)]
    plan: list[tuple[AbstractEvent, int]] = [(PoissonGaussian(1.0, 0.01), expected)]
    guard = RDPGuard(BUDGET, DELTA, "add_remove", before, plan)
    events: list[AbstractEvent] = [
        PoissonGaussian(noises[t % len(noises)], 0.01) for t in range(1500)
    ]
    steps = affordable(guard, events)
    history = [*before, *((event, 1) for event in events[:steps])]
    best_over_orders = StreamingRDPAccountant().epsilon(history, DELTA)
    assert best_over_orders <= BUDGET * (1 + 1e-9)
    assert steps == 1500 or best_over_orders > 0.7 * BUDGET
    assert epsilon(history, DELTA) < BUDGET
    assert guard.claim(DELTA) == pytest.approx(BUDGET)


def steps_that_fit(folder: Path, planned: int, **options: Any) -> tuple[int, PrivateRun]:
    """Return the number of planned steps that a guard lets pass if the noise is the one expected."""
    run = PrivateRun(PrivacyConfig(noise_schedule=ByNorm(), target_delta=DELTA, **options))
    run.use_batches(BatchPlan(10_000, 0.01, 1, 100))
    run.start(planned, World(), folder)
    assert run.mechanism is not None
    event = run.mechanism.plan.event(0)
    return affordable(run.mechanism.guard, [event] * min(planned, 30_000)), run


def test_the_rdp_guard_affords_all_steps_that_the_noise_was_calibrated_for(tmp_path):
    assert steps_that_fit(tmp_path, 1000, target_epsilon=3.0)[0] == 1000


@pytest.mark.parametrize("planned", [3000, 10**9])
def test_the_rdp_guard_makes_the_steps_that_a_given_noise_affords(tmp_path, planned):
    made, run = steps_that_fit(tmp_path, planned, target_epsilon=2.0, noise_multiplier=1.0)
    event, judge = PoissonGaussian(1.0, 0.01), StreamingRDPAccountant()
    best = affordable_steps(event, 10**6, 2.0, DELTA, accountant=judge)
    assert 500 < made == best
    assert run.mechanism is not None
    assert run.mechanism.guard.claim(DELTA) == pytest.approx(2.0)


def test_the_rdp_guard_keeps_its_order_in_later_runs_of_the_ledger(tmp_path):
    """One that was chosen after releases could follow from them, and no filter has two."""

    def run_of(planned: int, state: Any = None) -> tuple[PrivateRun, float]:
        run = PrivateRun(
            PrivacyConfig(
                target_epsilon=BUDGET,
                target_delta=DELTA,
                noise_multiplier=1.0,
                noise_schedule=ByNorm(least=3.0),
            )
        )
        if state is not None:
            run.load_state_dict(state, tmp_path, World())
        run.use_batches(BatchPlan(10_000, 0.001, 1, 1000))
        run.start(planned, World(), tmp_path)
        order = run.mechanism.guard.order
        for _ in range(3):
            run.mechanism.ask([torch.zeros(3)])
            run.mechanism.tell([torch.zeros(3)])
        return run, order

    first, order = run_of(100_000)
    first.stop()
    first.start(10, World(), tmp_path)  # a further fit, of far fewer steps
    assert first.mechanism.guard.order == order
    state = first.state_dict()
    first.stop()
    second, kept = run_of(10, state)
    assert f"order {order:g} fixed" in second.mechanism.guard.description
    assert kept == order
    spent = OneOrderAccountant(order).divergence(second.ledger.history(), "add_remove")
    assert second.mechanism.guard._spent == pytest.approx(spent)
    second.stop()
    assert PrivateRun(second.config).ledger.order is None
    fresh = RDPGuard(BUDGET, DELTA, "add_remove", [], [(PoissonGaussian(1.0, 0.001), 10)])
    assert fresh.order > 1.2 * order  # another one would have been chosen


def test_full_batches_of_noise_chosen_at_run_time_are_no_beginning_of_poisson_ones():
    """The order of a guard that begins later would follow from what was released."""
    config = PrivacyConfig(
        target_epsilon=BUDGET, target_delta=DELTA, noise_multiplier=9.0, noise_schedule=ByNorm()
    )
    run = PrivateRun(config)
    run.use_batches(BatchPlan(1000, 1.0, 1, 1))
    run.start(2, World(), None)
    run.mechanism.ask([torch.zeros(3)])
    run.mechanism.tell([torch.zeros(3)])
    run.stop()
    run.use_batches(BatchPlan(1000, 0.1, 1, 10))
    with pytest.raises(RefusedSetting, match=r"changed during the run.*full batches.*a new"):
        run.start(10, World(), None)


def test_no_noise_never_fits_gdp_counts_full_batches_alone_and_fixed_counts_steps():
    assert not GDPGuard(BUDGET, DELTA, "add_remove", []).fits(lambda: Gaussian(0.0))
    guard = RDPGuard(BUDGET, DELTA, "add_remove", [], [(Gaussian(5.0), 1)])
    assert not guard.fits(lambda: Gaussian(0.0))
    with pytest.raises(ValueError, match="full batches only"):
        GDPGuard(BUDGET, DELTA, "add_remove", [(PoissonGaussian(1.0, 0.1), 1)])
    assert affordable(FixedGuard(3), [Gaussian(1.0)] * 5) == 3


# -- through the Trainer ---------------------------------------------------------------------------


@pytest.fixture
def fit(classifier: Any, mlp: Any, loader: Any, make_trainer: Any) -> Any:
    """``fit(epochs, ...)`` trains with a callback of these arguments, and returns it and the Trainer."""

    def trained(epochs: int, privacy: Any = None, **arguments: Any) -> Any:
        privacy = privacy or private(advice=False, **arguments)
        trainer = make_trainer(max_epochs=epochs, callbacks=[privacy])
        trainer.fit(classifier(mlp()), loader)
        return privacy, trainer

    return trained


BUDGETED = {"target_epsilon": BUDGET}
ENVELOPE = {"noise_schedule": ByNorm(least=1.0, envelope=True)}


@pytest.mark.parametrize(
    ("arguments", "guard"),
    [
        (BUDGETED, "fixed"),
        ({"noise_multiplier": 1.0}, "fixed"),
        ({**BUDGETED, "sampling": FullBatch()}, "gdp"),
        ({**BUDGETED, "sampling": FullBatch(), "noise_schedule": ByNorm()}, "gdp"),
        ({**BUDGETED, "noise_schedule": ByNorm()}, "rdp"),
        ({**BUDGETED, **ENVELOPE}, "fixed"),
    ],
)
def test_the_guard_is_chosen_automatically_and_named(fit, arguments, guard):
    privacy, _ = fit(3, **arguments)
    assert privacy.report().guard.startswith(f"{guard}:")


@pytest.mark.parametrize("sampling", [None, FullBatch()])
def test_adaptive_noise_keeps_to_the_budget_and_claims_all_of_it(fit, sampling):
    privacy, trainer = fit(10, **BUDGETED, sampling=sampling, noise_schedule=ByNorm(least=0.7))
    used = {event.pair[0] for event, _ in privacy._run.ledger.history()}
    assert len(used) > 3  # it really adapted
    assert privacy.epsilon == pytest.approx(BUDGET, rel=1e-6)
    assert trainer.callback_metrics["privacy/epsilon"] == pytest.approx(BUDGET, rel=1e-6)
    assert trainer.global_step == privacy.steps
    assert epsilon(privacy._run.ledger.history(), DELTA) <= BUDGET


def test_full_batches_keep_to_the_budget_of_an_accountant_that_is_not_exact(fit):
    privacy, trainer = fit(
        40,
        **BUDGETED,
        noise_multiplier=10.0,
        sampling=FullBatch(),
        accountant=StreamingRDPAccountant(),
    )
    assert 0.9 * BUDGET < privacy.epsilon <= BUDGET
    assert trainer.global_step == privacy.steps < 40


def test_less_noise_than_the_envelope_raises_before_the_step(fit):
    schedule = ByNorm(least=0.9, envelope=True)  # promises 1, gives 0.9
    with pytest.raises(RuntimeError, match="envelope"):
        fit(6, **BUDGETED, noise_schedule=schedule)


def test_an_envelope_is_charged_as_planned(fit):
    privacy, _ = fit(6, noise_multiplier=1.5, **ENVELOPE)
    assert privacy._run.ledger.history() == [(PoissonGaussian(1.5, 0.1), 60)]
    privacy, _ = fit(6, **BUDGETED, sampling=FullBatch(), **ENVELOPE)
    assert privacy.report().guard.startswith("fixed:")
    assert len(privacy._run.ledger.history()) == 1
    assert 0.99 * BUDGET < privacy.epsilon <= BUDGET


def test_adaptive_noise_without_a_budget_is_refused():
    with pytest.raises(ValueError, match="target_epsilon"):
        DifferentialPrivacy(target_delta=DELTA, noise_multiplier=1.0, noise_schedule=ByNorm())


def adaptive() -> DifferentialPrivacy:
    return private(**BUDGETED, noise_schedule=ByNorm(least=0.9), advice=False)


def test_an_adaptive_run_resumes_with_its_state(
    fit, classifier, mlp, loader, make_trainer, tmp_path
):
    first, trainer = fit(4, adaptive())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["lightning_dp"]["mechanism"]

    second = adaptive()
    resumed = make_trainer(max_epochs=6, callbacks=[second])
    resumed.fit(classifier(mlp()), loader, ckpt_path=tmp_path / "last.ckpt")

    assert saved["schedule"]["norm"] > 0
    assert second.steps >= first.steps
    assert epsilon(second._run.ledger.history(), DELTA) <= BUDGET


@pytest.mark.parametrize("sampling", [FullBatch(), Poisson()])
def test_a_smaller_budget_after_noise_chosen_at_run_time_is_refused(tmp_path, sampling):
    """All of the larger one is what the earlier steps cost, whatever came out."""

    def run_with(target: float) -> PrivateRun:
        found = PrivateRun(
            PrivacyConfig(
                target_epsilon=target,
                target_delta=DELTA,
                noise_schedule=ByNorm(),
                sampling=sampling,
            )
        )
        found.use_batches(BatchPlan(1000, sampling.event(1.0, 0.1).pair[1], 1, 10))
        return found

    first = run_with(5.0)
    first.start(20, World(), tmp_path)
    params = [torch.zeros(3)]
    first.mechanism.ask(params)
    first.mechanism.tell(params)
    state = first.state_dict()
    first.stop()
    assert first.epsilon == pytest.approx(5.0)
    with pytest.raises(ValueError, match=r"target_epsilon=1.0: .* ε = 5.0"):
        run_with(1.0).load_state_dict(state, tmp_path, World())
    more, same = run_with(6.0), run_with(5.0)
    for each in (more, same):
        each.load_state_dict(state, tmp_path, World())
    more.start(20, World(), tmp_path)
    more.stop()
    assert more.epsilon == pytest.approx(6.0)
    with pytest.raises(ValueError, match=r"target_epsilon=5.0: .* ε = 6.0"):
        same.start(20, World(), tmp_path)  # the other one has begun meanwhile


def test_what_is_charged_is_what_the_guard_has_let_pass(tmp_path):
    """Of a schedule that gives less noise the second time that it is asked."""
    asked = [0]

    @dataclass(frozen=True)
    class Less(ByNorm):
        def now(self, state: State, step: int) -> float:
            asked[0] += 1
            return 1.0 if asked[0] % 2 else 0.05

    config = PrivacyConfig(
        target_epsilon=BUDGET,
        target_delta=DELTA,
        noise_schedule=Less(),
        sampling=FullBatch(),
    )
    run = PrivateRun(config)
    run.use_batches(BatchPlan(1000, 1.0, 10, 1))
    run.start(10, World(), tmp_path)
    query = run.mechanism.ask([torch.zeros(3)])
    assert query.noise_multiplier == run.ledger.history()[0][0].noise_multiplier
    assert asked[0] == 1 and epsilon(run.ledger.history(), DELTA) < BUDGET
    run.stop()


def test_a_second_adaptive_fit_with_nothing_left_trains_nothing(fit):
    privacy, _ = fit(2, adaptive())
    steps = privacy.steps
    with pytest.warns(UserWarning, match="No training step was made"):
        _, again = fit(2, privacy)
    assert again.global_step == 0 and privacy.steps == steps
    assert privacy.epsilon == pytest.approx(BUDGET)
