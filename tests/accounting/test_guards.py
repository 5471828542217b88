"""Budget guards: a step that would exceed the budget is refused, whatever noise is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp._world import World
from lightning_dp.accounting import Gaussian, PoissonGaussian, StreamingRDPAccountant, epsilon
from lightning_dp.accounting.calibration import affordable_steps
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.accounting.guards import AbstractGuard, FixedGuard, GDPGuard, RDPGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import State
from lightning_dp.callbacks import DifferentialPrivacy
from lightning_dp.config import PrivacyConfig
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import BatchPlan, FullBatch
from lightning_dp.schedules import AbstractAdaptiveSchedule

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


def affordable(guard: AbstractGuard, ledger: Ledger, events: list[AbstractEvent]) -> int:
    for number, event in enumerate(events):
        if not guard.fits(lambda event=event: event):
            return number
        ledger.charge(event)
        guard.book(event)
    return len(events)


def new_ledger() -> Ledger:
    ledger = Ledger()
    ledger.begin("run")
    return ledger


@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
def test_gdp_stops_at_the_last_step_that_the_exact_formula_allows(relation):
    guard = GDPGuard(BUDGET, DELTA, relation, [])
    ledger = new_ledger()
    events: list[AbstractEvent] = [Gaussian(14.0 + t % 7) for t in range(500)]

    steps = affordable(guard, ledger, events)

    assert 1 < steps < 500
    assert epsilon(events[:steps], DELTA, relation) <= BUDGET
    assert epsilon(events[: steps + 1], DELTA, relation) > BUDGET
    assert guard.claim(DELTA) == pytest.approx(BUDGET, rel=1e-9)
    assert guard.claim(1e-7) == pytest.approx(gdp_epsilon(guard.mu, 1e-7))


def test_rdp_is_never_looser_than_its_order_and_a_little_tighter_than_rdp_over_all_orders():
    plan: list[tuple[AbstractEvent, int]] = [(PoissonGaussian(1.0, 0.01), 1500)]
    guard = RDPGuard(BUDGET, DELTA, "add_remove", [], plan)
    ledger = new_ledger()
    events: list[AbstractEvent] = [PoissonGaussian(0.9 + 0.2 * (t % 3), 0.01) for t in range(5000)]

    steps = affordable(guard, ledger, events)

    best_over_orders = StreamingRDPAccountant().epsilon(ledger.history(), DELTA)
    assert 100 < steps < 5000
    assert 0.9 * BUDGET < best_over_orders <= BUDGET * (1 + 1e-9)
    assert epsilon(events[:steps], DELTA) < BUDGET
    assert guard.claim(DELTA) == pytest.approx(BUDGET)


@pytest.mark.parametrize(
    "make",
    [
        lambda spent: GDPGuard(BUDGET, DELTA, "add_remove", spent),
        lambda spent: RDPGuard(BUDGET, DELTA, "add_remove", spent, [(Gaussian(9.0), 10)]),
    ],
)
def test_what_was_spent_before_counts(make):
    events: list[AbstractEvent] = [Gaussian(9.0)] * 100
    fresh = affordable(make([]), new_ledger(), events)
    later = affordable(make([(Gaussian(9.0), 2)]), new_ledger(), events)
    # The order of rdp is chosen anew, for what was spent too.
    assert 0 < fresh - 3 <= later < fresh


def steps_that_fit(folder: Path, planned: int, **options: Any) -> tuple[int, PrivateRun]:
    """How many of the planned steps a guard lets pass if the noise is the one expected."""
    run = PrivateRun(PrivacyConfig(noise_schedule=ByNorm(), target_delta=DELTA, **options))
    run.use_batches(BatchPlan(10_000, 0.01, 1, 100))
    run.start(planned, World(), folder)
    assert run.mechanism is not None
    guard, event = run.mechanism.guard, run.mechanism.plan.event(0)
    for step in range(planned):
        if not guard.fits(lambda: event):
            return step, run
        guard.book(event)
    return planned, run


def test_the_rdp_guard_affords_all_steps_that_the_noise_was_calibrated_for(tmp_path):
    assert steps_that_fit(tmp_path, 1000, target_epsilon=3.0)[0] == 1000


@pytest.mark.parametrize("planned", [3000, 20_000, math.inf])
def test_the_rdp_guard_makes_the_steps_that_a_given_noise_affords(tmp_path, planned):
    made, run = steps_that_fit(
        tmp_path, int(min(planned, 10**9)), target_epsilon=2.0, noise_multiplier=1.0
    )
    history = [(PoissonGaussian(1.0, 0.01), 1)]
    best = affordable_steps(history[0][0], 10**6, 2.0, DELTA, accountant=StreamingRDPAccountant())
    assert best > 500
    assert made == best
    assert run.mechanism is not None
    assert run.mechanism.guard.claim(DELTA) == pytest.approx(2.0)


def test_no_noise_never_fits():
    assert not GDPGuard(BUDGET, DELTA, "add_remove", []).fits(lambda: Gaussian(0.0))
    guard = RDPGuard(BUDGET, DELTA, "add_remove", [], [(Gaussian(5.0), 1)])
    assert not guard.fits(lambda: Gaussian(0.0))


def test_gdp_refuses_to_count_subsampled_steps():
    with pytest.raises(ValueError, match="full batches only"):
        GDPGuard(BUDGET, DELTA, "add_remove", [(PoissonGaussian(1.0, 0.1), 1)])


def test_fixed_counts_the_ledger():
    ledger = new_ledger()
    assert affordable(FixedGuard(3), ledger, [Gaussian(1.0)] * 5) == 3


# -- through the Trainer ---------------------------------------------------------------------------


def fit(
    classifier: Any, mlp: Any, loader: Any, make_trainer: Any, epochs: int = 6, **arguments: Any
) -> Any:
    privacy = DifferentialPrivacy(target_delta=DELTA, isolation_probe=False, **arguments)
    trainer = make_trainer(max_epochs=epochs, callbacks=[privacy])
    trainer.fit(classifier(mlp()), loader)
    return privacy, trainer


@pytest.mark.parametrize(
    ("arguments", "guard"),
    [
        ({"target_epsilon": 2.0}, "fixed"),
        ({"noise_multiplier": 1.0}, "fixed"),
        ({"target_epsilon": 2.0, "sampling": FullBatch()}, "gdp"),
        ({"target_epsilon": 2.0, "sampling": FullBatch(), "noise_schedule": ByNorm()}, "gdp"),
        ({"target_epsilon": 2.0, "noise_schedule": ByNorm()}, "rdp"),
        ({"target_epsilon": 2.0, "noise_schedule": ByNorm(least=1.0, envelope=True)}, "fixed"),
    ],
)
def test_the_guard_is_chosen_automatically_and_named(
    classifier, mlp, loader, make_trainer, arguments, guard
):
    privacy, _ = fit(classifier, mlp, loader, make_trainer, epochs=3, **arguments)
    assert privacy.report().guard.startswith(f"{guard}:")


@pytest.mark.parametrize("sampling", [None, FullBatch()])
def test_adaptive_noise_keeps_to_the_budget_and_claims_all_of_it(
    classifier, mlp, loader, make_trainer, sampling
):
    privacy, trainer = fit(
        classifier,
        mlp,
        loader,
        make_trainer,
        epochs=10,
        target_epsilon=BUDGET,
        sampling=sampling,
        noise_schedule=ByNorm(least=0.7),
    )
    used = {event.pair[0] for event, _ in privacy._run.ledger.history()}
    assert len(used) > 3  # it really adapted
    assert privacy.epsilon == pytest.approx(BUDGET, rel=1e-6)
    assert trainer.callback_metrics["privacy/epsilon"] == pytest.approx(BUDGET, rel=1e-6)
    assert trainer.global_step == privacy.steps
    assert epsilon(privacy._run.ledger.history(), DELTA) <= BUDGET


def test_less_noise_than_the_envelope_raises_before_the_step(classifier, mlp, loader, make_trainer):
    schedule = ByNorm(least=0.9, envelope=True)  # promises 1, gives 0.9
    with pytest.raises(RuntimeError, match="envelope"):
        fit(classifier, mlp, loader, make_trainer, target_epsilon=2.0, noise_schedule=schedule)


def test_an_envelope_is_charged_as_planned(classifier, mlp, loader, make_trainer):
    privacy, _ = fit(
        classifier,
        mlp,
        loader,
        make_trainer,
        noise_multiplier=1.5,
        noise_schedule=ByNorm(least=1.0, envelope=True),
    )
    assert privacy._run.ledger.history() == [(PoissonGaussian(1.5, 0.1), 60)]


def test_adaptive_noise_without_a_budget_is_refused():
    with pytest.raises(ValueError, match="target_epsilon"):
        DifferentialPrivacy(target_delta=DELTA, noise_multiplier=1.0, noise_schedule=ByNorm())


def test_an_adaptive_run_resumes_with_its_state(classifier, mlp, loader, make_trainer, tmp_path):
    def privacy() -> DifferentialPrivacy:
        return DifferentialPrivacy(
            target_epsilon=BUDGET, target_delta=DELTA, noise_schedule=ByNorm(least=0.9)
        )

    first, second = privacy(), privacy()
    trainer = make_trainer(max_epochs=4, callbacks=[first])
    trainer.fit(classifier(mlp()), loader)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["lightning_dp"]["mechanism"]

    resumed = make_trainer(max_epochs=6, callbacks=[second])
    resumed.fit(classifier(mlp()), loader, ckpt_path=tmp_path / "last.ckpt")

    assert saved["schedule"]["norm"] > 0
    assert second.steps >= first.steps
    assert epsilon(second._run.ledger.history(), DELTA) <= BUDGET


def test_an_envelope_on_full_batches_is_charged_as_planned(classifier, mlp, loader, make_trainer):
    privacy, _ = fit(
        classifier,
        mlp,
        loader,
        make_trainer,
        target_epsilon=BUDGET,
        sampling=FullBatch(),
        noise_schedule=ByNorm(least=1.0, envelope=True),
    )
    assert privacy.report().guard.startswith("fixed:")
    assert len(privacy._run.ledger.history()) == 1
    assert 0.99 * BUDGET < privacy.epsilon <= BUDGET


def test_a_second_adaptive_fit_with_nothing_left_trains_nothing(
    classifier, mlp, loader, make_trainer
):
    privacy = DifferentialPrivacy(
        target_epsilon=BUDGET, target_delta=DELTA, noise_schedule=ByNorm(least=0.9)
    )
    make_trainer(max_epochs=2, callbacks=[privacy]).fit(classifier(mlp()), loader)
    steps = privacy.steps
    again = make_trainer(max_epochs=2, callbacks=[privacy])
    with pytest.warns(UserWarning, match="No training step was made"):
        again.fit(classifier(mlp()), loader)
    assert again.global_step == 0 and privacy.steps == steps
    assert privacy.epsilon == pytest.approx(BUDGET)
