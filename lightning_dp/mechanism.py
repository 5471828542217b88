"""One private step: ask, charge, answer, noise, tell, post-process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dp.accounting.ledger import Ledger
from lightning_dp.estimators.base import AbstractEstimator, State
from lightning_dp.functional import flatten
from lightning_dp.noise import NoiseSource, add_noise
from lightning_dp.plan import NoisePlan
from lightning_dp.postprocessing.base import AbstractPostProcessor
from lightning_dp.query import BoundedSum, Query
from lightning_dp.world import World

__all__ = ["BudgetExhausted", "Mechanism"]


class BudgetExhausted(RuntimeError):
    """The next step would exceed the privacy budget; nothing was charged or asked."""


@dataclass
class Mechanism:
    """Runs the private steps of one model, and holds all state that a step leaves behind.

    Each step is ``ask`` (public; charges the ledger, durably, before any data is touched), then
    ``answer`` once per chunk of the batch (sensitive), then ``tell`` (noise, and everything after
    it, which is post-processing).

    - A step that is begun is charged, also if its batch is empty or it is never finished.
    - Every answer must be bounded by the clip norm that the query asked for.
    - The released noise is never less than the plan's.

    Args:
        plan: z_t and the event of every step.
        estimator: what is asked, and made of the answers.
        postprocessing: applied to the estimate, in order.
        ledger: charged before each step.
        limit: the ledger must not grow beyond this many charges.
        expected_batch_size: B, the divisor of every mean.
        noise: where the noise comes from.
        world: the processes that share the step.
    """

    plan: NoisePlan
    estimator: AbstractEstimator
    postprocessing: tuple[AbstractPostProcessor, ...]
    ledger: Ledger
    limit: float
    expected_batch_size: float
    noise: NoiseSource
    world: World
    step: int = 0
    _estimator_state: State | None = field(default=None, repr=False)
    _postprocessing_states: list[State] = field(default_factory=list, repr=False)
    _query: Query | None = field(default=None, repr=False)
    _total: BoundedSum | None = field(default=None, repr=False)

    @property
    def exhausted(self) -> bool:
        """Whether one more step would exceed the budget."""
        return self.ledger.steps >= self.limit

    @property
    def query(self) -> Query | None:
        """The query of the step under way."""
        return self._query

    def ask(self, params: Sequence[Tensor]) -> Query:
        """Begin a step: form its query and charge it.

        A step that was begun and not finished is dropped, with everything answered to it.

        Raises:
            BudgetExhausted: if the step does not fit; nothing is charged.
        """
        if self.exhausted:
            raise BudgetExhausted(
                f"The privacy budget allows {self.limit} steps, all of them spent."
            )
        if self._estimator_state is None:
            self._estimator_state = self.estimator.init(params)
        planned = self.plan.noise_multiplier(self.step)
        query = self.estimator.ask(self._estimator_state, params, self.step, planned)
        if not query.noise_multiplier >= planned:
            raise RuntimeError(
                f"{self.estimator} asked for noise_multiplier={query.noise_multiplier} at step "
                f"{self.step}, below the planned {planned}: the plan is an envelope."
            )
        plan = self.plan
        self.ledger.charge(plan.sampling.event(query.noise_multiplier, plan.sample_rate))
        self._query, self._total = query, None
        return query

    def answer(self, part: BoundedSum) -> None:
        """Add the answer of one chunk; the chunks of a step must hold different records."""
        if self._query is None:
            raise RuntimeError("Nothing was asked: Mechanism.ask() must come before answer().")
        if not part.clip_norm <= self._query.clip_norm:
            raise RuntimeError(
                f"The answer is bounded by {part.clip_norm}, the query asked for at most "
                f"{self._query.clip_norm}."
            )
        self._total = part if self._total is None else self._total.plus(part)

    def tell(self, params: Sequence[Tensor]) -> Tensor:
        """Finish the step: the private gradient estimate, flat of length d.

        A step without any answer (an empty batch) releases pure noise.
        """
        query, state = self._query, self._estimator_state
        if query is None or state is None:
            raise RuntimeError("Nothing was asked: Mechanism.ask() must come before tell().")
        total = self._total or BoundedSum(_zeros(params), query.clip_norm)
        self._query, self._total = None, None
        release = add_noise(total, query.noise_multiplier, self.noise, self.world)
        estimate, self._estimator_state = self.estimator.tell(
            state, params, release.mean(self.expected_batch_size)
        )
        self.step += 1
        return self._postprocess(estimate)

    def _postprocess(self, estimate: Tensor) -> Tensor:
        states = self._postprocessing_states or [
            processor.init(estimate.numel()) for processor in self.postprocessing
        ]
        following = []
        for processor, state in zip(self.postprocessing, states, strict=True):
            estimate, state = processor.apply(state, estimate)
            following.append(state)
        self._postprocessing_states = following
        return estimate

    def drop(self) -> None:
        """Forget the step under way; its charge stays."""
        self._query, self._total = None, None

    def state_dict(self) -> dict[str, Any]:
        """Released values only: step, estimator and post-processor states. Never a running sum."""
        return {
            "step": self.step,
            "estimator": self._estimator_state,
            "postprocessing": self._postprocessing_states,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        self._estimator_state = state["estimator"]
        self._postprocessing_states = list(state["postprocessing"])


def _zeros(params: Sequence[Tensor]) -> Tensor:
    """An empty sum, in at least float32."""
    flat = flatten(params)
    return torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
