"""Rounds that all clients answer: any estimator over several data holders, such as DIFF2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dp._described import check_same, described
from lightning_dp._refusals import text_of
from lightning_dp._validate import instance, normalise, one_of, optional, positive, seed, whole
from lightning_dp._world import World
from lightning_dp.boundary import BoundedSum, Query, Release, State, Term, add_noise
from lightning_dp.estimators.driver import Driver
from lightning_dp.federated.bvr_l_sgd import BVRLSGD
from lightning_dp.federated.messages import (
    REFUSED,
    Form,
    Message,
    MessageError,
    Reply,
    check_client,
    read_reply,
)
from lightning_dp.federated.protocol import AbstractServer, check_start, noise_source
from lightning_dp.noise_plan import NoisePlan

__all__ = [
    "ANSWER",
    "LOCAL",
    "QUERY",
    "SynchronousServer",
    "check_plan",
    "query_from",
    "query_message",
]

QUERY, ANSWER, LOCAL, WALKED = "query", "answer", "local", "walked"
_PLACE = ("round", "part")
FORMS = {ANSWER: Form(_PLACE, "sum"), WALKED: Form(_PLACE, "x"), REFUSED: Form(_PLACE)}


@dataclass
class SynchronousServer(AbstractServer):
    """x_(t+1) = x_t - η v_t, where v_t is an estimator's from the sum of all clients' answers.

    At step t the estimator asks all clients the same query. Either

    - ``noise="server"``: clients trust the server with their un-noised sums, and it noises the
      total once. With :class:`~lightning_dp.Diff2` and ``FullBatch()`` this is DIFF2 with P
      workers (Murata and Suzuki, 2023, Algorithm 1); or
    - ``noise="client"``: each client noises its own sum, and the server sees nothing else. The
      total has √P times the noise.

    A step without an answer of every client waits. A client without budget ends the run.

    With a ``local_routine``, the step's worker then goes on alone on its own records, and noises
    each of its steps itself (DIFF2-BVR-L-SGD, Algorithm 4); the routine's η is used for the
    server's step too.

    Args:
        run: the name of this federation, which clients' ledgers know it by.
        plan: z_t, q_t and the estimator, the same at all clients; not adaptive.
        start: x_0, flat.
        rounds: how many steps.
        num_clients: P; clients are 0, ..., P - 1.
        num_records: N over all clients, public; the mean is over q_t N.
        learning_rate: η > 0.
        noise: the party that adds it.
        local_routine: what the worker in turn does.
        seed: for tests only: the same noise of the server each time.

    Raises:
        ValueError: naming the argument that is out of its range, or a plan that cannot be kept.
    """

    run: str
    plan: NoisePlan
    start: Tensor = field(repr=False)
    rounds: int
    num_clients: int
    num_records: int
    learning_rate: float
    noise: Literal["server", "client"] = "server"
    local_routine: BVRLSGD | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        normalise(self, whole, "rounds", "num_clients", "num_records")
        normalise(self, positive, "learning_rate")
        normalise(self, optional(seed), "seed")
        one_of(("server", "client"))("noise", self.noise)
        if self.local_routine is not None:
            instance("local_routine", self.local_routine, BVRLSGD)
        if self.local_routine and self.local_routine.learning_rate != self.learning_rate:
            raise ValueError(
                f"learning_rate={self.learning_rate}, but the local routine's is "
                f"{self.local_routine.learning_rate}: one point would move at two speeds."
            )
        check_start(self.start)
        check_plan(self.plan, self.noise)
        self._point = self.start.detach().clone()
        self._driver = Driver.begin(self.plan.estimator, [self._point])
        self._place, self._reason = (0, 0), ""  # step and part that clients are asked for
        self._local: Tensor | None = None  # v, while a worker goes on alone
        self._query: Query | None = None
        self._answers: dict[int, Tensor] = {}
        self._ask()

    # -- what there is -----------------------------------------------------------------------

    @property
    def point(self) -> Tensor:
        return self._point.clone()

    @property
    def round(self) -> int:
        return self._place[0]

    @property
    def is_done(self) -> bool:
        return bool(self._reason)

    @property
    def reason(self) -> str:
        return self._reason

    # -- one step ----------------------------------------------------------------------------

    def _ask(self) -> None:
        """Form the next query; a step that asks nothing is over at once."""
        while not self._reason and self._local is None:
            step = self._driver.step
            self._place = (step, self._driver.part)
            if step == self.rounds:
                self._reason = f"all {self.rounds} rounds were made"
                return
            z = self.plan.noise_multiplier(step)
            self._query = self._driver.ask([self._point], z)
            self._answers = {}
            if self._query is not None:
                return
            self._tell(Release.of_nothing([self._point]))

    def _tell(self, released: Release) -> None:
        mean = released.mean(self.plan.rate(self._driver.step) * self.num_records)
        estimate, self._driver = self._driver.tell([self._point], mean)
        self._query = None
        if estimate is None:
            return
        estimate = estimate.to(self._point.dtype)
        moved = self._point - self.learning_rate * estimate
        if self.local_routine is not None and self.local_routine.local_steps > 1:
            if self._is_finite(moved):
                self._local = estimate
            return
        self._move_to(moved)

    def _is_finite(self, point: Tensor) -> bool:
        """Tell whether it is; a run that has diverged ends at the last model that was."""
        finite = bool(torch.isfinite(point).all())
        if not finite:
            self._reason = "the model is no longer finite: lower the learning rate"
        return finite

    def _move_to(self, point: Tensor) -> None:
        point = point.to(self._point.dtype)
        if not self._is_finite(point):
            return
        self._point, self._local = point, None

    def _release(self, query: Query) -> Release:
        """Return the noised sum over all clients, added up in their order."""
        total = torch.zeros_like(self._answers[0])
        for client in range(self.num_clients):
            total = total + self._answers[client]
        if self.noise == "server":
            source = noise_source(self.seed, self._place[0])
            bounded = BoundedSum.received(total, query)
            return add_noise(bounded, query.noise_multiplier, source, World())
        each = query.noise_multiplier * query.clip_norm if query.noise_multiplier else 0.0
        return Release.received(total, each * math.sqrt(self.num_clients))

    # -- messages ----------------------------------------------------------------------------

    def request(self, client: int) -> bytes | None:
        if not self._is_asked(client):
            return None
        step, part = self._place
        facts: dict[str, Any] = {"run": self.run, "round": step, "part": part}
        if self._local is not None:
            return Message(LOCAL, facts, {"x": self._point, "v": self._local}).to_bytes()
        assert self._query is not None
        return query_message(self._query, self._point, {**facts, "noise": self.noise}).to_bytes()

    def _is_asked(self, client: int) -> bool:
        """Tell whether an answer of this client is missing now."""
        if self._reason:
            return False
        if self._local is None:
            return self._query is not None and client not in self._answers
        assert self.local_routine is not None
        return client == self.local_routine.worker_in_turn(self._place[0] + 1, self.num_clients)

    def receive(self, client: int, reply: bytes) -> bool:
        check_client(client, self.num_clients)
        read = read_reply(f"Client {client}", reply, FORMS)
        place = (read.numbers["round"], read.numbers["part"])
        if self._reason or place < self._place:
            return False  # it came late
        if place == self._place and self._is_over_for(client, read):
            return False  # it came twice
        if place != self._place or not self._is_asked(client):
            raise MessageError(f"Client {client} answers for {place}, which was not asked of it.")
        if read.kind == REFUSED:
            self._reason = f"client {client} has no budget left"
        elif (read.kind == WALKED) != (self._local is not None):
            raise MessageError(f"Client {client} sent {read.kind!r}, which was not asked of it.")
        elif read.kind == WALKED:
            self._move_to(read.vector(len(self._point), self._point.dtype))
            self._ask()
        else:
            self._take(client, self._query, read)
        return True

    def _is_over_for(self, client: int, read: Reply) -> bool:
        """Tell whether it repeats what this client was asked at this place, and has answered."""
        return read.kind == ANSWER and (client in self._answers or self._local is not None)

    def _take(self, client: int, query: Query | None, read: Reply) -> None:
        assert query is not None
        value = read.vector(query.size(len(self._point)), self._point.dtype)
        self._answers[client] = value
        if len(self._answers) == self.num_clients:
            released = self._release(query)
            self._answers = {}
            self._tell(released)
            self._ask()

    # -- state -------------------------------------------------------------------------------

    def state_dict(self) -> State:
        return {
            "configuration": described(self._configuration),
            "point": self._point.clone(),
            "step": self._place[0],
            "part": self._place[1],
            "reason": self._reason,
            "estimator": self._driver.state,
            "local": self._local,
        }

    def load_state_dict(self, state: State) -> None:
        check_same(state["configuration"], self._configuration)
        self._point, self._local = state["point"].clone(), state["local"]
        step, part = self._place = int(state["step"]), int(state["part"])
        # Where a worker goes on alone, the step's queries have all been answered.
        following = (step, part) if self._local is None else (step + 1, 0)
        self._driver = Driver(self.plan.estimator, state["estimator"], *following)
        self._reason = str(state["reason"])
        self._query, self._answers = None, {}
        self._ask()

    @property
    def _configuration(self) -> dict[str, object]:
        names = ("run", "plan", "rounds", "num_clients", "num_records", "learning_rate", "noise")
        parts = {name: getattr(self, name) for name in (*names, "local_routine")}
        return {**parts, "size": len(self.start)}


def check_plan(plan: NoisePlan, noise: str) -> None:
    """Refuse plans that clients cannot hold a server to."""
    if instance("plan", plan, NoisePlan).shape.chosen != "in advance":
        raise ValueError(
            f"noise_schedule={plan.shape} chooses noise at run time, but clients book a plan that is "
            "declared before. Use a schedule that is a function of the step."
        )
    if noise == "server" and plan.estimator.traits.queries_per_step > 1:
        raise ValueError(
            f"{plan.estimator} asks several queries on one batch: use noise='client', where each is "
            "noised before it leaves, once."
        )


def query_message(query: Query, here: Tensor, facts: dict[str, Any]) -> Message:
    """Return a query as a message; ``here`` stands for the present parameters."""
    tensors: dict[str, Tensor] = {}
    weights: dict[str, float] = {}
    for number, term in enumerate(query.terms):
        weights[f"weight{number}"] = float(term.weight)
        tensors[f"point{number}"] = here if term.point is None else term.point
        if term.direction is not None:
            tensors[f"direction{number}"] = term.direction
    if query.coordinates is not None:
        tensors["coordinates"] = query.coordinates
    numbers = {"clip_norm": query.clip_norm, "noise_multiplier": query.noise_multiplier}
    return Message(QUERY, {**facts, **weights, **numbers}, tensors)


def query_from(message: Message) -> Query:
    """Read what :func:`query_message` wrote. Raises MessageError for numbers out of range."""
    count = sum(name.startswith("weight") for name in message.facts)
    try:
        terms: Sequence[Term] = [
            Term(
                float(message[f"weight{number}"]),
                message.tensor(f"point{number}"),
                message.tensors.get(f"direction{number}"),
            )
            for number in range(count)
        ]
        numbers = float(message["clip_norm"]), float(message["noise_multiplier"])
        return Query(_same_points(terms), *numbers, message.tensors.get("coordinates"))
    except (ValueError, TypeError, OverflowError) as error:
        raise MessageError(f"This query cannot be asked: {text_of(error)}") from None


def _same_points(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Let terms whose points are equal share one, so that they share a pass over the batch."""
    points: list[Tensor] = []
    shared = []
    for term in terms:
        assert term.point is not None
        known = [point for point in points if torch.equal(point, term.point)]
        if not known:
            points.append(term.point)
        shared.append(replace(term, point=known[0]) if known else term)
    return tuple(shared)
