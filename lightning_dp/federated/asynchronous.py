"""Rounds that each client makes on its own, at most d ahead of the slowest: one update from each."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_dp._described import check_same, described
from lightning_dp._validate import whole
from lightning_dp.boundary import State
from lightning_dp.federated.messages import (
    LOST,
    REFUSED,
    Form,
    Message,
    MessageError,
    Reply,
    check_client,
    read_reply,
)
from lightning_dp.federated.protocol import AbstractServer, check_start

__all__ = [
    "FORMS",
    "ROUND",
    "UPDATE",
    "AsyncServer",
    "RoundPlan",
]


ROUND, UPDATE = "round", "update"
FORMS = {
    UPDATE: Form(("round", "counter"), "update"),
    LOST: Form(("round",)),
    REFUSED: Form(("round",)),
}


class RoundPlan(Protocol):
    """The public part of a protocol that an :class:`AsyncServer` has to know."""

    @property
    def rounds(self) -> int:
        """T, the number of rounds."""

    @property
    def lag(self) -> int:
        """d; a client begins round i only when every client has done round i - d."""

    def check(self, size: int, num_clients: int) -> None:
        """Raise ValueError unless it is for so many parameters and clients."""

    def update_size(self, size: int) -> int:
        """Return the length of an update, of ``size`` parameters."""

    def move(self, point: Tensor, i: int, update: Tensor, client: int) -> Tensor:
        """Return the model, changed by a client's update of round i."""


@dataclass
class AsyncServer(AbstractServer):
    """v̂ ← ``plan.move(v̂, i, U, c)`` for each update (i, c, U), as they come, each once.

    With an :class:`AsyncPlan` that is v̂ - η̄_i U; with a
    :class:`~lightning_dp.federated.cubic_newton.CubicNewtonPlan`, whose d is 1, synchronous DP-FCRN.

    - Round k is over when all clients' updates of round k are in v̂.
    - Client c may do round i while i < k + d. So no client is more than d rounds ahead.
    - The model goes down to a client once after each new k, as it was when round k - 1 ended; to a
      client that is further ahead, as it is now. So it has all of this client's updates, and the
      client simply takes it. In between, the client moves its own copy as the server moves v̂.
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
        >>> from lightning_dp.federated import AsyncPlan, PolynomialSizes
        >>> from lightning_dp.federated.sequences import ConstantSteps
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
        object.__setattr__(self, "num_clients", whole("num_clients", self.num_clients, 1, 2**31))
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

    # -- what there is -----------------------------------------------------------------------

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

    def _look_for_end_of_round(self) -> None:
        """Find k again, once no client is left at it."""
        if self._behind:
            return
        staying = [n for c, n in enumerate(self._applied) if c not in self._left]
        self._round = min(staying or [max(self._applied)])
        self._behind = staying.count(self._round)
        self._broadcast = self._point

    @property
    def is_done(self) -> bool:
        return bool(self.reason)

    @property
    def reason(self) -> str:
        if len(self._left) == self.num_clients:
            return "no client has budget left"
        return f"all {self.plan.rounds} rounds were made" if self.round == self.plan.rounds else ""

    # -- messages ----------------------------------------------------------------------------

    def _may_answer(self, client: int) -> bool:
        """Tell whether there is a round that this client may do now."""
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
        check_client(client, self.num_clients)
        read = read_reply(f"Client {client}", reply, FORMS)
        i = read.numbers["round"]
        if i < self._applied[client] or client in self._left:
            return False  # it came twice, or late
        if i > self._applied[client] or not self._may_answer(client):
            raise MessageError(
                f"Client {client} answers for round {i}, which it was not asked for."
            )
        if read.kind == LOST:
            self.forget(client)
            return False
        if read.kind == REFUSED:
            self._left.add(client)
        else:
            self._apply(client, i, read)
        if i == self._round:
            self._behind -= 1
            self._look_for_end_of_round()
        return True

    def _apply(self, client: int, i: int, read: Reply) -> None:
        counter = read.numbers["counter"]
        if not counter <= i:  # its own rounds below i are in the model that it was sent
            raise MessageError(f"Client {client} answers for a model that it was not sent.")
        update = read.vector(self.plan.update_size(len(self._point)), self._point.dtype)
        point = self.plan.move(self._point, i, update, client)
        if not bool(torch.isfinite(point).all()):
            raise MessageError(f"With the update of client {client} the model is not finite.")
        self._point = point
        self._applied[client] += 1
        self._known[client] = counter

    def forget(self, client: int) -> None:
        self._known[client] = -1

    # -- state -------------------------------------------------------------------------------

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
