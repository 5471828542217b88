"""The client of synchronous protocols: answers queries that keep to a plan it agreed to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dp import _validate
from lightning_dp._noise import NoiseSource
from lightning_dp._validate import flag, optional, whole
from lightning_dp.accounting import Gaussian
from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.boundary import Query, State
from lightning_dp.federated.agreement import (
    check_engine,
    check_point,
    check_query,
    is_of_ordinary_size,
)
from lightning_dp.federated.bvr_l_sgd import BVRLSGD
from lightning_dp.federated.client import AbstractRounds, Asked, Client, Latest
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.messages import Message, MessageError
from lightning_dp.federated.protocol import Records, bounded, check_records, draw, noised_sum
from lightning_dp.federated.spending import Spending
from lightning_dp.federated.synchronous import (
    ANSWER,
    LOCAL,
    QUERY,
    WALKED,
    check_plan,
    query_from,
)
from lightning_dp.noise_plan import NoisePlan

__all__ = ["QueryClient"]


class QueryClient(Client):
    """Answers what a :class:`~lightning_dp.federated.synchronous.SynchronousServer` asks.

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
        check_records(records)
        flag("trusts_server", trusts_server)
        check_plan(plan, "server" if trusts_server else "client")
        rounds, num_clients = whole("rounds", rounds), whole("num_clients", num_clients)
        client = whole("client", client, 0, num_clients - 1)
        seed = optional(_validate.seed)("seed", seed)
        asked = _Rounds(records, plan, rounds, trusts_server, local_routine, client, num_clients)
        budget = (target_epsilon, target_delta, relation)
        # Both rounds of a step may be asked for again.
        spending = Spending(run, _Round(rounds).number, asked.events, *budget, retain=2)
        super().__init__(asked, ledger, spending, seed=seed)


class _Round(NamedTuple):
    """A round in the ledger. Each step has two: all clients are asked, and one goes on alone."""

    step: int
    is_alone: bool = False

    @property
    def number(self) -> int:
        """The place in the ledger's order."""
        return 2 * self.step + self.is_alone

    @classmethod
    def of(cls, number: int) -> _Round:
        """Return the round at a place in the ledger."""
        step, is_alone = divmod(number, 2)
        return cls(step, bool(is_alone))


@dataclass(frozen=True)
class _Rounds(AbstractRounds):
    """Rounds of a synchronous protocol; the arguments are those of :class:`QueryClient`."""

    kinds: ClassVar[tuple[str, ...]] = (QUERY, LOCAL)

    plan: NoisePlan
    steps: int
    trusts_server: bool
    local_routine: BVRLSGD | None
    client: int
    num_clients: int

    def __post_init__(self) -> None:
        if self.local_routine is not None and self.records.unit != "record":
            raise ValueError(
                f"unit={self.records.unit!r}: the local routine is private for records."
            )
        check_engine(self.records, self.plan.estimator)

    @property
    def facts(self) -> dict[str, Any]:
        return {"trusts_server": self.trusts_server}

    def events(self, i: int) -> Sequence[AbstractEvent]:
        step, is_alone = _Round.of(i)
        if is_alone:
            routine = self._routine_of(step)
            return [] if routine is None else [routine.event] * (routine.local_steps - 1)
        if self.records.unit == "client":  # its presence is not a matter of chance
            return [Gaussian(self.plan.noise_multiplier(step))]
        return [self.plan.event(step)]

    def _routine_of(self, step: int) -> BVRLSGD | None:
        """Return the local routine if it is this client's turn and has more than one step."""
        routine = self.local_routine
        if routine is None or routine.local_steps == 1:
            return None
        in_turn = routine.worker_in_turn(step + 1, self.num_clients)
        return routine if in_turn == self.client else None

    # -- before the charge -------------------------------------------------------------------

    def read(self, request: Message, latest: Latest) -> Asked:
        if request.kind == LOCAL:
            return self._read_walk(request)
        step, part = request.whole("round"), request.whole("part")
        query, noise = query_from(request), request["noise"]
        self._check(query, step, part, noise)
        place = {"round": step, "part": part}

        def make(rng: np.random.Generator, source: NoiseSource) -> Message:
            drawn = draw(self.records, self.plan.rate(step), rng, self.plan.sampling)
            if noise == "server":
                value = bounded(self.records, query, drawn).value
            else:
                value = noised_sum(self.records, query, drawn, source).value
            return Message(ANSWER, place, {"sum": value})

        return Asked(_Round(step).number, part, place, make, keep=noise == "client")

    def _check(self, query: Query, step: int, part: int, noise: str) -> None:
        if noise not in ("server", "client"):
            raise MessageError(f"noise={noise!r} must be 'server' or 'client'.")
        if noise == "server" and not self.trusts_server:
            raise MessageError(
                "The server asks for a sum without noise. If it may have that, and noises it, "
                "say so with trusts_server=True."
            )
        queries = self.plan.estimator.traits.queries_per_step
        if not part < queries:
            raise MessageError(f"Part {part} of step {step}: the plan has {queries} queries.")
        if step < self.steps:  # else the ledger refuses it
            check_query(self.records, self.plan, query, step, part)

    # -- a local routine ---------------------------------------------------------------------

    def _read_walk(self, request: Message) -> Asked:
        """Check that a routine begins in this client's turn, at a model, with a step of some length."""
        step, part = request.whole("round"), request.whole("part")
        routine = self._routine_of(step)
        if routine is None:
            raise MessageError(f"Step {step} is not this client's turn for a local routine.")
        x, v = request.tensor("x"), request.tensor("v")
        check_point(self.records, x, "x")
        check_point(self.records, v, "v")
        if len(v) != len(x) or v.dtype != x.dtype:
            raise MessageError(f"x has {len(x)} numbers of {x.dtype}, and v {len(v)} of {v.dtype}.")
        start = routine.start(x, v)
        check_point(self.records, start["x"], "x after the server's step")
        if routine.ask(start) is not None and _next(routine, start) is None:
            raise MessageError("v is too short or too long for differences to be clipped.")
        place = {"round": step, "part": part}

        def make(rng: np.random.Generator, source: NoiseSource) -> Message:
            end = self._walk(routine, start, rng, source)
            return Message(WALKED, place, {"x": end.to(x.dtype)})

        return Asked(_Round(step, is_alone=True).number, 0, place, make)

    def _walk(
        self, routine: BVRLSGD, state: State, rng: np.random.Generator, source: NoiseSource
    ) -> Tensor:
        """Return the end of the local routine. Every step is noised, and only the end is sent."""
        batch = routine.sample_rate * self.records.num_records
        while (query := _next(routine, state)) is not None:
            drawn = draw(self.records, routine.sample_rate, rng)
            released = noised_sum(self.records, query, drawn, source)
            state = routine.tell(state, released.mean(batch))
        x: Tensor = state["x"]
        return x if bool(torch.isfinite(x).all()) else state["before"]


def _next(routine: BVRLSGD, state: State) -> Query | None:
    """Return the query that the local routine asks; None where it ends."""
    try:
        query = routine.ask(state)
    except RuntimeError:  # the points are no longer finite, by noised values only
        return None
    is_asked = query is not None and (query.noise_multiplier == 0 or is_of_ordinary_size(query))
    return query if is_asked else None
