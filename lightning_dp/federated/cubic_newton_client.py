"""The client of DP-FCRN: a whole round on its own records, of which k noised numbers leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dp import _validate
from lightning_dp._noise import random_generator
from lightning_dp._validate import not_negative, number, optional
from lightning_dp.accounting import AbstractEvent, Gaussian, Relation
from lightning_dp.boundary import Query
from lightning_dp.federated.agreement import (
    check_engine,
    check_point,
    is_of_ordinary_size,
    try_before_first_charge,
)
from lightning_dp.federated.asynchronous import REFUSED, ROUND, UPDATE
from lightning_dp.federated.cubic_newton import CubicNewtonPlan
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import (
    AbstractClient,
    Message,
    MessageError,
    Records,
    draw,
    noise_source,
    noised_sum,
)
from lightning_dp.federated.spending import Spending
from lightning_dp.mechanism import BudgetExhausted

__all__ = ["CubicNewtonClient"]

DIVERGED = "diverged"


class CubicNewtonClient(AbstractClient):
    """Client i of a :class:`~lightning_dp.federated.CubicNewtonPlan`.

    - A round is charged to the ledger, on disk, before a record is touched.
    - The request for a round is answered once. Asked again, also by a new process on the same
      ledger, the client sends the same bytes: no noise is drawn anew.
    - Noise, sampling and budget are this client's own choice; the server learns none of them from
      a message but that a budget is used up.

    Args:
        records: this client's data.
        plan: what was agreed on.
        ledger: of this data set.
        run: the name of the federation, as at the server.
        client: which one this is.
        noise_multiplier: z >= 0 of a whole round (of an inner step with ``fresh_batches``).
        target_epsilon: of everything that is ever released about the data set, by all runs;
            ``math.inf``, said in so many words, for none.
        target_delta: in (0, 1).
        sample_rate: q in (0, 1], the Poisson rate of its batches; 1 is all of its records.
        relation: the neighbouring relation.
        seed: for tests only: the same batches and noise each time, which protects nobody.

    Raises:
        ValueError: naming the argument that is out of its range.
        RuntimeError: by :meth:`answer`, each time, of a round whose inner steps diverged.
    """

    def __init__(
        self,
        records: Records,
        plan: CubicNewtonPlan,
        ledger: ReleaseLedger,
        *,
        run: str,
        client: int,
        noise_multiplier: float,
        target_epsilon: float,
        target_delta: float,
        sample_rate: float = 1.0,
        relation: Relation = "add_remove",
        seed: int | None = None,
    ) -> None:
        noise_multiplier = not_negative("noise_multiplier", noise_multiplier)
        sample_rate = number("sample_rate", sample_rate)
        seed = optional(_validate.seed)("seed", seed)
        if not records.num_records >= 1:
            raise ValueError(f"num_records={records.num_records} must be at least 1.")
        check_engine(records, plan.newton)
        self._newton = plan.newton_of(client)
        events: list[AbstractEvent] = plan.events(noise_multiplier, sample_rate)
        if records.unit == "client":  # its presence is not a matter of chance
            events = [Gaussian(noise_multiplier)] * len(events)
        self._sampling = plan.sampling(sample_rate)
        self._records, self._plan, self._ledger = records, plan, ledger
        self._run, self._client, self._seed = run, client, seed
        self._noise_multiplier, self._sample_rate = noise_multiplier, sample_rate
        budget = (target_epsilon, target_delta, relation)
        # A server that went back to its last state asks for the round before again.
        self._spending = Spending(run, plan.rounds, lambda t: events, *budget, retain=2)

    # -- what it costs -----------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        """ε at ``target_delta`` spent so far on this data set, by all runs."""
        return self._ledger.epsilon(self._spending.target_delta, self._spending.relation)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "unit": self._records.unit,
            "seeded": self._seed is not None,
            **self._ledger.facts(self._spending),
        }

    # -- one round ---------------------------------------------------------------------------

    def answer(self, request: bytes) -> bytes:
        message = Message.from_bytes(request)
        if message.kind != ROUND or message["run"] != self._run:
            raise MessageError(
                f"This client answers rounds of run {self._run!r}, not {message.facts}."
            )
        t, counter, point = (
            message.whole("round"),
            message.whole("counter"),
            message.tensor("model"),
        )
        if not t < self._plan.rounds:
            raise MessageError(f"Round {t} of {self._plan.rounds} was asked for.")
        self._check(point)

        def make(rng: np.random.Generator) -> bytes:
            try:
                step = self._step(point, t, rng).to(point.dtype)
            except _DivergedError as error:
                # Kept like an update, so that no second noise is drawn under the same charge.
                return Message(DIVERGED, {"round": t, "why": str(error)}).to_bytes()
            values = self._plan.update(step, t, self._client)
            facts = {"round": t, "counter": counter}
            return Message(UPDATE, facts, {"update": values}).to_bytes()

        try_before_first_charge(self._records, self._ledger, self._spending)
        try:
            reply = self._ledger.release(self._spending, t, 0, make)
        except BudgetExhausted:
            return Message(REFUSED, {"round": t}).to_bytes()
        made = Message.from_bytes(reply)
        if made.kind == DIVERGED:
            raise RuntimeError(made["why"])
        return reply

    def _check(self, point: Tensor) -> None:
        """A model that cannot be asked about is refused before anything is charged."""
        if point.dtype not in (torch.float32, torch.float64):
            raise MessageError(f"The model is of {point.dtype}; DP-FCRN needs float32 or float64.")
        check_point(self._records, point)
        try:
            self._newton.kept(len(point))
            self._plan.update_size(len(point))
        except ValueError as error:
            raise MessageError(str(error)) from None

    def _step(self, point: Tensor, t: int, rng: np.random.Generator) -> Tensor:
        """u: what this client would add to x_t. Charged by now; every query is noised."""
        newton, q, params = self._newton, self._sample_rate, [point]
        if self._seed is not None:
            rng = random_generator(self._seed, 1, t)
        source = noise_source(self._seed, t)
        state = {**newton.init(params), "round": t}
        step, drawn = torch.zeros_like(point), list[int]()
        for inner in range(newton.inner_steps):
            if inner == 0 or newton.fresh_batches:
                drawn = draw(self._records, q, rng, self._sampling)
            query = _at(newton.ask(state, params, t, self._noise_multiplier), point)
            if query.noise_multiplier > 0 and not is_of_ordinary_size(query):
                raise _DivergedError(f"inner step {inner} asks for clip norm {query.clip_norm}")
            released = noised_sum(self._records, query, drawn, source)
            mean = released.mean(q * self._records.num_records)
            try:
                estimate, state = newton.tell(state, params, t, mean)
            except RuntimeError as error:
                raise _DivergedError(str(error)) from None
            if estimate is not None:
                step = step - estimate
        return step


class _DivergedError(Exception):
    """The inner steps are no longer finite: said by noised values only."""


def _at(query: Query, point: Tensor) -> Query:
    """The query with its points written out."""
    terms = tuple(
        replace(term, point=point if term.point is None else term.point) for term in query.terms
    )
    return replace(query, terms=terms)
