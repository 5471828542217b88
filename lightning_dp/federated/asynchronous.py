"""Asynchronous SGD: rounds that each client makes alone, at most d ahead of the slowest."""

from __future__ import annotations

import itertools
import math
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_dp._described import check_same, described
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
from lightning_dp.federated.client import Client, PlannedRelease, check_point, draw, noised_sum
from lightning_dp.federated.ledger import ReleaseLedger, check_budget
from lightning_dp.federated.protocol import (
    LOST,
    REFUSED,
    AbstractServer,
    Form,
    Message,
    MessageError,
    Records,
    check_records,
    check_start,
    read_reply,
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
    "ConstantSteps",
    "InverseRootSteps",
    "InverseSteps",
    "PolynomialSizes",
    "RoundPlan",
    "SampleSizes",
    "StepSizes",
    "rounds_for",
]

ROUND, UPDATE = "round", "update"
_NOTE = "note"
_FORMS = {
    UPDATE: Form(("round", "counter"), ("update",)),
    LOST: Form(("round",)),
    REFUSED: Form(("round",)),
}


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
class ConstantSteps:
    """η_t = η0 > 0."""

    eta0: float

    def __post_init__(self) -> None:
        normalise(self, positive, "eta0")

    def __call__(self, t: float) -> float:
        return self.eta0


@dataclass(frozen=True)
class InverseSteps(ConstantSteps):
    """η_t = η0 / (1 + β t) with β >= 0, for strongly convex problems.

    Example:
        >>> InverseSteps(0.1, beta=0.001)(1000)
        0.05
    """

    beta: float

    def __post_init__(self) -> None:
        super().__post_init__()
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


class RoundPlan(Protocol):
    """The public part of a protocol that an :class:`AsyncServer` needs.

    ``rounds`` is their number T; a client begins round i only when every client has done round
    i - ``lag``.
    """

    @property
    def rounds(self) -> int: ...

    @property
    def lag(self) -> int: ...

    def check(self, size: int, num_clients: int) -> None:
        """Raise ValueError unless it is for so many parameters and clients."""

    def update_size(self, size: int) -> int:
        """Return the length of an update, of ``size`` parameters."""

    def move(self, point: Tensor, i: int, update: Tensor, client: int) -> Tensor:
        """Return the model, changed by a client's update of round i."""


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
        >>> plan = AsyncPlan(9, PolynomialSizes(a=100, first=1), InverseSteps(0.1, beta=0.001), lag=2)
        >>> plan.gradients_before(3), plan.step_size(3)
        (600, 0.0625)
    """

    rounds: int
    sizes: SampleSizes
    steps: StepSizes
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


@dataclass(eq=False, repr=False)
class AsyncClient(Client):
    r"""In round i: U = Σ clip_C(g(ŵ)) over a Poisson batch, + N(0, (z_i C)² I); ŵ ← ŵ - η̄_i U.

    The batch has each record with probability q_i = share · s_i / N. All gradients of a round are
    taken at the model that it began with, so U moves by at most C with one record. (In the paper's
    listing the model moves after each single gradient inside a round: one record would change
    all later gradients, and C would bound nothing. It also adds η̄ n where the server subtracts it.)

    Where a request brings no model, ŵ follows from the latest release in the ledger; without one
    the client replies that it lost it, and is sent it.

    van Dijk et al. (2020), Algorithm 2.1, with Poisson batches and one model per round.

    Args:
        records: this client's data.
        plan: what was agreed on.
        privacy: this client's settings.
        ledger: of this data set.
        run: the name of the federation, as at the server.
        share: p_c > 0: s_i is multiplied by it.

    Raises:
        ValueError: if a batch would be larger than the data set.
    """

    kinds: ClassVar[tuple[str, ...]] = (ROUND,)

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
        check_records(self.records)
        normalise(self, positive, "share")
        largest = max(self.plan.sizes(i) for i in range(self.plan.rounds)) * self.share
        if not largest <= self.records.num_records:
            raise RefusedSetting(
                f"A round asks for {largest:g} records in expectation, and this client has "
                f"{self.records.num_records}. Lower the sample sizes, the rounds or its share.",
                topic="batch-size",
            )
        budget = (privacy.target_epsilon, privacy.target_delta, privacy.relation)
        # A server that went back to its last state asks for the rounds since then again.
        self._declare(self.plan.rounds, budget, privacy.seed, retain=self.plan.lag + 1)

    def _rate(self, i: int) -> float:
        return min(1.0, self.share * self.plan.sizes(i) / self.records.num_records)

    def events(self, i: int) -> Sequence[AbstractEvent]:
        z, is_client = self.privacy.noise(i), self.records.unit == "client"
        return [Gaussian(z) if is_client else Poisson().event(z, self._rate(i))]

    def read(self, request: Message) -> PlannedRelease:
        i = request.whole("round")
        if not i < self.plan.rounds:
            raise MessageError(f"Round {i} of {self.plan.rounds} was asked for.")
        found = self._model(i, request)
        if found is None:
            return PlannedRelease(i, 0, {"round": i}, None)
        point, counter = found
        check_point(self.records, point)
        try:
            self.plan.check(len(point), 1)
        except ValueError as error:
            raise MessageError(text_of(error)) from None
        facts = {"round": i, "counter": counter}

        def make(rng: np.random.Generator, source: NoiseSource) -> Message:
            return Message(UPDATE, facts, {"update": self.update(i, point, rng, source)})

        note = Message(_NOTE, facts, {"point": point}).to_bytes()
        return PlannedRelease(i, 0, {"round": i}, make, note=note)

    def _model(self, i: int, request: Message) -> tuple[Tensor, int] | None:
        """Return ŵ at the beginning of round i, and the counter of the broadcast that it comes from."""
        if "model" in request.tensors:
            return request.tensor("model"), request.whole("counter")
        latest = self.ledger.latest(self.spending)
        if latest is None:
            return None
        try:
            note, update = (Message.from_bytes(content) for content in latest)
        except MessageError:  # written by an earlier version: the server sends the model again
            return None
        before, counter = note.whole("round"), note.whole("counter")
        if before + 1 != i:
            return None
        return self.plan.move(note.tensor("point"), before, update.tensor("update")), counter

    def update(
        self, i: int, point: Tensor, rng: np.random.Generator, source: NoiseSource
    ) -> Tensor:
        """Return U of round i at ŵ, from the generator of its batch and the noise."""
        coordinates = self.plan.coordinates(i, len(point))
        C, z = self.privacy.max_grad_norm, self.privacy.noise(i)
        query = Query((Term(1.0, point),), C, z, coordinates)
        batch = draw(self.records, self._rate(i), rng)
        return noised_sum(self.records, query, batch, source).value


# -- the server --------------------------------------------------------------------------------


@dataclass
class AsyncServer(AbstractServer):
    """v̂ ← ``plan.move(v̂, i, U, c)`` for each update (i, c, U), as they come, each once.

    With an :class:`AsyncPlan` that is v̂ - η̄_i U; with a
    :class:`~lightning_dp.federated.cubic_newton.CubicNewtonPlan`, whose d is 1, synchronous DP-FCRN.

    - Round k is over when all clients' updates of round k are in v̂.
    - Client c may do round i while i < k + d. So no client is more than d rounds ahead.
    - The model goes down to a client once after each new k, as it was when round k - 1 ended; to a
      client that is further ahead, as it is now. So it has all of this client's updates, and the
      client simply takes it. In between, the client moves its copy as the server moves v̂.
    - A client without budget leaves; the others go on.

    The order of the updates changes v̂ by rounding only.

    van Dijk et al. (2020), Algorithm 2.1 and the server in Supplemental Material A.

    Args:
        run: the name of this federation, which clients' ledgers know it by.
        plan: what was agreed on.
        start: v_0, flat.
        num_clients: clients are 0, ..., num_clients - 1.

    Raises:
        ValueError: for ``num_clients`` below 1, a start that is not a finite vector, or a plan for
            another number of parameters or clients.

    Example:
        >>> plan = AsyncPlan(2, PolynomialSizes(a=0, b=8), ConstantSteps(0.5), lag=2)
        >>> server = AsyncServer("trial", plan, torch.zeros(1), num_clients=2)
        >>> update = Message("update", {"round": 0, "counter": 0}, {"update": torch.ones(1)}).to_bytes()
        >>> for _ in range(3):
        ...     _ = server.receive(1, update)
        >>> server.point, server.round, server.applied
        (tensor([-0.5000]), 0, [0, 1])
    """

    run: str
    plan: RoundPlan
    start: Tensor = field(repr=False)
    num_clients: int

    def __post_init__(self) -> None:
        self.num_clients = whole("num_clients", self.num_clients, 1, 2**31)
        check_start(self.start)
        if not hasattr(self.plan, "move"):
            raise TypeError(
                f"plan={reprlib.repr(self.plan)} must be a plan, such as AsyncPlan(...)."
            )
        self.plan.check(len(self.start), self.num_clients)
        self._point = self.start.detach().clone()
        self._broadcast = self._point  # v̂ when the current round became the earliest one
        self._applied = [0] * self.num_clients
        self._known = [-1] * self.num_clients  # the k of the model that a client has, -1: none
        self._left: set[int] = set()
        # k, and how many clients are at it: counted, so that an update costs the same for any
        # number of clients.
        self._round, self._behind = 0, self.num_clients

    @property
    def point(self) -> Tensor:
        return self._point.clone()

    @property
    def applied(self) -> list[int]:
        """The number of each client's updates in v̂, those of rounds 0, 1, ...."""
        return list(self._applied)

    @property
    def round(self) -> int:
        """k; the rounds below are in v̂, of every client that has not left."""
        return self._round

    @property
    def reason(self) -> str:
        if len(self._left) == self.num_clients:
            return "no client has budget left"
        return f"all {self.plan.rounds} rounds were made" if self.round == self.plan.rounds else ""

    def _look_for_end_of_round(self) -> None:
        """Find k again, once no client is left at it."""
        if self._behind:
            return
        staying = [n for c, n in enumerate(self._applied) if c not in self._left]
        self._round = min(staying or [max(self._applied)])
        self._behind = staying.count(self._round)
        self._broadcast = self._point

    def _may_answer(self, client: int) -> bool:
        """Return True if there is a round that this client may do now."""
        i = self._applied[client]
        return client not in self._left and i < min(self.plan.rounds, self._round + self.plan.lag)

    def request(self, client: int) -> bytes | None:
        i, k = self._applied[client], self.round
        if not self._may_answer(client):
            return None
        facts: dict[str, Any] = {"run": self.run, "round": i, "counter": k}
        if not self._known[client] < k:
            return Message(ROUND, facts).to_bytes()
        model = self._broadcast if i == k else self._point
        return Message(ROUND, facts, {"model": model}).to_bytes()

    def receive(self, client: int, reply: bytes) -> bool:
        message = read_reply(client, self.num_clients, reply, _FORMS)
        i = message["round"]
        if i < self._applied[client] or client in self._left:
            return False  # it came twice, or late
        if i > self._applied[client] or not self._may_answer(client):
            raise MessageError(
                f"Client {client} answers for round {i}, which it was not asked for."
            )
        if message.kind == LOST:
            self.forget(client)
            return False
        if message.kind == REFUSED:
            self._left.add(client)
        else:
            self._apply(client, i, message)
        if i == self._round:
            self._behind -= 1
            self._look_for_end_of_round()
        return True

    def _apply(self, client: int, i: int, message: Message) -> None:
        counter = message["counter"]
        if not counter <= i:  # its rounds below i are in the model that it was sent
            raise MessageError(f"Client {client} answers for a model that it was not sent.")
        size = self.plan.update_size(len(self._point))
        update = message.reals("update", size, self._point.dtype)
        point = self.plan.move(self._point, i, update, client)
        if not bool(torch.isfinite(point).all()):
            raise MessageError(f"With the update of client {client} the model is not finite.")
        self._point = point
        self._applied[client] += 1
        self._known[client] = counter

    def forget(self, client: int) -> None:
        self._known[client] = -1

    def state_dict(self) -> State:
        return {
            "configuration": described(self._configuration),
            "point": self._point.clone(),
            "broadcast": self._broadcast.clone(),
            "applied": list(self._applied),
            "left": sorted(self._left),
        }

    def load_state_dict(self, state: State) -> None:
        check_same(state["configuration"], self._configuration)
        self._applied, self._left = list(state["applied"]), set(state["left"])
        self._point, self._behind = state["point"].clone(), 0
        self._look_for_end_of_round()
        self._broadcast = state["broadcast"].clone()
        self._known = [-1] * self.num_clients

    @property
    def _configuration(self) -> dict[str, object]:
        return {
            "run": self.run,
            "plan": self.plan,
            "num_clients": self.num_clients,
            "size": len(self._point),
        }
