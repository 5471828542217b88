"""A recovered journal never says less than was spent, whatever the plan was and whoever resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dp import Diff2, PrivacyConfig
from lightning_dp._world import World
from lightning_dp.accounting import (
    Gaussian,
    PLDAccountant,
    PoissonGaussian,
    StreamingRDPAccountant,
    recover_journal,
    sweep_history,
)
from lightning_dp.accounting.journal import JournalError, read_written
from lightning_dp.estimators import CubicNewton, MeanGradient, Storm, Traits
from lightning_dp.report.files import in_checkpoint
from lightning_dp.report.run_report import report_of_run
from lightning_dp.run import PrivateRun
from lightning_dp.sampling import BatchPlan
from lightning_dp.schedules import (
    AbstractAdaptiveSchedule,
    AbstractSchedule,
    Constant,
    Cosine,
    DynamicGD,
    DynamicMomentum,
    Exponential,
    FromInfluence,
    Polynomial,
    StepDecay,
)

pytestmark = pytest.mark.filterwarnings("ignore:Diff2. the noise")

SAVED, LOST, PLANNED, DELTA = 12, 30, 60, 1e-5
CUBIC = CubicNewton(strong_convexity=1.0, hessian_lipschitz=1.0, inner_steps=3)


@dataclass(frozen=True)
class UpAndDown(AbstractSchedule):
    """Noise that falls now and then, and less each time."""

    def __call__(self, step: int) -> float:
        return 0.6 + (step % 17) / 10 if step > 25 else 1.0


@dataclass(frozen=True)
class Often(MeanGradient):
    """Asks nothing at two steps of three, and says nothing of it in advance."""

    @property
    def traits(self) -> Traits:
        return Traits()

    def ask(self, state: Any, params: Any, step: int, noise_multiplier: float) -> Any:
        return super().ask(state, params, step, noise_multiplier) if step % 3 == 0 else None


PLANS: dict[str, dict[str, Any]] = {
    "Constant": {},
    "Exponential falls": {"noise_schedule": Exponential(0.02)},
    "StepDecay": {"noise_schedule": StepDecay(every=15, factor=0.8)},
    "Cosine": {"noise_schedule": Cosine(steps=PLANNED, end=0.3)},
    "Polynomial": {"noise_schedule": Polynomial(steps=PLANNED, end=0.4, power=2.0)},
    "DynamicGD": {"noise_schedule": DynamicGD(kappa=50.0)},
    "DynamicMomentum": {
        "noise_schedule": DynamicMomentum(kappa=50.0, eta0=1.0, beta=0.5, steps=PLANNED)
    },
    "FromInfluence": {"noise_schedule": FromInfluence(tuple(1.0 + t for t in range(PLANNED)))},
    "own": {"noise_schedule": UpAndDown()},
    "Diff2": {"estimator": Diff2(5)},
    "Diff2 at rest": {"estimator": Diff2(5), "rest": True},
    "Diff2 larger restarts": {"estimator": Diff2(5, restart_rate=2.0)},
    "Diff2 cheap restarts": {"estimator": Diff2(5, split=40.0)},
    "Diff2 Exponential": {
        "estimator": Diff2(5),
        "noise_schedule": Exponential(0.004),
        "rest": True,
        "planned": 5 * PLANNED,
    },
    "Storm": {"estimator": Storm(momentum=0.3), "noise_schedule": Exponential(0.01)},
    "CubicNewton": {"estimator": CUBIC, "noise_schedule": Exponential(0.01)},
    "silent": {"estimator": Often(), "noise_schedule": Exponential(0.03)},
}


class Steps:
    """Private runs of one configuration, without a Trainer."""

    def __init__(
        self,
        folder: Path,
        *,
        rest: bool = False,
        rate: float = 0.05,
        planned: int = PLANNED,
        **options: Any,
    ) -> None:
        options = {"target_delta": DELTA, "noise_multiplier": 1.5, **options}
        self.folder, self.rest, self.rate, self.planned = folder, rest, rate, planned
        self.config = PrivacyConfig(**options)

    def begin(self, state: Any = None, planned: int | None = None) -> PrivateRun:
        run = PrivateRun(self.config)
        if state is not None:
            run.load_state_dict(state, self.folder, World())
        run.use_batches(BatchPlan(1000, self.rate, 1, 10))
        run.start(planned or self.planned, World(), self.folder)
        return run

    def make(self, run: PrivateRun, steps: int) -> PrivateRun:
        """That many charged steps; parameters move, unless they rest."""
        target, mechanism = run.steps + steps, run.mechanism
        assert mechanism is not None
        while run.steps < target:
            params = [torch.full((4,), 0.0 if self.rest else float(mechanism.step))]
            mechanism.ask(params)
            mechanism.tell(params, lambda: None)
        return run

    def save(self, run: PrivateRun, path: Path) -> dict[str, Any]:
        torch.save({"lightning_dp": run.state_dict()}, path)
        return torch.load(path, weights_only=True)["lightning_dp"]


def epsilon(history: Sequence[Any]) -> float:
    return PLDAccountant().epsilon(history, DELTA)


def lose(run: PrivateRun) -> list[Any]:
    """End the run and lose its journal; what was truly spent."""
    run.stop()
    assert run.ledger.journal_path is not None
    truth = sweep_history(run.ledger.journal_path)
    run.ledger.journal_path.unlink()
    return truth


@pytest.mark.parametrize("plan", PLANS)
def test_a_recovered_journal_never_says_less_than_was_spent(tmp_path, plan):
    steps = Steps(tmp_path / "old", **PLANS[plan])
    run = steps.make(steps.begin(), SAVED)
    steps.save(run, tmp_path / "a.ckpt")
    truth = lose(steps.make(run, LOST))

    recovered = sweep_history(recover_journal(tmp_path / "a.ckpt", tmp_path / "new", LOST))

    assert sum(count for _, count in recovered) == SAVED + LOST
    assert epsilon(recovered) >= epsilon(truth)
    if plan == "Constant":
        assert recovered == truth


@pytest.mark.parametrize("plan", ["Exponential falls", "own", "Diff2", "Diff2 Exponential"])
def test_it_covers_runs_that_went_on_from_any_checkpoint(tmp_path, plan):
    """One went far, two began again early, and the checkpoint of one of these is all that is left."""
    steps = Steps(tmp_path / "old", **PLANS[plan])
    far = steps.make(steps.begin(), 5)
    early = steps.save(far, tmp_path / "early.ckpt")
    steps.make(far, 25)
    late = steps.save(far, tmp_path / "late.ckpt")
    far.stop()
    again = steps.make(steps.begin(early), 3)
    steps.save(again, tmp_path / "a.ckpt")
    again.stop()
    further = steps.make(steps.begin(late), 20)
    further.stop()
    truth = lose(steps.make(steps.begin(early), 7))

    recovered = sweep_history(recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 27))

    assert epsilon(recovered) >= epsilon(truth)


def test_it_covers_a_fit_of_more_epochs_and_refuses_what_it_does_not_know(tmp_path):
    steps = Steps(tmp_path / "old", noise_schedule=Exponential(0.02))
    run = steps.make(steps.begin(), SAVED)
    state = steps.save(run, tmp_path / "a.ckpt")
    run.stop()
    truth = lose(steps.make(steps.begin(state, planned=2 * PLANNED), 90))
    with pytest.raises(
        ValueError, match=r"unrecorded_steps=200 after 12 is more than the 120 steps"
    ):
        recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 200)
    recovered = sweep_history(recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 90))
    assert epsilon(recovered) >= epsilon(truth)


def test_no_lost_step_cost_more_than_is_charged_for_it_though_steps_before_it_asked_nothing(
    tmp_path,
):
    """Four steps of five ask nothing, and leave no charge; noise falls on, far beyond twice the plan."""
    steps = Steps(tmp_path / "old", estimator=Diff2(5), noise_schedule=Exponential(0.03), rest=True)
    run = steps.make(steps.begin(), SAVED)
    state = steps.save(run, tmp_path / "a.ckpt")
    begun, made, accepted = run.mechanism.step, list[int](), 0
    run.stop()
    run = steps.begin(state, planned=9 * PLANNED)
    for _ in range(LOST):
        made.append(steps.make(run, 1).mechanism.step - begun)
    *_, lost = (charges for charges in run.ledger.runs.values())
    lose(run)

    for number, (event, _) in zip(made, lost, strict=True):
        try:
            path = recover_journal(tmp_path / "a.ckpt", tmp_path / str(number), number)
        except ValueError as error:
            assert begun + number > 2 * PLANNED
            assert f"unrecorded_steps={number} after {begun} is more than the 120" in str(error)
            continue
        accepted += 1
        (charged, count) = min(sweep_history(path), key=lambda each: each[0].noise_multiplier)
        assert count >= number and charged.noise_multiplier <= event.noise_multiplier
    assert accepted == sum(begun + number <= 2 * PLANNED for number in made) > 0


def test_steps_of_an_earlier_fit_with_less_noise_are_covered(tmp_path):
    steps = Steps(tmp_path / "old", rate=0.2)
    run = steps.make(steps.begin(), SAVED)
    run.stop()
    run.use_batches(BatchPlan(1000, 0.05, 1, 10))
    run.start(PLANNED, World(), tmp_path / "old")
    steps.make(run, SAVED)
    steps.save(run, tmp_path / "a.ckpt")
    lose(run)
    path = recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 5)
    assert dict(sweep_history(path)) == {
        PoissonGaussian(1.5, 0.2): SAVED + 5,
        PoissonGaussian(1.5, 0.05): SAVED,
    }


class AtRunTime(AbstractAdaptiveSchedule):
    def __call__(self, step: int) -> float:
        return 1.0

    def init(self) -> Any:
        return {}

    def now(self, state: Any, step: int) -> float:
        return 1.0 + step % 3

    def observe(self, state: Any, released: Tensor) -> Any:
        return state


def test_noise_chosen_at_run_time_needs_a_bound_from_its_user(tmp_path):
    steps = Steps(
        tmp_path / "old",
        noise_schedule=AtRunTime(),
        target_epsilon=8.0,
        accountant=StreamingRDPAccountant(),
    )
    run = steps.make(steps.begin(), SAVED)
    steps.save(run, tmp_path / "a.ckpt")
    lose(run)
    with pytest.raises(ValueError, match=r"Give costliest=.*unrecorded_steps=9"):
        recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 9)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match=r"costliest=1.5 must be an event"):
        recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 9, 1.5)
    path = recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 9, Gaussian(1.0))
    assert (Gaussian(1.0), 9) in read_written(path).runs.history()


def test_a_recovered_journal_promises_the_whole_budget_of_noise_chosen_at_run_time(tmp_path):
    steps = Steps(tmp_path / "old", noise_schedule=AtRunTime(), target_epsilon=8.0)
    run = steps.make(steps.begin(), SAVED)
    state = {**run.state_dict(), "report": in_checkpoint(report_of_run(run))}
    torch.save({"lightning_dp": state}, tmp_path / "a.ckpt")
    promised = read_written(run.ledger.journal_path)
    lose(run)
    path = recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 9, Gaussian(1.0))
    found = read_written(path)
    assert found.budget == promised.budget is not None
    assert found.order == promised.order is not None
    state["ledger"]["order"] = 0.5
    torch.save({"lightning_dp": state}, tmp_path / "a.ckpt")
    with pytest.raises(JournalError, match=r"order 0\.5 is not above 1"):
        recover_journal(tmp_path / "a.ckpt", tmp_path / "newer", 9, Gaussian(1.0))


def test_a_checkpoint_of_an_older_version_needs_a_bound_from_its_user(tmp_path):
    steps = Steps(tmp_path / "old")
    run = steps.make(steps.begin(), SAVED)
    state = run.state_dict()
    del state["costliest"]
    torch.save({"lightning_dp": state}, tmp_path / "a.ckpt")
    lose(run)
    with pytest.raises(ValueError, match="or an older version"):
        recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 1)
    assert sweep_history(recover_journal(tmp_path / "a.ckpt", tmp_path / "new", 0))


@pytest.mark.parametrize("folder", ["s3://bucket/privacy", "", "a\0b"])
def test_a_folder_that_is_none_is_refused(tmp_path, folder):
    steps = Steps(tmp_path / "old")
    run = steps.make(steps.begin(), 1)
    steps.save(run, tmp_path / "a.ckpt")
    lose(run)
    with pytest.raises((ValueError, JournalError), match="directory="):
        recover_journal(tmp_path / "a.ckpt", folder, 1)


def test_bounds_of_a_long_plan_are_one_event(tmp_path):
    steps = Steps(tmp_path / "old", noise_schedule=Exponential(0.0005))
    run = steps.begin(planned=5000)
    assert len(run.state_dict()["costliest"]["events"]) == 1
    run.stop()
    steps = Steps(tmp_path / "old", noise_schedule=Constant())
    run = steps.begin(planned=10**9)
    assert len(run.state_dict()["costliest"]["events"]) == 1
    run.stop()
