"""Asynchronous SGD: the plan, and a client that makes one noised sum per round."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._refusals import RefusedSetting, text_of
from lightning_dp._validate import (
    above_0,
    instance,
    normalise,
    not_negative,
    number,
    one_of,
    optional,
    positive,
    seed,
    whole,
)
from lightning_dp.accounting import Gaussian
from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.boundary import Query, Term
from lightning_dp.federated.agreement import check_point
from lightning_dp.federated.asynchronous import ROUND, UPDATE
from lightning_dp.federated.client import AbstractRounds, Asked, Client, Latest
from lightning_dp.federated.ledger import NoLedger, ReleaseLedger
from lightning_dp.federated.messages import Message, MessageError
from lightning_dp.federated.protocol import Records, check_records, draw, noised_sum
from lightning_dp.federated.sequences import AbstractSampleSizes, AbstractStepSizes
from lightning_dp.federated.spending import Spending, check_budget
from lightning_dp.sampling import Poisson
from lightning_dp.sparsify import shared_mask

__all__ = ["AsyncClient", "AsyncPlan", "ClientPrivacy"]

LocalSteps: TypeAlias = Literal["diminishing1", "diminishing2"]

_NOTE = "note"


@dataclass(frozen=True)
class AsyncPlan:
    """The plan that server and clients of asynchronous SGD agree on before round 0.

    Args:
        rounds: T, their number.
        sizes: s_i, the gradients that a client of share 1 computes in round i, in expectation.
        steps: η_t; the round's step size is η̄_i = η_t at t = s_0 + ... + s_(i-1).
        lag: d >= 1: a client begins round i only when every client has done round i - d. 1 is
            synchronous.
        keep: how many coordinates an update has, chosen at random in each round, the same for all
            clients; None for all. The server multiplies them by (all / ``keep``).
        mask_seed: of these choices; public.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> from lightning_dp.federated import PolynomialSizes
        >>> from lightning_dp.federated.sequences import InverseSteps
        >>> plan = AsyncPlan(9, PolynomialSizes(a=100, first=1), InverseSteps(0.1, beta=0.001), lag=2)
        >>> plan.gradients_before(3), plan.step_size(3)
        (600, 0.0625)
    """

    rounds: int
    sizes: AbstractSampleSizes
    steps: AbstractStepSizes
    lag: int = 1
    keep: int | None = None
    mask_seed: int = 0

    def __post_init__(self) -> None:
        normalise(self, whole, "rounds", "lag")
        normalise(self, optional(whole), "keep")
        normalise(self, seed, "mask_seed")

    @cached_property
    def _before(self) -> list[int]:
        return [0, *itertools.accumulate(self.sizes(i) for i in range(self.rounds))]

    def gradients_before(self, i: int) -> int:
        """s_0 + ... + s_(i-1)."""
        return self._before[i]

    def step_size(self, i: int) -> float:
        """η̄_i."""
        return self.steps(self.gradients_before(i))

    def coordinates(self, i: int, size: int) -> Tensor | None:
        """Return the coordinates that an update of round i has, of ``size``; None for all."""
        if self.keep is None:
            return None
        return shared_mask(self.mask_seed, i, size, self.keep)

    def check(self, size: int, num_clients: int) -> None:
        """Raise ValueError if there are fewer coordinates than are kept."""
        if self.keep is not None and not self.keep <= size:
            raise ValueError(f"keep={self.keep} of {size} coordinates.")

    def move(self, point: Tensor, i: int, update: Tensor, client: int = 0) -> Tensor:
        """Return ``point`` - η̄_i U: the move of server and client by any client's update of round i."""
        coordinates = self.coordinates(i, len(point))
        eta = self.step_size(i)
        if coordinates is None:
            return point - eta * update.to(point.dtype)
        scaled = update.to(point.dtype) * (len(point) / len(coordinates))
        return point.index_add(0, coordinates, scaled, alpha=-eta)

    def update_size(self, size: int) -> int:
        """Return the length of an update, of ``size`` parameters."""
        return size if self.keep is None else self.keep


@dataclass(frozen=True)
class ClientPrivacy:
    """The privacy of one client's records: its own choice, not the server's.

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
        normalise(self, above_0, "max_grad_norm")
        normalise(self, optional(seed), "seed")
        if not callable(self.noise_multiplier):
            normalise(self, not_negative, "noise_multiplier")
        check_budget(self.target_epsilon, self.target_delta, self.relation)
        normalise(self, number, "target_epsilon", "target_delta")

    def noise(self, i: int) -> float:
        """z of round i."""
        return (
            self.noise_multiplier(i) if callable(self.noise_multiplier) else self.noise_multiplier
        )

    @property
    def is_private(self) -> bool:
        """True if any noise is meant to be added, enough of it or not."""
        return callable(self.noise_multiplier) or self.noise_multiplier > 0


class AsyncClient(Client):
    r"""In round i: U = Σ clip_C(g(ŵ)) over a Poisson batch, + N(0, (z_i C)² I); ŵ ← ŵ - η̄_i U.

    The batch has each record with probability q_i = share · s_i / N. All gradients of a round are
    taken at the model that it began with, so U moves by at most C with one record. (In the paper's
    listing the model moves after each single gradient inside a round: one record would change
    all later gradients, and C would bound nothing. It also adds η̄ n where the server subtracts it.)

    - The request for a round is answered once. Asked again, also by a new process on the same
      ledger, the client sends the same bytes.
    - Where a request brings no model, ŵ follows from the latest release in the ledger; without one
      the client says that it lost it, and is sent it.

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
        local_steps: LocalSteps | None = None,
    ) -> None:
        instance("plan", plan, AsyncPlan)
        instance("privacy", privacy, ClientPrivacy)
        check_records(records)
        rounds = _Rounds(records, plan, privacy, share, local_steps)
        if privacy.is_private and ledger is None:
            raise ValueError("ledger=None: noised releases must be booked. Give a ReleaseLedger.")
        spending = Spending(
            run,
            plan.rounds,
            rounds.events,
            privacy.target_epsilon,
            privacy.target_delta,
            privacy.relation,
            retain=plan.lag + 1,  # a server that went back to its last state asks these again
        )
        book = NoLedger() if ledger is None else ledger
        super().__init__(rounds, book, spending, seed=privacy.seed)


@dataclass(frozen=True)
class _Rounds(AbstractRounds):
    """Rounds of asynchronous SGD; the arguments are those of :class:`AsyncClient`."""

    kinds: ClassVar[tuple[str, ...]] = (ROUND,)

    plan: AsyncPlan
    privacy: ClientPrivacy
    share: float
    local_steps: LocalSteps | None

    def __post_init__(self) -> None:
        normalise(self, positive, "share")
        optional(one_of(get_args(LocalSteps)))("local_steps", self.local_steps)
        if self.privacy.is_private and self.local_steps is not None:
            raise ValueError(
                f"local_steps={self.local_steps!r} moves the model inside a round, and no noise at "
                "its end makes that private. Use local_steps=None, or noise_multiplier=0."
            )
        largest = max(self.plan.sizes(i) for i in range(self.plan.rounds)) * self.share
        if not largest <= self.records.num_records:
            raise RefusedSetting(
                f"A round asks for {largest:g} records in expectation, and this client has "
                f"{self.records.num_records}. Lower the sample sizes, the rounds or its share.",
                topic="batch-size",
            )

    def _rate(self, i: int) -> float:
        return min(1.0, self.share * self.plan.sizes(i) / self.records.num_records)

    def events(self, i: int) -> Sequence[AbstractEvent]:
        z = self.privacy.noise(i)
        if self.records.unit == "client":  # its presence is not a matter of chance
            return [Gaussian(z)]  # so sampling amplifies nothing
        return [Poisson().event(z, self._rate(i))]

    # -- before the charge -------------------------------------------------------------------

    def read(self, request: Message, latest: Latest) -> Asked:
        i = request.whole("round")
        if not i < self.plan.rounds:
            raise MessageError(f"Round {i} of {self.plan.rounds} was asked for.")
        found = self._model(i, request, latest)
        if found is None:
            return Asked(i, 0, {"round": i}, None)
        point, counter = found
        self._check(point)
        facts = {"round": i, "counter": counter}

        def make(rng: np.random.Generator, source: NoiseSource) -> Message:
            return Message(UPDATE, facts, {"update": self._update(i, point, rng, source)})

        note = Message(_NOTE, facts, {"point": point}).to_bytes()
        return Asked(i, 0, {"round": i}, make, note=note)

    def _model(self, i: int, request: Message, latest: Latest) -> tuple[Tensor, int] | None:
        """Return ŵ at the beginning of round i, and the counter of the broadcast that it comes from."""
        if "model" in request.tensors:
            return request.tensor("model"), request.whole("counter")
        if (found := latest()) is None:
            return None
        note, update = found
        before, counter = note.whole("round"), note.whole("counter")
        if before + 1 != i:
            return None
        return self.plan.move(note.tensor("point"), before, update.tensor("update")), counter

    def _check(self, point: Tensor) -> None:
        """Refuse a model that cannot be asked about."""
        check_point(self.records, point)
        try:
            self.plan.check(len(point), 1)
        except ValueError as error:
            raise MessageError(text_of(error)) from None

    # -- after it ----------------------------------------------------------------------------

    def _update(
        self, i: int, point: Tensor, rng: np.random.Generator, source: NoiseSource
    ) -> Tensor:
        drawn = draw(self.records, self._rate(i), rng)
        if self.local_steps is not None:
            return self._walk(i, point, rng.permutation(drawn).tolist())
        return noised_sum(self.records, self._query(i, point), drawn, source).value

    def _query(self, i: int, point: Tensor) -> Query:
        coordinates = self.plan.coordinates(i, len(point))
        noise = self.privacy.noise(i)
        return Query((Term(1.0, point),), self.privacy.max_grad_norm, noise, coordinates)

    def _walk(self, i: int, point: Tensor, drawn: list[int]) -> Tensor:
        """Run the paper's loop, without privacy; return U such that ŵ - η̄_i U is where it ends."""
        plan, each_round = self.plan, self.plan.step_size(i)
        dtype = torch.promote_types(point.dtype, torch.float32)
        total = torch.zeros(plan.update_size(len(point)), dtype=dtype)
        for h, record in enumerate(drawn):
            eta = each_round
            if self.local_steps == "diminishing1":
                eta = plan.steps(plan.gradients_before(i) + h)
            part = self.records.bounded_sum(self._query(i, point), [record])
            step = part.value * (eta / each_round)
            point = plan.move(point, i, step)
            total = total + step
        return total
