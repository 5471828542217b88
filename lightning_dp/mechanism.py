"""One private step: ask, charge, answer, noise, tell, post-process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._world import World
from lightning_dp.accounting.events import AbstractEvent, History, PoissonRound, event_from_dict
from lightning_dp.accounting.guards import AbstractGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.boundary import BoundedSum, Query, Release, State, add_noise
from lightning_dp.plan import NoisePlan
from lightning_dp.postprocessing import AbstractPostProcessor
from lightning_dp.schedules import AbstractAdaptiveSchedule

__all__ = ["BudgetExhausted", "Mechanism"]


class BudgetExhausted(RuntimeError):
    """The next step would exceed the privacy budget; nothing was charged or asked."""


@dataclass
class Mechanism:
    """Runs the private steps of one model, and holds all state that a step leaves behind.

    Each step is ``ask`` (public; charges the ledger, durably, before any data is touched), then
    ``answer`` once per chunk of the batch (sensitive), then ``tell`` (noise, and everything after
    it, which is post-processing).

    - A step that is begun is charged, also if its batch is empty or it is never finished. A step
      whose estimator asks nothing is not charged; it still uses up its place in the plan.
    - An estimator may ask several queries on the batch of one step. They are charged together, as
      one Gaussian with Σ_s z_s^-2 = z^-2 on one sample, before the first; each further one is
      refused, before the data are touched, if all of them so far have less noise than that.
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
    """

    plan: NoisePlan
    postprocessing: tuple[AbstractPostProcessor, ...]
    ledger: Ledger
    guard: AbstractGuard
    num_records: float
    noise: NoiseSource
    world: World
    step: int = 0
    _estimator_state: State | None = field(default=None, repr=False)
    _postprocessing_states: list[State] = field(default_factory=list, repr=False)
    _schedule_state: State = field(default_factory=dict, repr=False)
    _unasked: dict[AbstractEvent, int] = field(default_factory=dict, repr=False)
    _is_under_way: bool = False
    _charged: float = 0.0  # z that the step under way was charged with
    _query: Query | None = field(default=None, repr=False)
    _total: BoundedSum | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.plan.shape, AbstractAdaptiveSchedule):
            self._schedule_state = self.plan.shape.init()

    @property
    def exhausted(self) -> bool:
        """Whether one more step would exceed the budget."""
        return not self.guard.fits(
            lambda: self.plan.event_of(self.next_noise_multiplier, self.step)
        )

    @property
    def next_noise_multiplier(self) -> float:
        """z of the next step."""
        return self.plan.noise_multiplier_now(self._schedule_state, self.step)

    @property
    def query(self) -> Query | None:
        """The query of the step under way; None if it asks nothing."""
        return self._query

    @property
    def is_under_way(self) -> bool:
        """Whether a step was begun and not finished."""
        return self._is_under_way

    @property
    def unasked(self) -> History:
        """Planned events of the steps that asked nothing, and so were not charged."""
        return list(self._unasked.items())

    def ask(self, params: Sequence[Tensor]) -> Query | None:
        """Begin a step: form its query and charge it; None, and no charge, if it asks nothing.

        A step that was begun and not finished is dropped, with everything answered to it.

        Raises:
            BudgetExhausted: if the step does not fit; nothing is charged.
        """
        if self.exhausted:
            raise BudgetExhausted(
                f"The privacy budget does not allow another step after {self.ledger.steps}."
            )
        estimator = self.plan.estimator
        if self._estimator_state is None:
            self._estimator_state = estimator.init(params)
        chosen = self.next_noise_multiplier
        query = estimator.ask(self._estimator_state, params, self.step, chosen)
        query = self._as_on_lead(query)
        least = self._least(chosen)
        event = self.plan.event_of(least, self.step)
        if query is None:
            self._unasked[event] = self._unasked.get(event, 0) + 1
            self.guard.skip()
        else:
            self._enforce([query], least)
            self.ledger.charge(event)
            self.guard.book(event)
            self._prepare_noise(query, params)
        self._is_under_way, self._query, self._total = True, query, None
        self._charged = least
        return query

    def _ask_again(
        self, state: State, params: Sequence[Tensor], asked: Sequence[Query]
    ) -> list[Query]:
        """The queries of the step so far and a next one, which its charge covers."""
        estimator = self.plan.estimator
        if not len(asked) < estimator.queries_per_step:
            raise RuntimeError(
                f"{estimator} made no estimate of {len(asked)} queries at step {self.step}, and "
                f"says queries_per_step={estimator.queries_per_step}."
            )
        query = estimator.ask(state, params, self.step, self._charged)
        query = self._as_on_lead(query)
        if query is None:
            raise RuntimeError(
                f"{estimator} asks nothing at step {self.step}, and has no estimate."
            )
        queries = [*asked, query]
        self._enforce(queries, self._charged)
        self._query, self._total = query, None
        self._prepare_noise(query, params)
        return queries

    def _prepare_noise(self, query: Query, params: Sequence[Tensor]) -> None:
        """Have it drawn while the batch is computed."""
        if self.world.is_lead and query.noise_multiplier > 0:
            size = sum(param.numel() for param in params)
            chosen = query.coordinates
            self.noise.prepare(size if chosen is None else len(chosen), params[0].device)

    def _as_on_lead(self, query: Query | None) -> Query | None:
        """The same bound on every process: a norm may differ in its last bit between machines."""
        if self.world.size == 1:
            return query
        clip_norm = self.world.broadcast(None if query is None else query.clip_norm)
        if (query is None) != (clip_norm is None):
            raise RuntimeError(
                f"Rank {self.world.rank} and rank 0 do not ask the same at step {self.step}: their "
                "parameters differ. Nothing but the optimizer may change them during fit."
            )
        return None if query is None else replace(query, clip_norm=clip_norm)

    def _least(self, chosen: float) -> float:
        """The noise multiplier that the step in turn is charged with."""
        return self.guard.charged(lambda: self.plan.noise_multiplier(self.step), chosen)

    def _enforce(self, queries: Sequence[Query], least: float) -> None:
        """Refuse queries on one batch that together have less noise than what was charged.

        Gaussian queries on the same records, also adaptive ones, are one with Σ_s z_s^-2 = z^-2.
        """
        together = PoissonRound(tuple(query.noise_multiplier for query in queries), 1.0).pair[0]
        if not together >= least:
            on_one = f" with {len(queries)} queries on one batch" if len(queries) > 1 else ""
            raise RuntimeError(
                f"{self.plan.estimator} with noise_schedule={self.plan.shape} asked for "
                f"noise_multiplier={together}{on_one} at step {self.step}, below the planned "
                f"{least}: the plan is an envelope."
            )

    def answer(self, part: BoundedSum) -> None:
        """Add the answer of one chunk; the chunks of a step must hold different records."""
        if self._query is None:
            raise RuntimeError("Nothing was asked: Mechanism.ask() must come before answer().")
        # Not even a smaller one: the noise follows rank 0's bound, which must hold on every rank.
        if part.clip_norm != self._query.clip_norm:
            raise RuntimeError(
                f"The answer is bounded by {part.clip_norm}, the query asked for "
                f"{self._query.clip_norm}."
            )
        coordinates = self._query.coordinates
        if coordinates is not None and part.value.numel() != len(coordinates):
            raise RuntimeError(
                f"The answer has {part.value.numel()} entries, the query asked for "
                f"{len(coordinates)} coordinates."
            )
        self._total = part if self._total is None else self._total.plus(part)

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
        state = self._estimator_state
        if not self._is_under_way or state is None:
            raise RuntimeError("No step was begun: Mechanism.ask() must come before tell().")
        asked = [] if self._query is None else [self._query]
        try:
            estimate, state = self._tell(state, params)
            while estimate is None:
                asked = self._ask_again(state, params, asked)
                if answer_again is None:
                    raise RuntimeError(
                        f"Nobody answers the further queries of {self.plan.estimator}."
                    )
                answer_again()
                estimate, state = self._tell(state, params)
        finally:
            self.drop()
        self._estimator_state = state
        self.step += 1
        return self._postprocess(estimate, params)

    def _tell(self, state: State, params: Sequence[Tensor]) -> tuple[Tensor | None, State]:
        """Noise the answer to the present query, and tell the estimator."""
        query, total = self._query, self._total
        self.drop()  # whatever happens now, the same sum is not released twice
        release = self._release(query, total, params)
        released = release.mean(self.plan.rate(self.step) * self.num_records)
        if isinstance(self.plan.shape, AbstractAdaptiveSchedule):
            self._schedule_state = self.plan.shape.observe(self._schedule_state, released.value)
        return self.plan.estimator.tell(state, params, self.step, released)

    def _postprocess(self, estimate: Tensor, params: Sequence[Tensor]) -> Tensor:
        states = self._postprocessing_states or [
            processor.init(params) for processor in self.postprocessing
        ]
        following = []
        for processor, state in zip(self.postprocessing, states, strict=True):
            estimate, state = processor.apply(state, estimate)
            following.append(state)
        self._postprocessing_states = following
        return estimate

    def _release(
        self, query: Query | None, total: BoundedSum | None, params: Sequence[Tensor]
    ) -> Release:
        """The noised sum; zeros without noise if nothing was asked."""
        if query is None:
            return Release.of_nothing(params)
        if total is None:
            total = BoundedSum.empty(query, params)
        return add_noise(total, query.noise_multiplier, self.noise, self.world)

    def drop(self) -> None:
        """Forget the step under way; its charge stays."""
        self._is_under_way, self._query, self._total = False, None, None

    def end(self) -> None:
        """Forget the step under way, its noise and the other processes: no further step follows."""
        self.drop()
        self.noise.close()
        self.world = World(self.world.rank, self.world.size)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: no step under way, whose sum is not noised."""
        return {**vars(self), "_is_under_way": False, "_query": None, "_total": None}

    def state_dict(self) -> dict[str, Any]:
        """Released values only: the step and the states of the parts. Never a running sum."""
        return {
            "step": self.step,
            "estimator": self._estimator_state,
            "postprocessing": self._postprocessing_states,
            "schedule": self._schedule_state,
            "unasked": [[event.to_dict(), count] for event, count in self._unasked.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self._estimator_state = state["estimator"]
        self._postprocessing_states = list(state["postprocessing"])
        self._schedule_state = state["schedule"]
        self._unasked = {event_from_dict(event): int(n) for event, n in state["unasked"]}
