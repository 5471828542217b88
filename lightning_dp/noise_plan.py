"""The noise and the batches of every step, declared before the first one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp._validate import positive, whole
from lightning_dp.accounting import PLDAccountant, StreamingRDPAccountant
from lightning_dp.accounting.base import AbstractAccountant, Relation
from lightning_dp.accounting.events import AbstractEvent, History, noise_together
from lightning_dp.accounting.guards import AbstractGuard, FixedGuard, GDPGuard, RDPGuard
from lightning_dp.accounting.rdp import OneOrderAccountant
from lightning_dp.accounting.steps import (
    AbstractPairPlan,
    FloatArray,
    Steps,
    merge_arrays,
)
from lightning_dp.boundary import Query, State
from lightning_dp.config import PrivacyConfig
from lightning_dp.estimators.base import AbstractEstimator, MeanGradient, Traits
from lightning_dp.noise import AbstractNoise, BandedNoise, IndependentNoise, LambdaCGD, Workload
from lightning_dp.sampling import (
    AbstractSampling,
    BatchPlan,
    CyclicPoisson,
    FixedOrder,
    Poisson,
    RandomAllocation,
    TruncatedPoisson,
)
from lightning_dp.sampling.blocks import AbstractBlockSampling, Window
from lightning_dp.schedules import AbstractSchedule

Whole = TypeVar("Whole", int, NDArray[np.int64])

__all__ = [
    "BatchChoice",
    "BatchSuggestion",
    "Budget",
    "LaterSteps",
    "NoisePlan",
    "costliest_events",
    "suggest_batches",
]

_ENDLESS = 10**9  # steps searched for a budget's end when the Trainer has none
_HORIZON = 100_000  # steps looked at beyond the next one, of a plan without an end
_BANDS = (2, 4, 8, 16, 32)
_LAMBDAS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)
_ROOM = 5  # standard deviations of a batch's size, above its mean
_WORTH_IT = 0.95  # of the error of independent noise; less is not worth the memory
_ALIKE = 1.02  # an error that is nearly the best, for half of the memory


@dataclass(frozen=True)
class NoisePlan:
    """z_t = scale · schedule(t) · relative noise(t), q_t = q · relative rate(t), for every step t.

    The relative ones are the estimator's; both are 1 where its steps are all alike.

    Steps that depend on each other (noise that remembers, batches of a block) are a block from ``start``
    on, in which one charge covers ``window`` steps in a row.

    Args:
        scale: the noise multiplier where the shape is 1; 0 trains without privacy.
        shape: the noise schedule.
        sampling: the sampling scheme that turns (z_t, q_t) into a privacy event.
        sample_rate: q, the sampling rate.
        estimator: what is asked at every step.
        noise: with its coefficients.
        window: steps that one charge covers.
        start, end: steps of the plan between which it is used; the last charge ends there.

    Example:
        >>> from lightning_dp.sampling import Poisson
        >>> from lightning_dp.schedules import Constant
        >>> NoisePlan(1.5, Constant(), Poisson(), 0.01).event(step=7)
        PoissonGaussian(noise_multiplier=1.5, sample_rate=0.01)
    """

    scale: float
    shape: AbstractSchedule
    sampling: AbstractSampling
    sample_rate: float
    estimator: AbstractEstimator = field(default_factory=MeanGradient)
    noise: AbstractNoise = field(default_factory=IndependentNoise)
    window: int = 1
    start: int = 0
    end: float = math.inf

    @cached_property
    def traits(self) -> Traits:
        """The facts about the estimator's steps that are known in advance."""
        return self.estimator.traits

    @property
    def is_constant(self) -> bool:
        """True if every charge makes the same event."""
        sampling = type(self.sampling)
        # Of other blocks, subclasses among them, later charges may cost more.
        is_alike = (
            not issubclass(sampling, AbstractBlockSampling)
            or sampling in (CyclicPoisson, RandomAllocation)
            or (sampling is FixedOrder and type(self.noise) is IndependentNoise)
        )
        return self.shape.is_constant and self.traits.period == 1 and is_alike

    @property
    def is_block(self) -> bool:
        """True if steps depend on each other."""
        return self.window > 1 or isinstance(self.sampling, AbstractBlockSampling)

    @property
    def is_plain(self) -> bool:
        """True if every step makes the same event, and no step depends on another."""
        return self.is_constant and not self.is_block and self.noise.bands == 1

    def makes_batches_of(self, other: NoisePlan) -> bool:
        """Return whether steps are as in another plan, up to the scale of the noise and a new block."""
        return (
            replace(other, scale=self.scale, noise=self.noise, start=self.start, end=self.end)
            == self
        )

    def charges_before(self, step: Whole) -> Whole:
        """Return the number of charges from the start of the block to this step, or to each of some."""
        return -(-(step - self.start) // self.window)

    def charges(self, step: int, number: int) -> int:
        """Return how many charges the next ``number`` steps from this one on take."""
        return self.charges_before(step + number) - self.charges_before(step)

    def steps_of(self, charges: int, step: int) -> int:
        """Return the number of steps, from this one on, that ``charges`` more afford."""
        return (self.charges_before(step) + charges) * self.window + self.start - step

    def noise_multiplier(self, step: int) -> float:
        """Return z_t. Raises ValueError if the shape is not positive and finite there."""
        return self.scale * self.relative_noise(step)

    def noise_multiplier_now(self, state: State, step: int) -> float:
        """Return z_t as chosen at run time; the planned one, unless the schedule is adaptive."""
        return self.scale * self._relative(partial(self.shape.now, state), step)

    def relative_noise(self, step: int) -> float:
        """Return z_t / scale."""
        return self._relative(self.shape, step)

    def _relative(self, shape: Callable[[int], float], step: int) -> float:
        try:
            value = shape(step)
        except OverflowError:
            value = math.inf
        if not 0 < value < math.inf:
            raise ValueError(
                f"noise_schedule={self.shape} gives {value} at step {step}; "
                "a schedule must be positive and finite at every step."
            )
        return value * self.traits.relative_noise(step)

    def rate(self, step: int) -> float:
        """q_t."""
        return min(1.0, self.sample_rate * self.traits.relative_rate(step))

    def event(self, step: int) -> AbstractEvent:
        """The privacy event of step t as planned."""
        return self.event_of(self.noise_multiplier(step), step)

    def event_of(self, noise_multiplier: float, step: int) -> AbstractEvent:
        """The privacy event of step t, or of the charge that begins there, with this noise multiplier."""
        if not isinstance(self.sampling, AbstractBlockSampling):
            return self.sampling.event(noise_multiplier, self.rate(step))
        # A Trainer without a budget may go on after the plan's end.
        last = self.end if step < self.end else math.inf
        to_window = self.window - (step - self.start) % self.window
        number, steps = (step - self.start) // self.window, int(min(to_window, last - step))
        window = Window(self.noise, number, self.window, steps)
        return self.sampling.charge(noise_multiplier, self.rate(step), window)

    def enforce(self, queries: Sequence[Query], least: float, step: int) -> None:
        """Refuse queries on one batch that together have less noise than their charge.

        Gaussian queries on the same records, also adaptive ones, are one with Σ_s z_s^-2 = z^-2.

        Args:
            queries: of step t.
            least: z that their step was charged with.
            step: its place in the plan.
        """
        together = noise_together([query.noise_multiplier for query in queries])
        if not together >= least:
            on_one = f" with {len(queries)} queries on one batch" if len(queries) > 1 else ""
            raise RefusedRun(
                f"{self.estimator} with noise_schedule={self.shape} asked for "
                f"noise_multiplier={together}{on_one} at step {step}, below the planned "
                f"{least}: the plan is an envelope.",
                topic="out-of-order",
            )

    def relative_noises(self, first: int, last: int) -> FloatArray:
        """z_t / scale of the steps ``first <= t < last``."""
        return np.array([self.relative_noise(step) for step in range(first, last)], dtype=float)

    def rates(self, first: int, last: int) -> FloatArray:
        """q_t of the steps ``first <= t < last``."""
        period = self.traits.period
        kinds = np.array([self.rate(step) for step in range(first, min(last, first + period))])
        return np.resize(kinds, last - first)

    def steps(self, first: int, number: int) -> Steps:
        """Return (z, q) of so many steps, merged, at once where all are alike."""
        if self.is_constant:
            from lightning_dp.accounting.calibration import alike

            noise, rate = self.event(first).pair
            return alike(rate, self.charges(first, number), noise)
        return merge_arrays(*self.later(first).pairs(0, self.charges(first, number)))

    def later(self, step: int) -> LaterSteps:
        """Return the charges of the plan from a step on."""
        return LaterSteps(self, step)

    def events_from(self, step: int) -> AbstractEvent | LaterSteps:
        """Return the events of the charges from a step on; one event if all are alike."""
        one_kind = self.is_constant and math.isfinite(self.scale)
        return self.event(step) if one_kind else self.later(step)

    def history(self, step: int, number: int) -> History:
        """Return the events of the next ``number`` steps from this one on."""
        events, charges = self.events_from(step), self.charges(step, number)
        if isinstance(events, AbstractEvent):
            return [(events, charges)] if charges else []
        return [(events(charge), 1) for charge in range(charges)]


@dataclass(frozen=True)
class LaterSteps(AbstractPairPlan):
    """The events of a plan's charges from a step on, for accounting; of its steps, one charge each."""

    plan: NoisePlan
    step: int

    @property
    def is_exact(self) -> bool:
        return self.plan.sampling.has_pairs

    def __call__(self, charge: int) -> AbstractEvent:
        plan = self.plan
        return plan.event(plan.start + (plan.charges_before(self.step) + charge) * plan.window)

    def pairs(self, first: int, last: int) -> tuple[FloatArray, FloatArray]:
        """(z, q) of the charges ``first <= t < last``."""
        plan = self.plan
        if type(plan.sampling) is Poisson:  # whose event says what it is given; others may not
            first, last = self.step + first, self.step + last
            return plan.scale * plan.relative_noises(first, last), plan.rates(first, last)
        pairs = np.array([self(charge).pair for charge in range(first, last)], dtype=float)
        return pairs.reshape(-1, 2)[:, 0], pairs.reshape(-1, 2)[:, 1]


@dataclass(frozen=True)
class Budget:
    """The steps to come, from a configuration, its batches and what was spent before.

    Args:
        config: what the user said.
        batches: how batches are made.
        spent: everything that was charged before.
        processes: that share each batch.
        order: of Rényi, at which earlier runs whose noise was chosen at run time kept to it.
    """

    config: PrivacyConfig
    batches: BatchPlan
    spent: History
    processes: int = 1
    order: float | None = None

    def plan(self, scale: float, step: int = 0, planned_steps: float = math.inf) -> NoisePlan:
        """The plan whose noise multiplier is ``scale`` where the schedule's shape is 1.

        Args:
            scale: of the noise.
            step, planned_steps: which steps; a block begins at the first of them.
        """
        sampling = self.config.sampling
        return replace(
            self.rates(),
            scale=scale,
            noise=self.config.noise.for_steps(planned_steps),
            window=sampling.window(self.batches)
            if isinstance(sampling, AbstractBlockSampling)
            else 1,
            start=step,
            end=step + planned_steps,
        )

    def rates(self) -> NoisePlan:
        """The plan as far as it says which batches are drawn: without its noise."""
        config, rate = self.config, self.batches.sample_rate
        shape, estimator = config.noise_schedule, config.resolved_estimator()
        sampling = config.sampling.among(self.batches, self.processes)
        return NoisePlan(1.0, shape, sampling, rate, estimator)

    def scale(self, planned_steps: float, step: int, epsilon: float) -> float:
        """The noise multiplier where the schedule's shape is 1: as given, or calibrated.

        Args:
            planned_steps: from ``step`` on; may be infinite.
            step: of the plan, the next one.
            epsilon: spent before.

        Raises:
            ValueError: if the noise must be calibrated and the number of steps is infinite.
        """
        config = self.config
        if config.noise_multiplier is not None:
            return float(config.noise_multiplier)
        assert config.target_epsilon is not None
        if not math.isfinite(planned_steps):
            raise RefusedSetting(
                f"target_epsilon={config.target_epsilon} alone calibrates the noise for the steps "
                "of the run, and this Trainer has no last step: give Trainer(max_epochs=...) or "
                "Trainer(max_steps=...), or give noise_multiplier too.",
                topic="no-last-step",
            )
        # Calibration meets a target to one part in 1000; what is left below that is nothing.
        if not epsilon < 0.999 * config.target_epsilon or planned_steps < 1:
            return math.inf  # nothing is left, and no finite noise fits into it
        from lightning_dp.accounting.calibration import alike, calibrate_steps

        number, events = int(planned_steps), None
        if config.sampling.has_pairs:
            shapes = self.plan(1.0, step, planned_steps).steps(step, number)
        else:  # Poisson steps cost about as much
            shapes = alike(self.batches.sample_rate, number)

            def events(scale: float) -> History:
                return self.plan(scale, step, planned_steps).history(step, number)

        return calibrate_steps(
            shapes,
            config.target_epsilon,
            config.target_delta,
            relation=config.relation,
            accountant=self._planner(),
            spent=self.spent,
            events=events,
        )

    def _planner(self) -> AbstractAccountant:
        """The accountant that calibrates the noise, which the guard enforces."""
        full = self.batches.sample_rate == 1 and self._spent_on_full_batches
        if self.config.is_adaptive and not full:
            return self._of_orders
        return self.config.accountant

    @property
    def _of_orders(self) -> AbstractAccountant:
        """The accountant of all Rényi orders, or of the one that is fixed."""
        return StreamingRDPAccountant() if self.order is None else OneOrderAccountant(self.order)

    @property
    def _spent_on_full_batches(self) -> bool:
        """True if nothing but Gaussian releases on all records was charged before."""
        return all(event.is_gaussian and event.pair[1] == 1 for event, _ in self.spent)

    def affordable(
        self, plan: NoisePlan, step: int, planned_steps: float, *, is_calibrated: bool = False
    ) -> float:
        """Return how many steps of the plan, from this one on, the budget affords.

        Args:
            plan, step, planned_steps: which steps.
            is_calibrated: the plan's scale was calibrated just now, for exactly these steps.
        """
        config = self.config
        if not math.isfinite(plan.scale):
            return 0
        if config.target_epsilon is None or config.is_adaptive:
            return math.inf
        if is_calibrated and type(plan.sampling) is Poisson:  # whose events were calibrated with
            return planned_steps
        return self._affordable(plan, step, planned_steps, config.accountant)

    def _affordable(
        self, plan: NoisePlan, step: int, planned_steps: float, accountant: AbstractAccountant
    ) -> int:
        config = self.config
        assert config.target_epsilon is not None
        from lightning_dp.accounting.calibration import affordable_steps

        planned = int(min(planned_steps, _ENDLESS))
        charges = affordable_steps(
            plan.events_from(step),
            plan.charges(step, planned),
            config.target_epsilon,
            config.target_delta,
            relation=config.relation,
            accountant=accountant,
            spent=self.spent,
        )
        # The last charge may end before its block.
        return min(planned, plan.steps_of(charges, step))

    def guard(
        self, plan: NoisePlan, step: int, planned_steps: float, affordable: float
    ) -> AbstractGuard:
        """``gdp`` for full batches, ``rdp`` for noise chosen at run time, else ``fixed``."""
        config, spent = self.config, self.spent
        if config.target_epsilon is None or not math.isfinite(plan.scale):
            return FixedGuard(affordable)
        budget = (config.target_epsilon, config.target_delta, config.relation, spent)
        full = plan.sample_rate == 1 and self._spent_on_full_batches
        is_envelope = plan.shape.chosen == "above a plan"  # which is charged as planned
        is_pair = plan.sampling.has_pairs  # which the other guards add up
        if plan.is_block or not is_pair or config.accountant.is_its_own_guard:
            return FixedGuard(affordable)
        # Of other accountants the ε that is reported may be more than the guard's.
        is_counted = config.is_adaptive or isinstance(config.accountant, PLDAccountant)
        if full and plan.scale > 0 and not is_envelope and is_counted:
            return GDPGuard(*budget)
        if not config.is_adaptive:
            return FixedGuard(affordable)
        if self.spent and self.order is None and self._spent_on_full_batches:
            raise RefusedSetting(
                "The training data or its batches changed during the run: noise_schedule="
                f"{plan.shape} chose the noise of full batches, and batches of q={plan.sample_rate:g} "
                "need a Rényi order that was fixed before them. Keep to full batches, or use a new "
                "DifferentialPrivacy object.",
                topic="data-changed",
            )
        fits = self._affordable(plan, step, planned_steps, self._of_orders)
        # The order is the optimum of all that fits; where nothing does, the first step's will do.
        expected = merge_arrays(*plan.later(step).pairs(0, max(1, fits)))
        return RDPGuard(*budget, expected, self.order)


def costliest_events(plan: NoisePlan, step: int, end: float) -> dict[str, Any] | None:
    """Return an event that no step of a plan costs more than, as plain types for a checkpoint.

    ``events`` holds it, with the position from which on it bounds; ``until`` is the position at which
    this knowledge ends, None if it is for good.

    Args:
        plan: whose noise was fixed in advance.
        step: its present position.
        end: the position at which it ends; may be infinite.

    Returns:
        None if the plan affords no step.
    """
    if not math.isfinite(plan.scale):
        return None
    if plan.is_block:  # a charge costs at most what one costs after many others
        late = _ENDLESS * plan.window
        worst = replace(plan, start=0, end=late + 1).event(late)
        return {"events": [[0, worst.to_dict()]], "until": None}
    is_periodic = plan.shape.is_constant
    # A later fit of more epochs goes beyond the end.
    last = int(plan.traits.period if is_periodic else 2 * min(end, step + _HORIZON))
    least, rate, until = math.inf, 0.0, None if is_periodic else last
    for position in range(last):
        try:
            least = min(least, plan.noise_multiplier(position))
        except ValueError:  # no run gets there
            until = None
            break
        rate = max(rate, plan.rate(position))
    if not rate > 0:
        return None
    return {"events": [[0, plan.sampling.event(least, rate).to_dict()]], "until": until}


class BatchChoice(NamedTuple):
    """Batches and noise to give to ``DifferentialPrivacy``, and the noise that the budget then takes.

    Args:
        sampling, noise, relation: its arguments.
        noise_multiplier: z, calibrated with the events that a fit charges.
        error: root mean square of the noise in all iterates of SGD, over that of Poisson batches with
            independent noise.
    """

    sampling: AbstractSampling
    noise: AbstractNoise
    relation: Relation
    noise_multiplier: float
    error: float


class BatchSuggestion(NamedTuple):
    """A choice of batches and noise, and all that were compared; see :func:`suggest_batches`."""

    best: BatchChoice
    table: tuple[BatchChoice, ...]


def suggest_batches(
    num_records: int,
    batch_size: int,
    epochs: float,
    *,
    target_epsilon: float,
    target_delta: float,
    relation: Relation = "add_remove",
    momentum: float = 0.0,
) -> BatchSuggestion:
    """Compare samplings and noise for a training, at equal ε, from public numbers.

    Each is calibrated with the events that a fit charges, and its noise in the iterates is computed
    (:meth:`~lightning_dp.noise.AbstractNoise.error`). The least under this relation is chosen, but
    Poisson batches with independent noise unless it is 5 % less: banded noise pays where steps are small
    and budgets large (z below about 1.2). A fixed order, for records that cannot be sampled, is compared
    under "zero_out" in the place of "add_remove". What a fit refuses is not in the table.

    Args:
        num_records: of the training set, N.
        batch_size: B of a whole step.
        epochs: passes, also a part of one.
        target_epsilon, target_delta, relation: the budget.
        momentum: of SGD, in [0, 1).

    Raises:
        ValueError: naming the argument.

    Example:
        >>> found = suggest_batches(60_000, 2048, 40, target_epsilon=1.0, target_delta=1e-5)
        >>> found.best.sampling, found.best.noise
        (Poisson(), IndependentNoise())
    """
    num_records, batch_size = whole("num_records", num_records), whole("batch_size", batch_size)
    per_epoch = math.ceil(num_records / batch_size)
    steps = max(1, round(positive("epochs", epochs) * per_epoch))
    workload, independent = Workload(momentum), IndependentNoise()
    in_order: Relation = "zero_out" if relation == "add_remove" else relation
    limit = math.ceil(batch_size + _ROOM * math.sqrt(batch_size))
    asked: list[tuple[AbstractSampling, AbstractNoise, Relation]] = [
        (Poisson(), independent, relation),
        (TruncatedPoisson(limit), independent, relation),
        (RandomAllocation(), independent, relation),
        *((CyclicPoisson(b), BandedNoise(b, workload), relation) for b in _BANDS if b <= steps),
        (FixedOrder(), independent, in_order),
        *((FixedOrder(), LambdaCGD(lam), in_order) for lam in _LAMBDAS),
    ]
    table, of_poisson = list[BatchChoice](), 1.0
    for sampling, noise, each in asked:
        budget = {"target_epsilon": target_epsilon, "target_delta": target_delta, "relation": each}
        try:
            config = PrivacyConfig(**budget, sampling=sampling, noise=noise)  # type: ignore[arg-type]
            batches = sampling.plan(
                num_records=num_records,
                batch_size=batch_size,
                accumulate=1,
                world_size=1,
                loader_length=per_epoch,
            )
        except RefusedSetting:
            continue
        z = Budget(config, batches, spent=()).scale(steps, 0, 0.0)
        error = z * noise.for_steps(steps).error(steps, workload) / batches.expected_batch_size
        of_poisson = of_poisson if table else error
        table.append(BatchChoice(sampling, noise, each, z, error / of_poisson))
    ours = [each for each in table if each.relation == relation]
    least = min(each.error for each in ours)
    best = next(each for each in ours if each.error <= _ALIKE * least)
    return BatchSuggestion(best if best.error < _WORTH_IT else table[0], tuple(table))
