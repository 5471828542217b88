"""The client of synchronous protocols: answers queries that keep to a plan it agreed to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dp import _validate
from lightning_dp._noise import random_generator
from lightning_dp._validate import optional, whole
from lightning_dp.accounting import AbstractEvent, Gaussian, Relation
from lightning_dp.boundary import Query, State
from lightning_dp.federated.agreement import (
    check_engine,
    check_point,
    check_query,
    is_of_ordinary_size,
    try_before_first_charge,
)
from lightning_dp.federated.asynchronous import REFUSED
from lightning_dp.federated.bvr_l_sgd import BVRLSGD
from lightning_dp.federated.ledger import Make, ReleaseLedger
from lightning_dp.federated.protocol import (
    AbstractClient,
    Message,
    MessageError,
    Records,
    bounded,
    draw,
    noise_source,
    noised_sum,
)
from lightning_dp.federated.spending import Spending
from lightning_dp.federated.synchronous import (
    ANSWER,
    LOCAL,
    QUERY,
    WALKED,
    check_plan,
    query_from,
)
from lightning_dp.mechanism import BudgetExhausted
from lightning_dp.plan import NoisePlan

__all__ = ["QueryClient"]


class QueryClient(AbstractClient):
    """Answers what a :class:`~lightning_dp.federated.SynchronousServer` asks.

    The server says which query; this client holds it to the plan: the noise is at least z_t, the
    batch is its own, drawn with q_t, and step t is charged as planned, once, before its first
    query, whatever the server asks.

    Un-noised sums leave only if ``trusts_server``, and are never written to disk; the ledger then
    books what the server promised to add.

    Args:
        records: this client's data.
        plan: z_t, q_t and the estimator, as at the server.
        ledger: of this data set.
        run: the name of the federation, as at the server.
        rounds: how many steps.
        target_epsilon: of everything that is ever released about the data set, by all runs;
            ``math.inf``, said in so many words, for none.
        target_delta: in (0, 1).
        relation: the neighbouring relation.
        trusts_server: the server may have this client's un-noised sums, and noises them.
        local_routine: what this client does alone when it is its turn; with ``client``, its number,
            and ``num_clients``.
        seed: for tests only: the same batches and noise each time, which protects nobody.

    Raises:
        ValueError: naming the argument that is out of its range.
    """

    def __init__(
        self,
        records: Records,
        plan: NoisePlan,
        ledger: ReleaseLedger,
        *,
        run: str,
        rounds: int,
        target_epsilon: float,
        target_delta: float,
        relation: Relation = "add_remove",
        trusts_server: bool = False,
        local_routine: BVRLSGD | None = None,
        client: int = 0,
        num_clients: int = 1,
        seed: int | None = None,
    ) -> None:
        check_plan(plan, "server" if trusts_server else "client")
        rounds, num_clients = whole("rounds", rounds), whole("num_clients", num_clients)
        client, seed = whole("client", client, 0), optional(_validate.seed)("seed", seed)
        if not 0 <= client < num_clients:
            raise ValueError(f"client={client} must be one of 0, ..., {num_clients - 1}.")
        if local_routine is not None and records.unit != "record":
            raise ValueError(f"unit={records.unit!r}: the local routine is private for records.")
        check_engine(records, plan.estimator)
        self._records, self._plan, self._ledger, self._run = records, plan, ledger, run
        self._trusts_server, self._local_routine, self._seed = trusts_server, local_routine, seed
        self._client, self._num_clients = client, num_clients
        # In the ledger each step has two rounds: what all are asked, and what one does alone.
        budget = (target_epsilon, target_delta, relation)
        self._spending = Spending(run, 2 * rounds, self._events, *budget, retain=2)

    # -- what it costs -----------------------------------------------------------------------

    def _events(self, number: int) -> list[AbstractEvent]:
        step, alone = divmod(number, 2)
        if not alone:
            if self._records.unit == "client":  # its presence is not a matter of chance
                return [Gaussian(self._plan.noise_multiplier(step))]
            return [self._plan.event(step)]
        routine = self._local_routine
        if routine is None or routine.worker_in_turn(step + 1, self._num_clients) != self._client:
            return []
        return [routine.event] * (routine.local_steps - 1)

    @property
    def epsilon(self) -> float:
        """ε at ``target_delta`` spent so far on this data set, by all runs."""
        return self._ledger.epsilon(self._spending.target_delta, self._spending.relation)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "unit": self._records.unit,
            "seeded": self._seed is not None,
            "trusts_server": self._trusts_server,
            **self._ledger.facts(self._spending),
        }

    # -- answers -----------------------------------------------------------------------------

    def answer(self, request: bytes) -> bytes:
        message = Message.from_bytes(request)
        if message.kind not in (QUERY, LOCAL) or message["run"] != self._run:
            raise MessageError(
                f"This client answers queries of run {self._run!r}: {message.facts}."
            )
        step, part = message.whole("round"), message.whole("part")
        if message.kind == LOCAL:
            self._check_walk(message, step)
            return self._release(2 * step + 1, 0, step, lambda rng: self._walk(message, step, rng))
        query, noise = query_from(message), message["noise"]
        self._check(query, step, part, noise)
        return self._release(
            2 * step,
            part,
            step,
            lambda rng: self._answer(query, noise, step, part, rng),
            keep=noise == "client",
        )

    def _release(self, number: int, part: int, step: int, make: Make, keep: bool = True) -> bytes:
        try_before_first_charge(self._records, self._ledger, self._spending)
        try:
            return self._ledger.release(self._spending, number, part, make, keep=keep)
        except BudgetExhausted:
            return Message(REFUSED, {"round": step, "part": part}).to_bytes()

    def _check(self, query: Query, step: int, part: int, noise: str) -> None:
        if noise not in ("server", "client"):
            raise MessageError(f"noise={noise!r} must be 'server' or 'client'.")
        if noise == "server" and not self._trusts_server:
            raise MessageError(
                "The server asks for a sum without noise. If it may have that, and noises it, "
                "say so with trusts_server=True."
            )
        queries = self._plan.estimator.queries_per_step
        if not part < queries:
            raise MessageError(f"Part {part} of step {step}: the plan has {queries} queries.")
        if 2 * step < self._spending.rounds:  # else the ledger refuses it
            check_query(self._records, self._plan, query, step, part)

    def _check_walk(self, message: Message, step: int) -> None:
        """A local routine begins in this client's turn, at a model, and with a step of some length."""
        if not self._events(2 * step + 1):
            raise MessageError(f"Step {step} is not this client's turn for a local routine.")
        x, v = message.tensor("x"), message.tensor("v")
        check_point(self._records, x, "x")
        check_point(self._records, v, "v")
        if len(v) != len(x) or v.dtype != x.dtype:
            raise MessageError(f"x has {len(x)} numbers of {x.dtype}, and v {len(v)} of {v.dtype}.")
        assert self._local_routine is not None
        start = self._local_routine.start(x, v)
        check_point(self._records, start["x"], "x after the server's step")
        if self._local_routine.ask(start) is not None and self._next(start) is None:
            raise MessageError("v is too short or too long for differences to be clipped.")

    def _next(self, state: State) -> Query | None:
        """The query that the local routine asks; None where it ends."""
        assert self._local_routine is not None
        try:
            query = self._local_routine.ask(state)
        except RuntimeError:  # the points are no longer finite, by noised values only
            return None
        is_asked = query is not None and (query.noise_multiplier == 0 or is_of_ordinary_size(query))
        return query if is_asked else None

    def _generator(self, rng: np.random.Generator, number: int) -> np.random.Generator:
        return rng if self._seed is None else random_generator(self._seed, 1, number)

    def _answer(
        self, query: Query, noise: str, step: int, part: int, rng: np.random.Generator
    ) -> bytes:
        """Charged by now: ask the records."""
        rng = self._generator(rng, 2 * step)
        drawn = draw(self._records, self._plan.rate(step), rng, self._plan.sampling)
        if noise == "server":
            value = bounded(self._records, query, drawn).value
        else:
            source = noise_source(self._seed, 2 * step, part)
            value = noised_sum(self._records, query, drawn, source).value
        return Message(ANSWER, {"round": step, "part": part}, {"sum": value}).to_bytes()

    def _walk(self, message: Message, step: int, rng: np.random.Generator) -> bytes:
        """The local routine from x and v; every step of it is noised, and only the end is sent."""
        routine = self._local_routine
        assert routine is not None
        state = routine.start(message.tensor("x"), message.tensor("v"))
        rng, source = self._generator(rng, 2 * step + 1), noise_source(self._seed, 2 * step + 1)
        batch = routine.sample_rate * self._records.num_records
        while (query := self._next(state)) is not None:
            drawn = draw(self._records, routine.sample_rate, rng)
            released = noised_sum(self._records, query, drawn, source)
            state = routine.tell(state, released.mean(batch))
        x: Tensor = state["x"]
        x = x if bool(torch.isfinite(x).all()) else state["before"]
        facts = {"round": step, "part": message.whole("part")}
        return Message(WALKED, facts, {"x": x.to(message.tensor("x").dtype)}).to_bytes()
