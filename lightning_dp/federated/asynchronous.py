"""Asynchronous SGD: rounds that each client makes alone, at most d ahead of the slowest."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._refusals import RefusedSetting, text_of
from lightning_dp._validate import (
    above_0,
    between,
    instance,
    normalise,
    not_negative,
    number,
    optional,
    positive,
    seed,
    whole,
    whole_from_0,
)
from lightning_dp.accounting import Gaussian
from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.boundary import Query, State, Term
from lightning_dp.federated.client import (
    Client,
    PlannedRelease,
    check_point,
    draw,
    is_of_ordinary_size,
    noised_sum,
)
from lightning_dp.federated.ledger import ReleaseLedger, check_budget
from lightning_dp.federated.protocol import (
    REFUSED,
    AbstractServer,
    Fact,
    Message,
    MessageError,
    Quorum,
    Records,
    norm_bound,
)
from lightning_dp.functional import shared_mask
from lightning_dp.sampling import Poisson

__all__ = [
    "ROUND",
    "UPDATE",
    "AsyncClient",
    "AsyncPlan",
    "AsyncServer",
    "ClientPrivacy",
    "InverseRootSteps",
    "InverseSteps",
    "PolynomialSizes",
    "RoundClient",
    "RoundPlan",
    "SampleSizes",
    "StepSizes",
    "rounds_for",
]

ROUND, UPDATE = "round", "update"


# -- sequences that are agreed on before the first round ---------------------------------------


SampleSizes: TypeAlias = Callable[[int], int]
"""s_0, s_1, ..., whole numbers >= 1: gradients per round."""

StepSizes: TypeAlias = Callable[[float], float]
"""η_t, a function of the number t of gradients before; the step size of round i is
η̄_i = η_t at t = s_0 + ... + s_(i-1)."""


@dataclass(frozen=True)
class PolynomialSizes:
    """s_i = ⌈a (i + first)^c + b⌉; a = 0 is a constant size b.

    van Dijk et al., Asynchronous Federated Learning with Reduced Number of Rounds and with
    Differential Privacy from Less Aggregated Gaussian Noise (2020), Section E.2.2, O(i) method.

    Args:
        a, b: at least 0; so large that s_0 >= 1.
        c: in [0, 1].
        first: what i = 0 stands for in the formula.

    Example:
        >>> [PolynomialSizes(a=1.322, b=16)(i) for i in range(4)]
        [16, 18, 19, 20]
    """

    a: float
    b: float = 0.0
    c: float = 1.0
    first: int = 0

    def __post_init__(self) -> None:
        normalise(self, not_negative, "a", "b", of="PolynomialSizes")
        normalise(self, whole_from_0, "first", of="PolynomialSizes")
        normalise(self, between("[0, 1]"), "c")
        if not self(0) >= 1:
            raise ValueError(f"{self} gives s_0 = {self(0)}: a round needs at least one gradient.")

    def __call__(self, i: int) -> int:
        power: float = float(i + self.first) ** self.c
        return math.ceil(self.a * power + self.b)


def rounds_for(sizes: SampleSizes, gradients: float) -> int:
    """Return the least T with s_0 + ... + s_(T-1) >= ``gradients``.

    Example:
        >>> rounds_for(PolynomialSizes(a=0, b=16), 25_000)
        1563
    """
    gradients = positive("gradients", gradients)
    total, i = 0, 0
    while total < gradients:
        total, i = total + sizes(i), i + 1
    return i


@dataclass(frozen=True)
class InverseSteps:
    """η_t = η0 / (1 + β t) with η0 > 0 and β >= 0, for strongly convex problems; 0 is constant.

    Example:
        >>> InverseSteps(0.1, beta=0.001)(1000)
        0.05
    """

    eta0: float
    beta: float = 0.0

    def __post_init__(self) -> None:
        normalise(self, positive, "eta0")
        normalise(self, not_negative, "beta")

    def __call__(self, t: float) -> float:
        return self.eta0 / (1 + self.beta * t)


@dataclass(frozen=True)
class InverseRootSteps(InverseSteps):
    """η_t = η0 / (1 + β √t) with β >= 0, for other problems.

    Example:
        >>> InverseRootSteps(0.1, beta=0.01)(10_000)
        0.05
    """

    def __call__(self, t: float) -> float:
        return super().__call__(math.sqrt(t))


# -- the plan ----------------------------------------------------------------------------------


class RoundPlan(ABC):
    """The public part of a protocol of whole rounds, the same at server and clients.

    ``rounds`` is their number T; a client begins round i only when every client has done round
    i - ``lag``. One with a number of ``clients`` is for that number only.
    """

    rounds: int
    lag: int = 1

    @abstractmethod
    def update_size(self, size: int) -> int:
        """Return the length of an update, of ``size`` parameters; ValueError if it has no plan."""

    @abstractmethod
    def factor(self, i: int, size: int) -> float:
        """Return what an update of round i is multiplied by, at a model of ``size`` numbers."""

    def coordinates(self, i: int, size: int, client: int = 0) -> Tensor | None:
        """Return the coordinates that an update of round i has, of ``size``; None for all."""
        return None

    def move(
        self, point: Tensor, i: int, update: Tensor, client: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """Return the model, changed by a client's update of round i; in ``out``, if that is given."""
        factor, update = self.factor(i, len(point)), update.to(point.dtype)
        coordinates = self.coordinates(i, len(point), client)
        if coordinates is None:
            return torch.add(point, update, alpha=factor, out=out)
        return torch.index_add(point, 0, coordinates, update, alpha=factor, out=out)

    def bound(self, i: int, point: Tensor) -> float:
        """Return the largest norm of an honest update of round i at a model; infinite if unknown."""
        return math.inf

    def cost(self, i: int, num_records: int) -> list[AbstractEvent] | None:
        """Return what round i costs a record of a client with so many, by the plan; None: unknown."""
        return None


@dataclass(frozen=True)
class AsyncPlan(RoundPlan):
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
        max_grad_norm, noise_multiplier, share: C, z and p_c, which no client exceeds, if they are
            agreed on. Then the server refuses updates that are longer than they allow
            (:func:`~lightning_dp.federated.protocol.norm_bound`), and computes ε by the plan.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> plan = AsyncPlan(9, PolynomialSizes(a=100, first=1), InverseSteps(0.1, beta=0.001), lag=2)
        >>> plan.step_size(3)
        0.0625
    """

    rounds: int
    sizes: SampleSizes
    steps: StepSizes
    lag: int = 1
    keep: int | None = None
    mask_seed: int = 0
    max_grad_norm: float | None = None
    noise_multiplier: float | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        normalise(self, whole, "rounds", "lag")
        normalise(self, optional(whole), "keep")
        normalise(self, seed, "mask_seed")
        normalise(self, optional(positive), "max_grad_norm")
        normalise(self, optional(not_negative), "noise_multiplier")
        normalise(self, positive, "share")

    @cached_property
    def _before(self) -> list[int]:
        return [0, *itertools.accumulate(self.sizes(i) for i in range(self.rounds))]

    def gradients_before(self, i: int) -> int:
        """s_0 + ... + s_(i-1)."""
        return self._before[i]

    def step_size(self, i: int) -> float:
        """η̄_i."""
        return self.steps(self._before[i])

    def coordinates(self, i: int, size: int, client: int = 0) -> Tensor | None:
        if self.keep is None:
            return None
        return shared_mask(self.mask_seed, i, size, self.keep)

    def update_size(self, size: int) -> int:
        keep = size if self.keep is None else self.keep
        if not keep <= size:
            raise ValueError(f"keep={keep}: the model has {size} coordinates. Keep at most all.")
        return keep

    def factor(self, i: int, size: int) -> float:
        """-η̄_i, times (all / ``keep``)."""
        return -self.step_size(i) * (size / self.update_size(size))

    def bound(self, i: int, point: Tensor) -> float:
        if self.max_grad_norm is None or self.noise_multiplier is None:
            return math.inf
        batch, size = self.share * self.sizes(i), self.update_size(len(point))
        return norm_bound(self.max_grad_norm, self.noise_multiplier, batch, size)

    def cost(self, i: int, num_records: int) -> list[AbstractEvent] | None:
        if self.noise_multiplier is None:
            return None
        rate = min(1.0, self.share * self.sizes(i) / num_records)
        return [Poisson().event(self.noise_multiplier, rate)]


# -- the client --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientPrivacy:
    """The privacy of one client's records: its choice, not the server's.

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
        >>> ClientPrivacy(0.1, noise_multiplier=8.0, target_epsilon=1.0).noise(3)
        8.0
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


class RoundClient(Client):
    """A client of an :class:`AsyncServer`: it makes a whole round at the model that it is sent."""

    kinds: ClassVar[tuple[str, ...]] = (ROUND,)

    plan: RoundPlan

    def _check_limit(self, name: str, value: float, most: float | None) -> None:
        if most is not None and not value <= most:
            raise RefusedSetting(
                f"{name}={value} exceeds the {name}={most} of the plan, so the server would refuse "
                "updates. Agree on another plan.",
                topic="federated-messages",
            )

    @abstractmethod
    def update(
        self, i: int, point: Tensor, rng: np.random.Generator, source: NoiseSource
    ) -> Tensor:
        """Return the update of round i at a model, from the generator of its batch and the noise."""

    def read(self, request: Message) -> PlannedRelease:
        i, point = request.whole("round"), request.tensor("model")
        if not i < self.plan.rounds:
            raise MessageError(f"Round {i} of {self.plan.rounds} was asked for.")
        check_point(self.records, point)
        try:
            self.plan.update_size(len(point))
        except ValueError as error:
            raise MessageError(text_of(error)) from None

        def make(rng: np.random.Generator, source: NoiseSource) -> Message:
            return Message(UPDATE, {"round": i}, {"update": self.update(i, point, rng, source)})

        return PlannedRelease(i, 0, {"round": i}, make)


@dataclass(eq=False, repr=False)
class AsyncClient(RoundClient):
    r"""In round i, at the model v̂ that it is sent: U = Σ clip_C(g(v̂)) + N(0, (z_i C)² I).

    The sum is over a Poisson batch, which has each record with probability q_i = share · s_i / N.
    All gradients of a round are taken at one model. (In the paper's listing the model moves after each
    single gradient: one record would change all later ones, and C would bound nothing.)

    van Dijk et al. (2020), Algorithm 2.1, with Poisson batches and one model per round.

    Args:
        records: this client's data.
        plan: what was agreed on.
        privacy: this client's settings.
        ledger: of this data set.
        run: the name of the federation, as at the server.
        share: p_c > 0: s_i is multiplied by it.

    Raises:
        ValueError: if a batch would be larger than the data set, or a setting exceeds the plan's.
    """

    records: Records
    plan: AsyncPlan
    privacy: ClientPrivacy
    ledger: ReleaseLedger
    _: KW_ONLY
    run: str
    share: float = 1.0

    def __post_init__(self) -> None:
        instance("plan", self.plan, AsyncPlan)
        privacy = instance("privacy", self.privacy, ClientPrivacy)
        normalise(self, positive, "share")
        rounds = range(self.plan.rounds)
        # Asked once: what is drawn and noised is what was declared and charged.
        self._sizes = [self.share * self.plan.sizes(i) for i in rounds]
        self._noises = [privacy.noise(i) for i in rounds]
        for z in {*self._noises} - {0.0}:  # what no record can be clipped by would be charged first
            if not is_of_ordinary_size(Query((Term(),), privacy.max_grad_norm, z)):
                raise RefusedSetting(
                    f"max_grad_norm={privacy.max_grad_norm} with noise_multiplier={z}: records cannot "
                    "be clipped to numbers that small or large. Use max_grad_norm=1.0.",
                    topic="federated-messages",
                )
        budget = (privacy.target_epsilon, privacy.target_delta, privacy.relation)
        self._declare(self.plan.rounds, budget, privacy.seed)
        if self.plan.max_grad_norm is not None:
            self._check_limit("share", self.share, self.plan.share)
        self._check_limit("max_grad_norm", privacy.max_grad_norm, self.plan.max_grad_norm)
        self._check_limit("noise_multiplier", max(self._noises), self.plan.noise_multiplier)
        largest = max(self._sizes)
        if not largest <= self.records.num_records:
            raise RefusedSetting(
                f"A round asks for a batch of {largest:g} in expectation, and this client has "
                f"num_records={self.records.num_records}. Lower the sample sizes, the rounds or its "
                "share.",
                topic="batch-size",
            )

    def _rate(self, i: int) -> float:
        return min(1.0, self._sizes[i] / self.records.num_records)

    def events(self, i: int) -> Sequence[AbstractEvent]:
        z, is_client = self._noises[i], self.records.unit == "client"
        return [Gaussian(z) if is_client else Poisson().event(z, self._rate(i))]

    def update(
        self, i: int, point: Tensor, rng: np.random.Generator, source: NoiseSource
    ) -> Tensor:
        coordinates = self.plan.coordinates(i, len(point))
        C, z = self.privacy.max_grad_norm, self._noises[i]
        query = Query((Term(1.0, point),), C, z, coordinates)
        batch = draw(self.records, self._rate(i), rng)
        return noised_sum(self.records, query, batch, source).value


# -- the server --------------------------------------------------------------------------------


@dataclass
class AsyncServer(AbstractServer):
    """v̂ ← ``plan.move(v̂, i, U, c)`` for each update (i, c, U), as they come, each once.

    With an :class:`AsyncPlan` that is v̂ - η̄_i U; with a
    :class:`~lightning_dp.federated.cubic_newton.CubicNewtonPlan`, whose d is 1, synchronous DP-FCRN.
    While round k is not over, a client may do round i < k + d. It gets the model as it was when round
    k - 1 ended; where it is ahead, as it is now, with all of its updates.

    van Dijk et al. (2020), Algorithm 2.1 and the server in Supplemental Material A.

    Args:
        run: the name of this federation, which clients' ledgers know it by.
        plan: what was agreed on.
        start: v_0, flat.
        num_clients: clients are 0, ..., num_clients - 1.
        quorum: when a round goes on without some of them.

    Raises:
        ValueError: for ``num_clients`` below 1, a start that is not a finite vector, or a plan for
            another number of parameters or clients.

    Example:
        >>> plan = AsyncPlan(2, PolynomialSizes(a=0, b=8), InverseSteps(0.5), lag=2)
        >>> server = AsyncServer("trial", plan, torch.zeros(1), num_clients=2)
        >>> update = Message("update", {"round": 0}, {"update": torch.ones(1)}).to_bytes()
        >>> for _ in range(3):
        ...     _ = server.receive(1, update)
        >>> server.point, server.round, server.applied
        (tensor([-0.5000]), 0, [0, 1])
    """

    run: str
    plan: RoundPlan
    start: Tensor = field(repr=False)
    num_clients: int
    quorum: Quorum = field(default_factory=Quorum)

    def __post_init__(self) -> None:
        self.num_clients = whole("num_clients", self.num_clients, 1, 2**31)
        self._begin()
        instance("plan", self.plan, RoundPlan)  # type: ignore[type-abstract]
        self.plan.update_size(len(self.start))
        planned = getattr(self.plan, "clients", self.num_clients)
        if planned != self.num_clients:
            raise ValueError(f"num_clients={self.num_clients}, but the plan has clients={planned}.")
        self._applied = [0] * self.num_clients
        self._counts: Counter[int] = Counter()  # updates of rounds k, k + 1, ...
        self._broadcast = self._point.clone()
        self._end_round()

    @property
    def applied(self) -> list[int]:
        """The next round of each client; it was left out of an earlier one, or has done it."""
        return list(self._applied)

    @property
    def round(self) -> int:
        return self._round

    @property
    def reason(self) -> str:
        if self.round == self.plan.rounds:
            return f"all {self.plan.rounds} rounds were made"
        return self._end_of_budgets()

    def round_of(self, client: int) -> int:
        return self._applied[client]

    @property
    def awaited(self) -> set[int]:
        return set(self._awaited)

    def leave_out(self) -> set[int]:
        late = self._awaited
        if self.is_done or not self._counts[self._round] >= self._least:
            return set()
        for client in late:
            self._applied[client] += 1
        self._end_round()
        return late

    def cost(self, i: int, num_records: int, client: int) -> list[AbstractEvent] | None:
        return self.plan.cost(i, num_records)

    def _end_round(self) -> None:
        """Find k and the clients that are at it, once there are none: not after each update."""
        staying = {c: n for c, n in enumerate(self._applied) if c not in self._left}
        self._round = min(staying.values(), default=max(self._applied))
        self._awaited = {c for c, n in staying.items() if n == self._round}
        self._broadcast.copy_(self._point)  # v̂ when this round became the earliest one
        # No number of v̂ is farther from 0: so it stays finite, without a look after each update.
        self._reach = float(torch.linalg.vector_norm(self._point, math.inf))
        self._bounds: dict[int, float] = {}  # of the updates of a round at it
        self._encoded = b""  # a request of this round, the same bytes for all who are at it
        self._counts = Counter({i: n for i, n in self._counts.items() if i >= self._round})

    def _may_answer(self, client: int) -> bool:
        """Return True if there is a round that this client may do now."""
        i = self._applied[client]
        return client not in self._left and i < min(self.plan.rounds, self._round + self.plan.lag)

    def request(self, client: int) -> bytes | None:
        if not self._may_answer(client):
            return None
        i = self._applied[client]
        facts: dict[str, Fact] = {"run": self.run, "round": i}
        if i > self._round:
            return Message(ROUND, facts, {"model": self._point}).to_bytes()
        self._encoded = (
            self._encoded or Message(ROUND, facts, {"model": self._broadcast}).to_bytes()
        )
        return self._encoded

    def receive(self, client: int, reply: bytes) -> bool:
        message = self._read(client, reply, ("round",), {UPDATE: "update"})
        i = message["round"]
        if i < self._applied[client] or client in self._left:
            return False  # it came twice, or late
        if i > self._applied[client] or not self._may_answer(client):
            raise MessageError(
                f"Client {client} answers for round {i}, which it was not asked for."
            )
        if message.kind == REFUSED:
            self._left.add(client)
        else:
            size = self.plan.update_size(len(self._point))
            if i not in self._bounds:
                self._bounds[i] = self.plan.bound(i, self._broadcast)
            update, norm = message.reals("update", size, self._point.dtype, self._bounds[i])
            reach = self._reach + abs(self.plan.factor(i, len(self._point))) * norm
            if not max(norm, reach) <= torch.finfo(self._point.dtype).max / 2:
                raise MessageError(
                    f"With the update of client {client} the model may not be finite."
                )
            self.plan.move(self._point, i, update, client, out=self._point)
            self._reach = reach
            self._applied[client] += 1
            self._counts[i] += 1
        self._awaited.discard(client)
        if not self._awaited:
            self._end_round()
        return True

    def state_dict(self) -> State:
        return {
            **super().state_dict(),
            "broadcast": self._broadcast.clone(),
            "applied": list(self._applied),
            "counts": dict(self._counts),
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._applied = list(state["applied"])
        self._counts = Counter(state["counts"])
        self._end_round()
        self._broadcast = state["broadcast"].clone()
