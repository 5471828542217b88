"""One private step: ask, charge, answer, noise, tell, post-process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._refusals import Refusal, RefusedRun
from lightning_dp._world import World
from lightning_dp.accounting.events import AbstractEvent, History, event_from_dict
from lightning_dp.accounting.guards import AbstractGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import (
    BoundedSum,
    Query,
    Release,
    State,
    add_noise,
    begin_with_noise,
)
from lightning_dp.clipping import AdaptiveQuantile, split_count
from lightning_dp.config import refuse_unknown
from lightning_dp.estimators.base import Driver
from lightning_dp.functional import brought_to, number_of_entries, shares_memory
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.plan.signal import SignalTracker
from lightning_dp.postprocessing import AbstractPostProcessor, NoiseFilter, postprocessed

__all__ = ["BudgetExhausted", "Mechanism"]

# Up to here (4 MiB) noise may be drawn from the forward pass on, next to the last step's gradients.
_EARLY_VALUES = 1 << 20


class BudgetExhausted(Refusal, RuntimeError):
    """The next step would exceed the privacy budget; nothing was charged or asked."""

    def __init__(self, text: str) -> None:
        super().__init__(text, topic="budget-exhausted")


@dataclass
class _Step:
    """A step that was begun: what it asked so far, and what was answered to the latest query.

    Args:
        driver: the estimator as it is in this step.
        charged: z that the step was charged with.
        size: d, the entries of all parameters.
        asked: its queries; none if it asks nothing.
        query: the one to be answered now.
        total: the answer of the chunks so far; None before the first one, if it did not begin with the
            noise.
        begun: gives the total that begins with the noise, as soon as that is drawn.
    """

    driver: Driver
    charged: float
    size: int
    asked: tuple[Query, ...]
    query: Query | None
    total: BoundedSum | None = field(default=None, repr=False)
    begun: Callable[[], BoundedSum] | None = field(default=None, repr=False)


@dataclass
class Mechanism:
    """Runs the private steps of one model, and holds all state that a step leaves behind.

    Each step is ``ask`` (public; charges the ledger, durably, before any data is touched), then
    ``answer`` once per chunk of the batch (sensitive), then ``tell`` (noise, and everything after
    it, which is post-processing).

    - Once begun, a step is charged, even if its batch is empty or it never finishes. A step whose
      estimator asks nothing is not charged; it still uses up its place in the plan.
    - An estimator may ask several queries on the batch of one step. They are charged together, as
      one Gaussian with Σ_s z_s^-2 = z^-2 on one sample, before the first; each further one is
      refused, before the data are touched, if all of them so far have less noise than that.
    - A charge of several steps in a row is made at the first of them; a stop inside has paid for all.
    - Every answer must be bounded by exactly the clip norm that the query asked for.
    - Under the guard "fixed" the noise is never less than the plan's, and the plan is charged; the
      other guards are charged what the run-time schedule chose.

    Args:
        plan: what is asked at every step, z_t, and the event that it makes.
        postprocessing: applied to the estimate, in order.
        ledger: charged before each step.
        guard: says before each step whether it fits into the budget.
        num_records: N; the divisor of the mean at step t is B_t = q_t N.
        noise: where the noise comes from.
        world: the processes that share the step.
        signal: follows the releases; None without advice.
        count_weight: κ of the count of clipped records in queries for a gradient; 0 counts none.
        spares_memory: no noise is drawn next to the gradients of the last step.
        quantile: moves the clip norm from step to step, by the counts that were released; None where the
            estimator's own holds.
        left_over: planned events of earlier fits, which ended before their plans.
    """

    plan: NoisePlan
    postprocessing: tuple[AbstractPostProcessor, ...]
    ledger: Ledger
    guard: AbstractGuard
    num_records: float
    noise: NoiseSource
    world: World
    signal: SignalTracker | None = None
    count_weight: float = 0.0
    spares_memory: bool = False
    quantile: AdaptiveQuantile | None = None
    left_over: History = ()
    clip_norm: float | None = field(default=None, init=False)  # of the next step, once it has moved
    noise_variance: float | None = field(default=None, init=False)
    """Of the noise in each entry of the latest private gradient; None where it is not known."""
    _filter: NoiseFilter = field(init=False, repr=False)
    _driver: Driver | None = field(default=None, init=False, repr=False)  # None before any step
    _postprocessing_states: list[State] = field(default_factory=list, init=False, repr=False)
    _schedule_state: State = field(default_factory=dict, init=False, repr=False)
    _unasked: dict[AbstractEvent, int] = field(default_factory=dict, init=False, repr=False)
    _begun: _Step | None = field(default=None, init=False, repr=False)  # None between steps
    _is_loaded: bool = field(default=False, init=False, repr=False)  # the states are a file's
    covered: int = field(default=0, init=False)  # steps to come that are charged already
    step: int = field(default=0, init=False)
    """The step of the plan that is next, or that was begun."""

    def __post_init__(self) -> None:
        self._schedule_state = self.plan.shape.init()
        self._filter = NoiseFilter(self.plan.estimator, self.postprocessing)

    # -- where it is -------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """True if one more step would exceed the budget."""
        return not self.guard.fits(
            lambda: self.plan.event_of(self.next_noise_multiplier, self.step)
        )

    @property
    def next_noise_multiplier(self) -> float:
        """z of the next step."""
        return self.plan.noise_multiplier_now(self._schedule_state, self.step)

    @property
    def query(self) -> Query | None:
        """The query to be answered now; None if nothing is asked."""
        return None if self._begun is None else self._begun.query

    @property
    def ahead(self) -> int:
        """Steps that are charged and not made yet."""
        return self.covered + (self.query is not None)

    @property
    def is_begun(self) -> bool:
        """True if a step was begun and not finished."""
        return self._begun is not None

    @property
    def unasked(self) -> History:
        """Planned events of the steps that asked nothing, and so were not charged."""
        return list(self._unasked.items())

    @property
    def uncharged(self) -> History:
        """All planned events that were not charged, and will not be."""
        return [*self._unasked.items(), *self.left_over]

    # -- ask ---------------------------------------------------------------------------------

    def ask(self, params: Sequence[Tensor]) -> Query | None:
        """Begin a step: form its query and charge it; None, and no charge, if it asks nothing.

        A step that was begun and not finished is dropped, with everything answered to it.

        Raises:
            BudgetExhausted: if the step does not fit; nothing is charged.
        """
        # Asked once: what is charged is what the guard has let pass, whatever the schedule says then.
        noise = cache(lambda: self.next_noise_multiplier)
        if not self.guard.fits(lambda: self.plan.event_of(noise(), self.step)):
            raise BudgetExhausted(
                f"The privacy budget does not allow another step after {self.ledger.steps}. Stop at "
                "Mechanism.exhausted, or raise target_epsilon."
            )
        if self.plan.is_block and self.is_begun:
            raise RefusedRun(
                f"Step {self.step} was not finished: with {self.plan.sampling} the next one would come "
                "too soon after those before. Step once per batch, or use sampling=Poisson().",
                topic="fixed-order",
            )
        if self._is_loaded:
            self._bring_to(params[0].device)
        if self._driver is None:
            self._driver = Driver.begin(self.plan.estimator, params)
        chosen = noise()
        query = self._counting(self._driver.ask(params, chosen, self._moved_as_on_lead))
        step = self.step
        charged = self.guard.charged(lambda: self.plan.noise_multiplier(step), chosen)
        event = self.plan.event_of(charged, step)
        asked = () if query is None else (query,)
        if query is None:
            self._unasked[event] = self._unasked.get(event, 0) + 1
            self.guard.skip()
        else:
            self.plan.enforce(asked, charged, step)
            self._charge(event)
        self._begun = _Step(self._driver, charged, number_of_entries(params), asked, query)
        is_small = self._begun.size <= _EARLY_VALUES and not self.spares_memory
        if self.world.is_sharded or is_small:
            self.begin_noise(params)
        return query

    def _charge(self, event: AbstractEvent) -> None:
        """Charge a step, or the steps in a row that begin with it, unless an earlier charge covers it."""
        if self.covered:
            self.covered -= 1
            self.guard.skip()
            return
        self.ledger.charge(event)
        self.guard.book(event)
        if self.plan.is_block:  # other steps may have other noise
            self.covered = event.num_steps - 1

    def _bring_to(self, device: torch.device) -> None:
        """Go on there with the states that were loaded."""
        self._is_loaded = False
        self._postprocessing_states = brought_to(self._postprocessing_states, device)
        self._schedule_state = brought_to(self._schedule_state, device)
        if self._driver is not None:
            state = brought_to(self._driver.state, device)
            self._driver = replace(self._driver, state=state)

    def _ask_again(self, step: _Step, params: Sequence[Tensor]) -> None:
        """Ask the next query of a step, if the step's charge covers it."""
        if not step.asked:
            raise RefusedRun(
                f"{self.plan.estimator} asked nothing at step {self.step}, which was not charged, so "
                "it must have an estimate: a further query has no noise to draw on.",
                topic="out-of-order",
            )
        query = step.driver.ask(params, step.charged, self._as_on_lead)
        assert query is not None  # of the first part only
        asked = (*step.asked, query)
        self.plan.enforce(asked, step.charged, self.step)
        step.asked, step.query, self._begun = asked, query, step
        self.begin_noise(params)

    def _counting(self, query: Query | None) -> Query | None:
        """Have clipped records counted, where the query is for their gradients at one point."""
        if query is None or not self.count_weight > 0 or not query.is_gradient:
            return query
        return replace(query, count_weight=self.count_weight)

    def _moved_as_on_lead(self, query: Query | None) -> Query | None:
        """Return the query with the clip norm that follows from the releases before it."""
        if query is not None and self.clip_norm is not None:
            query = replace(query, clip_norm=self.clip_norm)
        return self._as_on_lead(query)

    def _as_on_lead(self, query: Query | None) -> Query | None:
        """Return the query with the bound of rank 0: a norm may differ in its last bit elsewhere."""
        if self.world.size == 1:
            return query
        clip_norm = self.world.broadcast(None if query is None else query.clip_norm)
        if (query is None) != (clip_norm is None):
            raise RefusedRun(
                f"Rank {self.world.rank} and rank 0 do not ask the same at step {self.step}: their "
                "parameters differ. Nothing but the optimizer may change them during fit.",
                topic="ranks-differ",
            )
        return None if query is None else replace(query, clip_norm=clip_norm)

    def begin_noise(self, params: Sequence[Tensor]) -> None:
        """Have the sum begin with its noise, drawn in the background while the gradients are computed.

        Called by :meth:`ask` for small models; for larger ones when the gradients of the step before
        are gone, since it takes a vector of the model's size.
        """
        step = self._begun
        query = None if step is None else step.query
        if step is None or query is None or step.begun is not None or step.total is not None:
            return
        if not self.world.is_sharded:
            share = self.world.share(query.size(step.size))
            is_worth_it = self.noise.has_background(share.stop - share.start, params[0].device)
            if not is_worth_it or query.noise_multiplier == 0:
                return
        step.begun = begin_with_noise(query, params, self.noise, self.world)

    def _with_total(self) -> _Step | None:
        """Return the step that was begun, with the noise in its sum if the sum begins with it."""
        step = self._begun
        if step is not None and step.begun is not None:
            step.total, step.begun = step.begun(), None
        return step

    # -- answer ------------------------------------------------------------------------------

    @property
    def so_far(self) -> BoundedSum | None:
        """The sum over the chunks of this step that were answered; None if it has not begun."""
        step = self._with_total()
        return None if step is None else step.total

    def answer(self, part: BoundedSum) -> None:
        """Add the answer of one chunk; the chunks of a step must hold different records.

        Args:
            part: its sum, or :attr:`so_far` with it added in the same memory.
        """
        step = self._with_total()
        query = None if step is None else step.query
        if step is None or query is None:
            raise RefusedRun(
                "Nothing was asked: Mechanism.ask() must come before answer().",
                topic="out-of-order",
            )
        # Not even a smaller one: the noise follows rank 0's bound, which must hold on every rank.
        if part.clip_norm != query.sensitivity:
            raise RefusedRun(
                f"The answer is bounded by {part.clip_norm}, the query asked for "
                f"{query.sensitivity}.",
                topic="out-of-order",
            )
        coordinates = query.coordinates
        if coordinates is not None and part.value.numel() != len(coordinates):
            raise RefusedRun(
                f"The answer has {part.value.numel()} entries, the query asked for "
                f"{len(coordinates)} coordinates.",
                topic="out-of-order",
            )
        step.total = part if step.total is None else step.total.plus(part)

    # -- tell --------------------------------------------------------------------------------

    def tell(
        self, params: Sequence[Tensor], answer_again: Callable[[], None] | None = None
    ) -> Tensor:
        """Finish the step: the private gradient estimate, flat of length d.

        A step without any answer (an empty batch) releases pure noise.

        Args:
            params: the trainable parameters.
            answer_again: answers what :attr:`query` then is, from the records of the same batch
                and no others; called for each further query of an estimator that has several.
        """
        try:
            estimate, step = self._tell(params)
            while estimate is None:
                self._ask_again(step, params)
                if answer_again is None:
                    raise RefusedRun(
                        f"tell() needs answer_again= for the further queries of {self.plan.estimator}.",
                        topic="out-of-order",
                    )
                answer_again()
                estimate, step = self._tell(params)
        finally:
            self.drop()
        self._driver, self.step = step.driver, step.driver.step
        estimate, self._postprocessing_states = postprocessed(
            self.postprocessing, self._postprocessing_states, estimate, params
        )
        # What is done to p.grad in place (clipped, or set to zero) is not to reach the next step.
        states = self._driver.state, self._postprocessing_states, self._schedule_state
        return estimate.clone() if shares_memory(estimate, states) else estimate

    def _tell(self, params: Sequence[Tensor]) -> tuple[Tensor | None, _Step]:
        """Noise the answer to the present query, and tell the estimator and the schedule."""
        step = self._with_total()
        if step is None:
            raise RefusedRun(
                "No step was begun: Mechanism.ask() must come before tell().", topic="out-of-order"
            )
        self.drop()  # whatever happens now, the same sum is not released twice
        released = self._release(step, params).mean(self.plan.rate(self.step) * self.num_records)
        if step.query is not None:
            released = self._observe(step.query, released)
        self._schedule_state = self.plan.shape.observe(self._schedule_state, released.value)
        size = len(released.value)
        self.noise_variance = self._filter.advance(self.step, released.noise_std, size)
        estimate, step.driver = step.driver.tell(params, released)
        step.total = None
        return estimate, step

    def _observe(self, query: Query, released: Release) -> Release:
        """Show a release to those who follow them, and return its gradient alone."""
        gradient, count = split_count(released, query)
        if self.signal is not None:
            self.signal.observe(query, gradient, self.step, count)
        if self.quantile is not None and count is not None:
            share = (1.0 + float(count.value)) / 2
            self.clip_norm = self.quantile.next_norm(query.clip_norm, share)
        return gradient

    def _release(self, step: _Step, params: Sequence[Tensor]) -> Release:
        """Return the noised sum; zeros without noise if nothing was asked."""
        query = step.query
        if query is None:
            return Release.of_nothing(params)
        total = BoundedSum.empty(query, params) if step.total is None else step.total
        return add_noise(total, query.noise_multiplier, self.noise, self.world)

    def drop(self) -> None:
        """Forget the step that was begun; its charge stays."""
        self._begun = None

    def end(self) -> None:
        """Forget the step that was begun, its noise and the other processes: none follows."""
        self.drop()
        self.noise.close()
        self.world = World(self.world.rank, self.world.size)

    # -- state -------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without the step that was begun, whose sum is not noised."""
        return {**vars(self), "_begun": None, "covered": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return released values only: the step and the states of the parts. Never a sum."""
        return {
            "step": self.step,
            "estimator": None if self._driver is None else self._driver.state,
            "postprocessing": self._postprocessing_states,
            "schedule": self._schedule_state,
            "unasked": [[event.to_dict(), count] for event, count in self._unasked.items()],
            "left_over": [[event.to_dict(), count] for event, count in self.left_over],
            "signal": None if self.signal is None else self.signal.state_dict(),
            "clip_norm": self.clip_norm,
            "noise": self._filter.covariance,
            "ahead": self.ahead,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`."""
        refuse_unknown("its mechanism", state, self.state_dict().keys())
        told = state["estimator"]
        if told is not None:
            self.step = int(state["step"])
            self._driver = Driver(self.plan.estimator, told, self.step)
        self._postprocessing_states = list(state["postprocessing"])
        self._schedule_state = state["schedule"]
        self._unasked = {event_from_dict(event): int(n) for event, n in state["unasked"]}
        self.left_over = [(event_from_dict(e), int(n)) for e, n in state.get("left_over", ())]
        self._is_loaded = True
        self.clip_norm = state.get("clip_norm")
        self._filter.covariance = state.get("noise", self._filter.covariance)
        if self.signal is not None and state.get("signal") is not None:
            self.signal.load_state_dict(state["signal"])
