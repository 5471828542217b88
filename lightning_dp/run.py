"""A private training run without its trainer: configuration, ledger and mechanism, wired."""

from __future__ import annotations

import contextlib
import math
import secrets
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lightning_dp._files import local_folder
from lightning_dp._noise import CorrelatedSource, NoiseSource, random_generator
from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp._world import World
from lightning_dp.accounting.base import EpsilonCache
from lightning_dp.accounting.events import History, counted
from lightning_dp.accounting.journal import BUDGET, DATA
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.accounting.pld import PLDAccountant, epsilon_curve
from lightning_dp.accounting.steps import CheckedHistory, check_bounded
from lightning_dp.clipping import AdaptiveQuantile
from lightning_dp.config import PrivacyConfig, check_same, refuse_unknown
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise import AbstractNoise
from lightning_dp.noise_plan import Budget, NoisePlan, costliest_events
from lightning_dp.plan.signal import Signal, SignalTracker
from lightning_dp.sampling import BatchPlan
from lightning_dp.sampling.blocks import AbstractBlockSampling, Draw

if TYPE_CHECKING:
    from lightning_dp.plan.advice import Setting

__all__ = ["PlannedFit", "PrivateRun"]

_VERSION = 3  # of the privacy record in checkpoints
_COUNT_WEIGHT = 0.1  # κ: the noise norm is 0.5 % larger, and 5 z/B in the share of a step


@dataclass
class PlannedFit:
    """A plan that was declared, and the mechanism that makes its steps.

    Args:
        mechanism: makes the steps.
        end: the mechanism's step at which the plan ends; may be infinite.
        affordable_end: the one at which the budget does.
        is_under_way: the journal is open, and steps are made.
        draw: draws the batches of the block; None where each is drawn by itself.
    """

    mechanism: Mechanism
    end: float
    affordable_end: float
    is_under_way: bool = True
    draw: Draw | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without the records of a batch."""
        return {**vars(self), "draw": None}

    @classmethod
    def declare(
        cls,
        budget: Budget,
        ledger: Ledger,
        world: World,
        planned_steps: float,
        *,
        scale: float,
        is_calibrated: bool,
        state: dict[str, Any] | None,
    ) -> PlannedFit:
        """Find how far the budget goes, and make the mechanism.

        Args:
            budget: of the steps to come.
            ledger: charged before each of them.
            world: the processes of the job.
            planned_steps: noised steps that are still to be made; may be infinite.
            scale: the noise multiplier where the schedule's shape is 1.
            is_calibrated: it was calibrated just now, for exactly these steps.
            state: of the mechanism that these steps go on from; None if they begin.
        """
        config, step = budget.config, 0 if state is None else int(state["step"])
        plan = budget.plan(world.broadcast(scale), step, planned_steps)
        plan = replace(plan, noise=world.broadcast(plan.noise))  # optimised, to the last bit
        affordable = world.broadcast(
            budget.affordable(plan, step, planned_steps, is_calibrated=is_calibrated)
        )
        mechanism = Mechanism(
            plan=plan,
            postprocessing=tuple(config.postprocessing),
            ledger=ledger,
            guard=budget.guard(plan, step, planned_steps, affordable),
            num_records=budget.batches.num_records,
            noise=_source(plan.noise, config, world.rank),
            world=world,
            signal=_tracker(config),
            count_weight=_COUNT_WEIGHT if config.counts_clipped else 0.0,
            spares_memory=config.engine == "ghost",
            quantile=config.clipping if isinstance(config.clipping, AdaptiveQuantile) else None,
        )
        if state is not None:
            mechanism.load_state_dict(state)
        draw = None
        if isinstance(config.sampling, AbstractBlockSampling):
            rng = random_generator(config.seed, 3, world.rank, step, secure=config.secure_noise)
            shard = range(world.rank, budget.batches.num_records, world.size)
            draw = config.sampling.begin(budget.batches, shard, rng, step)
        return cls(mechanism, step + planned_steps, step + affordable, draw=draw)

    @property
    def last_step(self) -> float:
        """The step at which the plan ends, or the budget before it; may be infinite."""
        return min(self.end, self.affordable_end)

    @property
    def remaining(self) -> float:
        """Steps of the plan that are left and that the budget affords."""
        left = max(0, self.last_step - self.mechanism.step)
        return min(left, self.mechanism.guard.remaining)

    @cached_property
    def costliest(self) -> dict[str, Any] | None:
        """The most that a step costs, for a lost journal; None for noise chosen at run time."""
        plan = self.mechanism.plan
        if plan.shape.chosen == "at run time":
            return None
        return costliest_events(plan, self.mechanism.step, self.end)


def _source(noise: AbstractNoise, config: PrivacyConfig, rank: int) -> NoiseSource:
    """Return a new source, of a new block if the noise remembers."""
    seed, secure = config.seed, config.secure_noise
    if noise.bands == 1:
        return NoiseSource(seed, rank, secure=secure)
    return CorrelatedSource(noise.correlate, noise.column_norm, seed, rank, secure=secure)


def _tracker(config: PrivacyConfig) -> SignalTracker | None:
    """Return the tracker of releases, where they are gradients with independent noise."""
    wanted = (config.advice or config.count_clipped) and config.noise.bands == 1
    estimates = config.resolved_estimator().traits.estimates_gradient
    return SignalTracker() if wanted and estimates else None


class PrivateRun:
    """The privacy side of ``trainer.fit``, which a strategy and a callback share.

    It lives as long as the callback, over several fits; the ledger goes on in each.

    Args:
        config: what the user said. A relative ``ledger_dir`` begins in the present directory.
    """

    def __init__(self, config: PrivacyConfig) -> None:
        if not isinstance(config, PrivacyConfig):
            raise TypeError(
                f"privacy={config!r} must be a PrivacyConfig, such as that of a callback: "
                "DifferentialPrivacy(...).config."
            )
        self.config = config
        given = config.ledger_dir
        self.ledger_dir = None if given is None else local_folder("ledger_dir", given)
        self.ledger = Ledger()
        for release in config.other_releases:
            self.ledger.declare(release)
        self.batches: BatchPlan | None = None
        self._processes = 1
        self._rates: NoisePlan | None = None  # of steps, without the noise
        self.stop_reason: str | None = None
        self.not_covered: tuple[str, ...] = ()  # of this run, besides what holds for all
        self.engine: str = config.engine  # what "auto" turned out to be, once it is known
        self.optimizers: str | None = None  # which one is private, where there are several
        self.setting: Setting | None = None  # public numbers of the latest fit, once they are known
        self.isolation = "not compared (no batch yet)" if config.checks.dry_run else "opted out"
        self.started: str | None = None  # the first charge of the checkpoint that was resumed
        self.spot_checks = 0  # steps whose batch was looked at, in all fits of this object
        self.not_compared: dict[str, int] = {}  # such steps of which nothing can be said, by reason
        self.is_seeded = config.seed is not None  # for good: also a run resumed without the seed
        self._fit: PlannedFit | None = None  # the latest one; None before the first
        self.mechanism: Mechanism | None = None  # its own
        self._resumed: dict[str, Any] | None = None  # a checkpoint's record, until a fit begins
        self._promised = 0.0  # ε of the whole plan before the latest fit: it may begin a new block
        self._cache = EpsilonCache(config.accountant)  # many ask for the present one

    # -- what users read -------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Noised steps charged so far, over all fits that this ledger knows."""
        return self.ledger.steps

    @property
    def steps_begun(self) -> int:
        """Noised steps that were begun; a charge may cover others that are still to come."""
        return self.steps - (0 if self.mechanism is None else self.mechanism.covered)

    @property
    def voided(self) -> str | None:
        """The reason for which ε of all that was released is withdrawn; None if it is not."""
        return self.ledger.voided

    @property
    def is_under_way(self) -> bool:
        """True from :meth:`start` to :meth:`stop`; the plan is declared, and the journal open."""
        return self._fit is not None and self._fit.is_under_way

    @property
    def is_adaptive(self) -> bool:
        """True if the noise is chosen at run time, without a plan that bounds it."""
        return self.config.is_adaptive

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier of the latest step, of the first one before it; None if unknown."""
        if self.mechanism is None:
            return self.config.noise_multiplier
        return self.mechanism.plan.noise_multiplier(max(0, self.mechanism.step - 1))

    @property
    def epsilon(self) -> float:
        """ε spent at ``target_delta``."""
        return self.epsilon_at(self.config.target_delta)

    def epsilon_at(self, delta: float) -> float:
        """ε spent at another δ; for noise chosen at run time, the whole budget's from its first step."""
        if self.is_adaptive and self.steps:
            return self._claim(delta)
        return self._cache.epsilon(self.ledger.history(), delta, self.config.relation)

    def _claim(self, delta: float) -> float:
        """ε of the whole budget, which holds whatever noise is chosen at run time."""
        if self.voided is not None:
            return math.inf
        claim = None if self.mechanism is None else self.mechanism.guard.claim(delta)
        if claim is None and delta == self.config.target_delta:
            claim = self.config.target_epsilon  # nothing is left: no earlier guard exceeded it
        return math.inf if claim is None else claim

    def epsilon_curve(self, more_steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """ε at ``target_delta`` after each of these numbers of more steps of the plan, in one go."""
        if self.is_adaptive:
            claim = self._claim(self.config.target_delta)
            return np.where(more_steps + self.steps > 0, claim, self.epsilon)
        if self.mechanism is None:
            return np.full(more_steps.shape, self.epsilon)  # nothing is planned yet
        plan, now = self.mechanism.plan, self.mechanism.step
        return epsilon_curve(
            plan.events_from(now),
            plan.charges_before(now + more_steps) - plan.charges_before(now),
            self.config.target_delta,
            self.config.relation,
            self.config.accountant,
            spent=self.ledger.history(),
        )

    @property
    def epsilon_of_plan(self) -> float | None:
        """ε of the whole plan, also of its steps that asked nothing; None if it has no end.

        What must be claimed if results decided when to stop, or which steps to leave out. What was
        planned for earlier fits counts, too, where they ended before; it is never less than it was.
        """
        mechanism, remaining = self.mechanism, self.remaining_steps
        if mechanism is None or not math.isfinite(remaining):
            return None
        delta = self.config.target_delta
        if self.is_adaptive:
            return self._claim(delta) if self.steps + remaining else self.epsilon
        left = mechanism.plan.history(mechanism.step, int(remaining))
        history = [*self.ledger.history(), *mechanism.uncharged, *left]
        return max(self._cache.epsilon(history, delta, self.config.relation), self._promised)

    def epsilon_beside(self, others: History) -> float | None:
        """ε of other charges and this run's whole plan; None if it has no end."""
        mechanism, more = self.mechanism, self.remaining_steps
        if mechanism is None or self.is_adaptive or not math.isfinite(more):
            return None
        plan, now, left = mechanism.plan, mechanism.step, int(more)
        first = plan.history(now, left) if plan.is_constant else []
        before = [*others, *self.ledger.history(), *mechanism.uncharged, *first]
        history = CheckedHistory.of(before)
        if left and not plan.is_constant:
            history = history.followed_by(plan.steps(now, left))
        return PLDAccountant().epsilon(history, self.config.target_delta, self.config.relation)

    @property
    def signal(self) -> Signal | None:
        """The signal beneath the noise of the latest fit's releases; None where it is not tracked."""
        tracker = None if self.mechanism is None else self.mechanism.signal
        return None if tracker is None else tracker.signal()

    @property
    def remaining_steps(self) -> float:
        """Steps of the plan that are left and that the budget affords."""
        return math.inf if self._fit is None else self._fit.remaining

    @property
    def is_over_early(self) -> bool:
        """True if the budget ends here, and the plan does not."""
        fit = self._fit
        return fit is not None and fit.mechanism.exhausted and fit.mechanism.step < fit.end

    @property
    def exhausted(self) -> bool:
        """True if one more step would exceed the budget."""
        return (mechanism := self.mechanism) is not None and mechanism.exhausted

    # -- what a strategy does --------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step of the plan that is next, or running."""
        return 0 if (mechanism := self.mechanism) is None else mechanism.step

    def draw(self, step: int, rate: float, rng: np.random.Generator) -> NDArray[np.int64] | None:
        """Draw the batch of a step of the block; None where batches are drawn by themselves."""
        if not isinstance(self.config.sampling, AbstractBlockSampling):
            return None
        if self._fit is None or self._fit.draw is None:
            raise RefusedRun("A copy of a run draws no batches of its block.", topic="out-of-order")
        return self._fit.draw(step, rate, rng)

    @property
    def step_to_continue(self) -> int:
        """The steps of the plan that the resumed checkpoint, or the latest fit, has made."""
        return self.step if self._resumed is None else int(self._resumed["mechanism"]["step"])

    def rate(self, step: int) -> float:
        """Return q at a step of the plan."""
        if self._rates is None:
            self._rates = self._budget(spent=()).rates()
        return self._rates.rate(step)

    def use_batches(self, batches: BatchPlan, processes: int = 1) -> None:
        """Fix how batches are made; it is a public constant of the run.

        A run that goes on from a checkpoint may divide the same batches among another number of
        processes.

        Raises:
            ValueError: if the current run, or the checkpoint it resumes, had others.
        """
        known = self.batches if self.is_under_way else None
        if self._resumed is not None:
            known = BatchPlan(**self._resumed["batches"])
        if known is not None and known != batches:
            size = known.expected_batch_size / (known.chunks_per_step * processes)
            raise RefusedSetting(
                f"The training data or its batches changed during the run: {known} before, "
                f"{batches} now. The sampling rate is a constant of a private run: keep the number "
                "of records, accumulate_grad_batches, and batch_size times the number of processes: for "
                f"{processes} of them that is batch_size={size:g}.",
                topic="data-changed",
            )
        self.batches, self._processes, self._rates = batches, processes, None

    def start(
        self, planned_steps: float, world: World, directory: Path | None, steps_before: int = 0
    ) -> None:
        """Declare the plan, find how much of it the budget affords, and open the ledger's run.

        Args:
            steps_before: noised steps that the Trainer has made already; a second fit of the same
                Trainer goes on in the schedule where the first one ended.
            planned_steps: noised steps that the Trainer is still going to make; may be infinite.
            world: the processes of the job.
            directory: where the journal goes, unless it has its place already; None for a trial run
                that makes no file (what it spends is in the journal of the next run).

        Raises:
            ValueError: if the noise must be calibrated and the number of steps is infinite.
            JournalError: if the journal cannot be used.
        """
        run = world.broadcast(secrets.token_hex(8))
        if directory is None and self.ledger.journal_path is not None:
            directory = self.ledger.journal_path.parent  # it exists, so it must know
        if world.is_lead:
            self.ledger.begin(run, directory)
            self._refuse_smaller_budget()
            if self.batches is not None:
                self.ledger.note(DATA, self.batches.num_records, self.config.data_set)
        record = world.broadcast(self.ledger.state_dict())
        if not world.is_lead:
            self.ledger.mirror(record)
            self.ledger.begin(run)
        self.ledger.order = world.broadcast(self.ledger.order)
        self._fit = fit = self._planned_fit(planned_steps, world, steps_before)
        self.mechanism = fit.mechanism
        target = self.config.target_epsilon
        if target is not None and self.is_adaptive and world.is_lead:
            self.ledger.order = self.ledger.order or fit.mechanism.guard.order
            order = () if self.ledger.order is None else (self.ledger.order,)
            at = (self.config.target_delta, self.config.relation)
            self.ledger.note(BUDGET, target, *at, *order)
        if target is not None and self.config.noise_multiplier is None and world.is_lead:
            is_replanned = self._is_replanned(fit.mechanism)
            self.ledger.note_plan(target, int(fit.end), is_replanned=is_replanned)
        self._resumed, self.stop_reason = None, None

    def _refuse_smaller_budget(self) -> None:
        """Refuse a target below the ε that noise chosen at run time has for good."""
        promised, target = self.ledger.budget, self.config.target_epsilon
        if promised is not None and target is not None and target < promised.epsilon:
            raise RefusedSetting(
                f"target_epsilon={target}: the noise of earlier steps was chosen at run time for a "
                f"budget of ε = {promised.epsilon}, which they cost as a whole. Give that, or more.",
                topic="other-settings",
            )

    def _planned_fit(self, planned_steps: float, world: World, steps_before: int) -> PlannedFit:
        """Find the noise and the budget of the steps to come."""
        budget, resumed = self._budget(self.ledger.history()), self._resumed
        self._promised = self.epsilon_of_plan or self._promised
        check_bounded(budget.spent, self.config.relation)
        state = self._state_to_continue(steps_before)
        step = 0 if state is None else int(state["step"])
        is_calibrated = resumed is None or self._may_replan(step + planned_steps)
        scale = 0.0 if resumed is None else self._resumed_scale
        if is_calibrated:
            new = budget.scale(planned_steps, step, self.epsilon)
            is_calibrated = resumed is None or scale < new < math.inf
            scale = new if is_calibrated else scale
        fit = PlannedFit.declare(
            budget,
            self.ledger,
            world,
            planned_steps,
            scale=scale,
            is_calibrated=is_calibrated and self.config.noise_multiplier is None,
            state=state,
        )
        fit.mechanism.left_over = self._left_over(fit, goes_on=state is not None)
        return fit

    def _left_over(self, fit: PlannedFit, *, goes_on: bool) -> History:
        """Return what was planned, and no fit will make any more: results may have ended the last one."""
        before, known, last = self._fit, fit.mechanism.left_over, math.inf
        if self._resumed is not None:
            before, last = fit, self._resumed.get("last_step") or math.inf
        elif before is not None:
            last = before.last_step
            known = known if goes_on else before.mechanism.uncharged
        if before is None or self.is_adaptive:
            return known
        # A plan that the budget cuts short is no shorter by anybody's choice.
        plan = before.mechanism.plan
        is_made = goes_on and fit.mechanism.plan.makes_batches_of(plan)
        first = fit.end if is_made else before.mechanism.step
        if not first < last < math.inf or plan.scale == math.inf:
            return known
        return counted([*known, *plan.history(int(first), int(last - first))])

    @property
    def _resumed_scale(self) -> float:
        """The noise multiplier of the checkpoint that is resumed, where the schedule's shape is 1."""
        assert self._resumed is not None
        return float(self._resumed["noise_scale"])

    def _may_replan(self, last_step: float) -> bool:
        """True if the noise of a resumed run may be calibrated for the budget that a crash has left.

        Steps between the checkpoint and the crash are charged, and made again. The noise that was
        planned without them would end the run early; more of it reaches the end. That is a plan
        fixed in advance only if nothing but the crash led to it: nobody ended the run, the target and
        the number of steps are the same, and the checkpoint is the latest one.
        """
        crashed, config = self.ledger.crashed, self.config
        if crashed is None or config.noise_multiplier is not None:
            return False
        if self.is_adaptive or config.accountant.is_its_own_guard:
            return False
        return (crashed.target_epsilon, crashed.last_step) == (config.target_epsilon, last_step)

    def _is_replanned(self, mechanism: Mechanism) -> bool:
        """True if noise was calibrated after steps that it assumes to have had no say in it."""
        before = self._resumed_scale if self._resumed is not None else 0 if self.steps else math.inf
        needs_plan = mechanism.guard.claim(self.config.target_delta) is None
        return needs_plan and before < mechanism.plan.scale < math.inf

    def replan(self, world: World) -> bool:
        """Recompute how much of the plan the budget affords, after a charge was spent on nothing.

        False where nothing changes: if all steps are alike, the guard's count is enough.
        """
        fit = self._fit
        if fit is None or fit.mechanism.plan.is_constant:
            return False
        mechanism, budget = fit.mechanism, self._budget(self.ledger.history())
        left = fit.end - mechanism.step
        affordable = world.broadcast(budget.affordable(mechanism.plan, mechanism.step, left))
        fit.affordable_end = mechanism.step + affordable
        mechanism.guard = mechanism.guard.replanned(affordable)
        return True

    def _budget(self, spent: History) -> Budget:
        if self.batches is None:
            raise RefusedRun(
                "PrivateRun.use_batches() must come before a plan is made.", topic="out-of-order"
            )
        return Budget(self.config, self.batches, spent, self._processes, self.ledger.order)

    def _state_to_continue(self, steps_before: int) -> dict[str, Any] | None:
        """Return the mechanism's state from the checkpoint, or from this Trainer's fit before."""
        if self._resumed is not None:
            state: dict[str, Any] = self._resumed["mechanism"]
            return state
        if self.mechanism is not None and 0 < steps_before == self.mechanism.step:
            return self.mechanism.state_dict()
        return None

    def void(self, reason: str) -> None:
        """End the run for good: ε of all that it released is withdrawn, durably."""
        self.stop_reason = "voided"
        self.ledger.void(reason)

    def stop(self) -> None:
        """End the fit: close the journal and drop the current step; its charge stays."""
        # On a full disk, what cannot be written now is a charge that has raised already.
        with contextlib.suppress(OSError):
            self.ledger.end()
        if self._fit is not None:
            self._fit.mechanism.end()
            self._fit.is_under_way = False
        self._resumed = None

    # -- checkpoints -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs, as plain types; released values only."""
        mechanism = self.mechanism
        return {
            "version": _VERSION,
            "config": self.config.fingerprint(),
            "batches": None if self.batches is None else asdict(self.batches),
            "seeded": self.is_seeded,
            "noise_scale": None if mechanism is None else mechanism.plan.scale,
            "mechanism": None if mechanism is None else mechanism.state_dict(),
            "ledger": self.ledger.state_dict(),
            "costliest": None if self._fit is None else self._fit.costliest,
            "last_step": None if self._fit is None else self._fit.last_step,
        }

    def load_state_dict(self, state: dict[str, Any], directory: Path, world: World) -> None:
        """Continue the run of a checkpoint: its plan and state, and every charge known of it.

        Raises:
            ValueError: if the configuration differs from the checkpoint's; both values are named.
            JournalError: if the checkpoint's journal is missing or damaged.
        """
        if state["version"] != _VERSION:
            raise RefusedSetting(
                f"The checkpoint's privacy record has version {state['version']}; this is {_VERSION}. "
                "Resume it with the version of lightning_dp that wrote it.",
                topic="other-version",
            )
        refuse_unknown("its privacy record", state, {*self.state_dict(), "report"})
        refuse_unknown("its batches", state["batches"] or {}, {f.name for f in fields(BatchPlan)})
        self.config.check_same(state["config"])
        scale, given = state["noise_scale"], self.config.noise_multiplier
        if scale is not None and given is not None:
            check_same({"noise_multiplier": scale}, {"noise_multiplier": given})
        if world.is_lead:
            ahead = 0 if state["mechanism"] is None else int(state["mechanism"].get("ahead", 0))
            self.ledger.restore(state["ledger"], directory, ahead)
            self._refuse_smaller_budget()
        self.is_seeded = self.is_seeded or bool(state["seeded"])
        report = state.get("report", {})
        self.started = report.get("started")
        self._promised = float(report.get("epsilon_of_plan") or 0.0)  # inf is a text there
        self._resumed = None if state["mechanism"] is None else state
