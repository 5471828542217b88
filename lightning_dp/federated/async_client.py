"""The client of asynchronous SGD: one noised sum per round, and its own copy of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_dp._noise import random_generator
from lightning_dp._validate import normalise, not_negative, number, optional, seed
from lightning_dp.accounting import AbstractEvent, Gaussian, Relation
from lightning_dp.boundary import Query, Term
from lightning_dp.federated.agreement import check_point, try_before_first_charge
from lightning_dp.federated.asynchronous import LOST, REFUSED, ROUND, UPDATE, AsyncPlan
from lightning_dp.federated.ledger import Make, ReleaseLedger
from lightning_dp.federated.protocol import (
    AbstractClient,
    Message,
    MessageError,
    Records,
    draw,
    noise_source,
    noised_sum,
)
from lightning_dp.federated.spending import Spending, check_budget
from lightning_dp.mechanism import BudgetExhausted
from lightning_dp.sampling import Poisson

__all__ = ["AsyncClient", "ClientPrivacy"]

NOTE = "note"


@dataclass(frozen=True)
class ClientPrivacy:
    """How one client protects its records: its own choice, not the server's.

    Args:
        max_grad_norm: C of the gradient of one record (or of the whole client's sum).
        noise_multiplier: z, or a function of the round: noise of standard deviation z C on the
            sum of each round; 0 for none.
        target_epsilon: of everything that is ever released about the data set, by all runs;
            ``math.inf``, said in so many words, for none.
        target_delta: in (0, 1).
        relation: the neighbouring relation.
        seed: for tests only: the same batches and noise each time, which protects nobody.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> ClientPrivacy(0.1, noise_multiplier=8.0, target_epsilon=1.0, target_delta=5.5e-8).is_private
        True
    """

    max_grad_norm: float
    noise_multiplier: float | Callable[[int], float]
    target_epsilon: float
    target_delta: float = 1e-5
    relation: Relation = "add_remove"
    seed: int | None = None

    def __post_init__(self) -> None:
        normalise(self, number, "max_grad_norm")
        normalise(self, optional(seed), "seed")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be greater than 0.")
        if not callable(self.noise_multiplier):
            normalise(self, not_negative, "noise_multiplier")
        check_budget(self.target_epsilon, self.target_delta, self.relation)

    def noise(self, i: int) -> float:
        """z of round i."""
        return (
            self.noise_multiplier(i) if callable(self.noise_multiplier) else self.noise_multiplier
        )

    @property
    def is_private(self) -> bool:
        """Whether any noise is meant to be added; not whether it is enough."""
        return callable(self.noise_multiplier) or self.noise_multiplier > 0


class AsyncClient(AbstractClient):
    r"""In round i: U = Σ clip_C(g(ŵ)) over a Poisson batch, + N(0, (z_i C)² I); ŵ ← ŵ - η̄_i U.

    The batch has each record with probability q_i = share · s_i / N. All gradients of a round are
    taken at the model that it began with, so U moves by at most C with one record. (In the paper's
    listing the model moves after each single gradient inside a round: one record would change
    all later gradients, and C would bound nothing. It also adds η̄ n where the server subtracts it.)

    - The request for a round is answered once. Asked again, also by a new process on the same
      ledger, the client sends the same bytes.
    - A new process finds ŵ in the ledger; without one it says that it lost it, and is sent it.

    Without privacy, ``local_steps`` is the paper's loop: ŵ ← ŵ - η g after each record, with η_t
    for each ("diminishing1") or the round's η̄_i ("diminishing2"). There is no ε then.

    van Dijk et al. (2020), Algorithm 2.1, with Poisson batches and one model per round.

    Args:
        records: this client's data.
        plan: what was agreed on.
        privacy: this client's own settings.
        ledger: of this data set; None only without noise.
        run: the name of the federation, as at the server.
        share: p_c > 0: s_i is multiplied by it.
        local_steps: None for one model per round.

    Raises:
        ValueError: if a batch would be larger than the data set, noise has no ledger, or local
            steps have noise.
    """

    def __init__(
        self,
        records: Records,
        plan: AsyncPlan,
        privacy: ClientPrivacy,
        ledger: ReleaseLedger | None,
        *,
        run: str,
        share: float = 1.0,
        local_steps: Literal["diminishing1", "diminishing2"] | None = None,
    ) -> None:
        if not 0 < share < math.inf:
            raise ValueError(f"share={share} must be finite and greater than 0.")
        if local_steps not in (None, "diminishing1", "diminishing2"):
            raise ValueError(
                f"local_steps={local_steps!r} must be 'diminishing1' or 'diminishing2'."
            )
        if privacy.is_private and local_steps is not None:
            raise ValueError(
                f"local_steps={local_steps!r} moves the model inside a round, and no noise at its end "
                "makes that private. Use local_steps=None, or noise_multiplier=0."
            )
        if privacy.is_private and ledger is None:
            raise ValueError("ledger=None: noised releases must be booked. Give a ReleaseLedger.")
        self._records, self._plan, self._privacy = records, plan, privacy
        self._run, self._share, self._local_steps = run, share, local_steps
        largest = max(plan.sizes(i) for i in range(plan.rounds)) * share
        if not largest <= records.num_records:
            raise ValueError(
                f"A round asks for {largest:g} records in expectation, and this client has "
                f"{records.num_records}. Lower the sample sizes, the rounds or its share."
            )
        self._ledger: ReleaseLedger | _Memory = _Memory() if ledger is None else ledger
        self._spending = Spending(
            run,
            plan.rounds,
            lambda i: [self._event(i)],
            privacy.target_epsilon,
            privacy.target_delta,
            privacy.relation,
            retain=plan.lag + 1,  # a server that went back to its last state asks these again
        )
        self._point: Tensor | None = None  # ŵ at the beginning of round ...
        self._round = 0
        self._counter = 0

    # -- what it costs -----------------------------------------------------------------------

    def _rate(self, i: int) -> float:
        return min(1.0, self._share * self._plan.sizes(i) / self._records.num_records)

    def _event(self, i: int) -> AbstractEvent:
        z = self._privacy.noise(i)
        if self._records.unit == "client":  # its presence is not a matter of chance
            return Gaussian(z)
        return Poisson().event(z, self._rate(i))

    @property
    def epsilon(self) -> float:
        """ε at ``target_delta`` spent so far on this data set, by all runs; inf without noise."""
        if isinstance(self._ledger, _Memory):
            return math.inf
        return self._ledger.epsilon(self._privacy.target_delta, self._privacy.relation)

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "unit": self._records.unit,
            "seeded": self._privacy.seed is not None,
        }
        if isinstance(self._ledger, _Memory):
            return facts
        return {**facts, **self._ledger.facts(self._spending)}

    # -- one round ---------------------------------------------------------------------------

    def answer(self, request: bytes) -> bytes:
        message = Message.from_bytes(request)
        if message.kind != ROUND or message["run"] != self._run:
            raise MessageError(
                f"This client answers rounds of run {self._run!r}, not {message.facts}."
            )
        i = message.whole("round")
        if not i < self._plan.rounds:
            raise MessageError(f"Round {i} of {self._plan.rounds} was asked for.")
        if "model" in message.tensors:
            self._point, self._round = message.tensor("model"), i
            self._counter = message.whole("counter")
        elif self._round != i or self._point is None:
            self._remember()
        if self._round != i or self._point is None:
            sent = self._ledger.find(self._spending, i, 0)
            return sent or Message(LOST, {"round": i}).to_bytes()
        point, facts = self._point, {"round": i, "counter": self._counter}
        self._check(point)
        note = Message(NOTE, facts, {"point": point}).to_bytes()
        if isinstance(self._ledger, ReleaseLedger):
            try_before_first_charge(self._records, self._ledger, self._spending)
        try:
            reply = self._ledger.release(
                self._spending,
                i,
                0,
                lambda rng: self._make(i, point, self._generator(i, rng)),
                note=note,
            )
        except BudgetExhausted:
            return Message(REFUSED, {"round": i}).to_bytes()
        update = Message.from_bytes(reply).tensor("update")
        self._point, self._round = self._plan.move(point, i, update), i + 1
        return reply

    def _check(self, point: Tensor) -> None:
        """A model that cannot be asked about is refused before anything is charged."""
        check_point(self._records, point)
        try:
            self._plan.check(len(point), 1)
        except ValueError as error:
            raise MessageError(str(error)) from None

    def _remember(self) -> None:
        """In a new process: ŵ after the latest release, from the model that it was made at."""
        note = self._ledger.note(self._spending)
        if not note:
            return
        message = Message.from_bytes(note)
        i, self._counter = message.whole("round"), message.whole("counter")
        sent = self._ledger.find(self._spending, i, 0)
        assert sent is not None
        update = Message.from_bytes(sent).tensor("update")
        self._point, self._round = self._plan.move(message.tensor("point"), i, update), i + 1

    def _generator(self, i: int, rng: np.random.Generator) -> np.random.Generator:
        seed = self._privacy.seed  # batches and noise are different streams of it
        return rng if seed is None else random_generator(seed, 1, i)

    def _make(self, i: int, point: Tensor, rng: np.random.Generator) -> bytes:
        """Charged by now: ask the records."""
        drawn = draw(self._records, self._rate(i), rng)
        if self._local_steps is not None:
            value = self._walk(i, point, rng.permutation(drawn).tolist())
        else:
            value = self._noised(i, point, drawn)
        return Message(UPDATE, {"round": i, "counter": self._counter}, {"update": value}).to_bytes()

    def _query(self, i: int, point: Tensor) -> Query:
        coordinates = self._plan.coordinates(i, len(point))
        noise = self._privacy.noise(i)
        return Query((Term(1.0, point),), self._privacy.max_grad_norm, noise, coordinates)

    def _noised(self, i: int, point: Tensor, drawn: list[int]) -> Tensor:
        source = noise_source(self._privacy.seed, i)
        return noised_sum(self._records, self._query(i, point), drawn, source).value

    def _walk(self, i: int, point: Tensor, drawn: list[int]) -> Tensor:
        """The paper's loop, without privacy: U such that ŵ - η̄_i U is where it ends."""
        plan, total, each_round = self._plan, None, self._plan.step_size(i)
        for h, record in enumerate(drawn):
            eta = each_round
            if self._local_steps == "diminishing1":
                eta = plan.steps(plan.gradients_before(i) + h)
            part = self._records.bounded_sum(self._query(i, point), [record])
            step = part.value * (eta / each_round)
            point = plan.move(point, i, step)
            total = step if total is None else total + step
        if total is None:
            size = plan.update_size(len(point))
            return torch.zeros(size, dtype=torch.promote_types(point.dtype, torch.float32))
        return total


@dataclass
class _Memory:
    """Keeps the latest reply, where there is no privacy to book."""

    _latest: tuple[int, int, bytes] = field(default=(-1, 0, b""))

    def find(self, spending: Spending, round_: int, part: int) -> bytes | None:
        return self._latest[2] if self._latest[:2] == (round_, part) else None

    def note(self, spending: Spending) -> bytes:
        return b""

    def release(
        self, spending: Spending, round_: int, part: int, make: Make, *, note: bytes
    ) -> bytes:
        sent = self.find(spending, round_, part)
        if sent is None:
            sent = make(random_generator(None))
            self._latest = (round_, part, sent)
        return sent
