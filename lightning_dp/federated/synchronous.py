"""Synchronous rounds: any estimator over several data holders (DIFF2), and local steps (BVR-L-SGD)."""

from __future__ import annotations

import math
import reprlib
import secrets
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource, random_generator
from lightning_dp._refusals import text_of
from lightning_dp._validate import (
    between,
    flag,
    instance,
    normalise,
    not_negative,
    one_of,
    optional,
    positive,
    seed,
    whole,
)
from lightning_dp._world import World
from lightning_dp.accounting import Gaussian
from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.journal import JournalError, federations_in
from lightning_dp.boundary import BoundedSum, Query, Release, State, Term, add_noise
from lightning_dp.estimators.base import Driver, distance
from lightning_dp.federated.client import (
    Client,
    PlannedRelease,
    at_point,
    bounded,
    check_engine,
    check_point,
    check_query,
    draw,
    is_of_ordinary_size,
    noise_source,
    noised_sum,
    parts,
)
from lightning_dp.federated.ledger import ReleaseLedger, Spending
from lightning_dp.federated.protocol import (
    REFUSED,
    AbstractServer,
    Message,
    MessageError,
    Quorum,
    Records,
    norm_bound,
)
from lightning_dp.functional import is_finite
from lightning_dp.mechanism import BudgetExhausted
from lightning_dp.noise_plan import NoisePlan
from lightning_dp.sampling import FullBatch, Poisson

__all__ = ["BVRLSGD", "ClientSampling", "QueryClient", "SynchronousServer"]

_QUERY, _ANSWER, _LOCAL, _WALKED = "query", "answer", "local", "walked"
_PLACE, _VECTORS = ("round", "part"), {_ANSWER: "sum", _WALKED: "x"}


# -- local steps -------------------------------------------------------------------------------


@dataclass(frozen=True)
class BVRLSGD:
    r"""The local routine of DIFF2-BVR-L-SGD, in place of one step of gradient descent.

    From the server's x_0 and v_1 (:class:`~lightning_dp.Diff2` over all workers):
    x_1 = x_0 - η v_1, and then, on the records of one worker only, for k = 2, ..., K,

        v_k = v_(k-1) + (Σ_i clip_C(g_i(x_(k-1)) - g_i(x_(k-2))) + noise) / b,
        C = C3 ‖x_(k-1) - x_(k-2)‖,    x_k = x_(k-1) - η v_k.

    Workers take turns: round r = 1, 2, ... is that of worker r mod P. The sum is over a fresh
    Poisson batch of expected size b = q n_p, and every x_k is released.

    Murata and Suzuki, DIFF2 (2023), Algorithm 4, with Poisson batches instead of fixed-size ones.

    Args:
        learning_rate: η > 0.
        local_steps: K >= 1; K = 1 is gradient descent.
        diff_norm: C3 > 0.
        noise_multiplier: z3 >= 0: noise of standard deviation z3 C on the worker's sum.
        sample_rate: q in (0, 1], of the worker's records.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> routine = BVRLSGD(0.5, local_steps=2, diff_norm=1.0, noise_multiplier=3.0, sample_rate=0.1)
        >>> state = routine.start(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0]))
        >>> query = routine.ask(state)
        >>> query.clip_norm, [term.weight for term in query.terms]
        (1.0, [1.0, -1.0])
        >>> state = routine.tell(state, Release(torch.tensor([0.0, 1.0]), noise_std=0.1))
        >>> routine.ask(state) is None, state["x"]
        (True, tensor([-1.0000,  0.5000]))
    """

    learning_rate: float
    local_steps: int
    diff_norm: float
    noise_multiplier: float
    sample_rate: float

    def __post_init__(self) -> None:
        normalise(self, positive, "learning_rate", "diff_norm")
        normalise(self, whole, "local_steps")
        normalise(self, not_negative, "noise_multiplier")
        normalise(self, between("(0, 1]"), "sample_rate")

    def start(self, x: Tensor, v: Tensor) -> State:
        """Return the state after the server's estimate ``v`` at ``x`` was applied; both flat."""
        return {"k": 1, "before": x, "x": x - self.learning_rate * v, "v": v}

    def ask(self, state: State) -> Query | None:
        """Return the query at x_(k-1) to the worker; None when the round is over.

        A step that would compare a point with itself is over at once: v would not change, so
        neither would anything after it.
        """
        if state["k"] >= self.local_steps:
            return None
        radius = self.diff_norm * distance([state["x"]], state["before"])
        if radius == 0:
            return None
        terms = (Term(1.0, state["x"]), Term(-1.0, state["before"]))
        return Query(terms, radius, self.noise_multiplier)

    def tell(self, state: State, released: Release) -> State:
        """Return the next state, from the noised sum divided by the expected batch size b."""
        v = state["v"] + released.value
        x = state["x"] - self.learning_rate * v
        return {"k": state["k"] + 1, "before": state["x"], "x": x, "v": v}

    @property
    def event(self) -> AbstractEvent:
        """The privacy event of one local step, for a record of the worker in turn."""
        return Poisson().event(self.noise_multiplier, self.sample_rate)

    @staticmethod
    def worker_in_turn(round_number: int, workers: int) -> int:
        """Return the worker, 0, ..., P - 1, that runs round r = 1, 2, ..."""
        return round_number % workers


# -- client sampling ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientSampling:
    r"""A secret draw of the clients that count in a step, charged to a ledger of the server's own.

    Each client of the public list 0, ..., P - 1 is drawn with probability q, each by itself, in each
    step. *All* of them are asked, and answer; with u_c = 0 for who is away, the server releases

    .. math:: \sum_c b_c u_c + \mathcal N(0, (z_t C)^2 I), \quad \|u_c\| \le C, \quad P(b_c = 1) = q.

    Nothing else depends on the draw, which is in the server's memory alone: one that dies before the
    release draws again. Given all that left before, one client moves the sum by at most C, with
    probability q: a Gaussian of multiplier z_t on a Poisson sample of rate q.

    ε is about a whole client, for who sees the releases and who answered when. Assumed: the server and
    its memory are trusted. Towards it, and so in the clients' own ledgers, nothing is amplified.

    Args:
        rate: q in (0, 1].
        ledger: of the list of clients, on the server's disk, the same for all runs over them. It has
            charges and releases, and no draws.
        target_epsilon, target_delta, relation: the budget of the list, as in
            :class:`~lightning_dp.federated.ClientPrivacy`.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> from lightning_dp import Constant, MeanGradient
        >>> from lightning_dp.accounting import epsilon
        >>> sampling = ClientSampling(0.1, ReleaseLedger("ledgers", "clients"), 8.0, 1e-5)
        >>> plan = NoisePlan(1.0, Constant(), FullBatch(), 1.0, MeanGradient(max_grad_norm=1.0))
        >>> round(epsilon(sampling.spending("trial", plan, rounds=100).events(0) * 100, 1e-5), 2)
        7.05
    """

    rate: float
    ledger: ReleaseLedger = field(repr=False, compare=False)
    target_epsilon: float
    target_delta: float
    relation: Relation = "add_remove"

    def __post_init__(self) -> None:
        normalise(self, between("(0, 1]"), "rate")
        instance("ledger", self.ledger, ReleaseLedger)

    def spending(self, run: str, plan: NoisePlan, rounds: int) -> Spending:
        """Return what a run asks of the list of clients."""

        def events(t: int) -> Sequence[AbstractEvent]:
            return [Poisson().event(plan.noise_multiplier(t), self.rate)]

        budget = (self.target_epsilon, self.target_delta, self.relation)
        # A server that went back to its last state may make the step before again.
        return Spending(run, rounds, events, *budget, retain=2, unit="client")


# -- the server --------------------------------------------------------------------------------


@dataclass
class SynchronousServer(AbstractServer):
    """x_(t+1) = x_t - η v_t, where v_t is an estimator's from the sum of all clients' answers.

    At step t the estimator asks all clients the same query; the mean is over q_t N, whoever answers.
    Who is left out of one query of a step is not asked the further ones. With
    :class:`~lightning_dp.Diff2` and ``FullBatch()`` this is DIFF2 with P workers (Murata and Suzuki,
    2023, Algorithm 1); with a ``local_routine``, the step's worker then goes on alone on its records,
    and noises each of its steps itself (DIFF2-BVR-L-SGD, Algorithm 4).

    Args:
        run: the name of this federation, which clients' ledgers know it by.
        plan: z_t, q_t and the estimator, the same at all clients; not adaptive.
        start: x_0, flat.
        rounds: how many steps.
        num_clients: P; clients are 0, ..., P - 1.
        num_records: N over all clients, of their units, public; the mean is over q_t N.
        learning_rate: η > 0.
        noise: the party that adds it. "server": it is trusted with un-noised sums, and noises the
            total once. "client": each noises its sum, and the total has √P times the noise.
        local_routine: what the worker in turn does, with the same η.
        quorum: when a step goes on without some clients.
        sampling: decides in secret whose answers count, where the server noises and the clients have
            themselves as the unit; the mean is then over q q_t N.
        seed: for tests only: the same noise of the server each time; not the same draws.

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
    quorum: Quorum = field(default_factory=Quorum)
    sampling: ClientSampling | None = None

    _settings: ClassVar[tuple[str, ...]] = (
        *("rounds", "num_records", "learning_rate", "noise", "local_routine", "sampling"),
    )

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
        self._begin()
        _check_plan(self.plan, self.noise)
        if self.sampling is not None:
            instance("sampling", self.sampling, ClientSampling)
            if self.noise != "server" or self.local_routine is not None:
                raise ValueError("sampling is for noise='server' without a local_routine.")
            self._spending = self.sampling.spending(self.run, self.plan, self.rounds)
        self._driver = Driver.begin(self.plan.estimator, [self._point])
        self._place, self._reason = (0, 0), ""  # step and part that clients are asked for
        self._local: Tensor | None = None  # v, while a worker goes on alone
        self._query: Query | None = None
        self._answered, self._total = set[int](), self._point  # of the query, and the sum so far
        self._encoded: tuple[tuple[int, ...], bytes] = (), b""
        self._missed: set[int] = set()  # left out of an earlier query of this step
        self._charges: dict[str, int] = {}  # of each run over the list, when last seen
        self._name = secrets.token_hex(8)  # two servers would each noise the same sums
        self._ask()

    @property
    def facts(self) -> dict[str, Any]:
        if (of := self.sampling) is None:
            return {}
        try:
            self._count_charges()
            epsilon = of.ledger.epsilon(of.target_delta, of.relation)
        except JournalError:
            epsilon = math.inf  # nothing bounds what was spent
        facts = {"epsilon": epsilon, "delta": of.target_delta, "relation": of.relation}
        return {**facts, "unit": "client", "client_rate": of.rate}

    @property
    def round(self) -> int:
        return self._place[0]

    @property
    def stage(self) -> tuple[int, ...]:
        return (*self._place, self._local is not None)

    @property
    def reason(self) -> str:
        return self._reason

    @property
    def awaited(self) -> set[int]:
        staying = set(range(0 if self._reason else self.num_clients)) - self._left
        if self._local is not None:
            return staying & {self._worker}
        return staying - (self._answered | self._missed)

    def leave_out(self) -> set[int]:
        late = self.awaited
        if self._reason:
            return set()
        if self._local is not None:
            self._move_to(self._point - self.learning_rate * self._local)
            self._ask()
        elif len(self._answered) >= (1 if self._place[1] else self._least):
            self._end_query()
        else:
            return set()
        return late

    def cost(self, i: int, num_records: int, client: int) -> list[AbstractEvent] | None:
        alone = _events_alone(self.local_routine, i, client, self.num_clients)
        return [self.plan.event(i), *alone]

    # -- one step ----------------------------------------------------------------------------

    def _ask(self) -> None:
        """Form the next query; a step that asks nothing is over at once."""
        while not self._reason and self._local is None:
            step = self._driver.step
            self._place = (step, self._driver.part)
            if self._driver.part == 0:
                self._missed = set()
            if step == self.rounds:
                self._reason = f"all {self.rounds} rounds were made"
                return
            z = self.plan.noise_multiplier(step)
            self._query, self._answered = self._driver.ask([self._point], z), set()
            if self._query is not None:
                q, rng = self.sampling.rate if self.sampling else 1.0, random_generator(None)
                self._drawn = set(Poisson().draw(self.num_clients, q, rng).tolist())
                wide = torch.promote_types(self._point.dtype, torch.float32)
                self._total = torch.zeros(self._query.size(len(self._point)), dtype=wide)
                return
            self._tell(Release.of_nothing([self._point]))

    def _tell(self, released: Release) -> None:
        q = self.sampling.rate if self.sampling else 1.0
        mean = released.mean(self.plan.rate(self._driver.step) * self.num_records * q)
        estimate, self._driver = self._driver.tell([self._point], mean)
        self._query = None
        if estimate is None:
            return
        estimate = estimate.to(self._point.dtype)
        if self._worker is None or self._worker in self._left:
            self._move_to(self._point - self.learning_rate * estimate)
        elif self._is_finite(self._point - self.learning_rate * estimate):
            self._local = estimate

    @property
    def _worker(self) -> int | None:
        """The client that goes on alone after the present step."""
        routine = self.local_routine
        if routine is None or routine.local_steps == 1:
            return None
        return routine.worker_in_turn(self._place[0] + 1, self.num_clients)

    def _is_finite(self, point: Tensor) -> bool:
        """Check a model; a run that has diverged ends at the last model that was finite."""
        finite = is_finite(point)
        if not finite:
            self._reason = "the model is no longer finite: lower the learning rate"
        return finite

    def _move_to(self, point: Tensor) -> None:
        point = point.to(self._point.dtype)
        if self._is_finite(point):
            self._point, self._local = point, None

    def _release(self, query: Query) -> Release:
        """Return the noised sum over all clients that have answered, and count."""
        if self.noise == "server":
            source = noise_source(self.seed, self._place[0])
            received = BoundedSum.received(self._total, query)
            return add_noise(received, query.noise_multiplier, source, World())
        each = query.noise_multiplier * query.clip_norm if query.noise_multiplier else 0.0
        return Release.received(self._total, each * math.sqrt(len(self._answered)))

    def _end_query(self) -> None:
        """Go on with the answers that have come."""
        query = self._query
        assert query is not None
        if not self._is_charged():
            return
        self._missed = set(range(self.num_clients)) - self._answered
        self._tell(self._release(query) if self.sampling is None else self._kept_release(query))
        self._ask()

    def _kept_release(self, query: Query) -> Release:
        """Return the release of a charged step as it is on disk: no other one ever leaves."""

        def make(rng: np.random.Generator) -> bytes:
            made = self._release(query)
            return Message("", {"noise_std": made.noise_std}, {"sum": made.value}).to_bytes()

        assert self.sampling is not None
        content = self.sampling.ledger.release(self._spending, self._place[0], 1, make)
        kept = Message.from_bytes(content)
        return Release.received(kept.tensor("sum"), kept["noise_std"])

    # -- messages ----------------------------------------------------------------------------

    def request(self, client: int) -> bytes | None:
        if client not in self.awaited:
            return None
        if self._encoded[0] != self.stage:  # the same bytes for all who are asked
            if not self._is_charged():
                return None
            self._encoded = self.stage, self._request().to_bytes()
        return self._encoded[1]

    def _is_charged(self) -> bool:
        """Charge the step to the ledger of the list, if there is one, before anybody is asked."""
        if self.sampling is None:
            return True
        self._count_charges()
        try:
            self.sampling.ledger.release(self._spending, self._place[0], 0, lambda rng: b"")
        except BudgetExhausted:
            self._reason = "the list of clients has no budget left"
        self._count_charges()
        return not self._reason

    def _count_charges(self) -> None:
        """Count the charges of each run in the ledger of the list, of which none may be gone."""
        assert self.sampling is not None
        ledger = self.sampling.ledger
        found = {run: each.total for run, each in federations_in(ledger.charges()).items()}
        if any(found.get(run, 0) < count for run, count in self._charges.items()):
            raise JournalError(
                f"{ledger.journal_path} lacks charges of this run, or another: it was lost, or is an "
                "old copy. Put the right one back.",
                topic="journal-behind",
            )
        self._charges = found

    def _request(self) -> Message:
        facts: dict[str, Any] = {"run": self.run, **dict(zip(_PLACE, self._place, strict=True))}
        if self._local is not None:
            return Message(_LOCAL, facts, {"x": self._point, "v": self._local})
        assert self._query is not None
        if self.noise == "server":
            facts["server"] = self._name
        if self.sampling is not None:
            facts["unit"] = "client"
        return _query_message(self._query, self._point, {**facts, "noise": self.noise})

    def receive(self, client: int, reply: bytes) -> bool:
        message = self._read(client, reply, _PLACE, _VECTORS)
        place = (message["round"], message["part"])
        if self._reason or place < self._place or client in self._left:
            return False  # it came late
        has_answered = client in self._answered or self._local is not None
        if place == self._place and message.kind == _ANSWER and has_answered:
            return False  # it came twice
        if place != self._place or client not in self.awaited:
            raise MessageError(f"Client {client} answers for {place}, which was not asked of it.")
        if message.kind == REFUSED:
            self._left.add(client)
            if self._local is not None:
                self.leave_out()
            self._reason = self._reason or self._end_of_budgets()
        elif (message.kind == _WALKED) != (self._local is not None):
            raise MessageError(f"Client {client} sent {message.kind!r}, which was not asked of it.")
        elif message.kind == _WALKED:
            x, _ = message.reals("x", len(self._point), self._point.dtype)
            if not float((x - self._point).double().norm()) <= self._largest_walk():
                raise MessageError("x is farther away than the plan's local routine goes.")
            self._move_to(x)
            self._ask()
        else:
            assert self._query is not None
            size = self._query.size(len(self._point))
            answer, _ = message.reals("sum", size, self._point.dtype, self._largest(self._query))
            # Who was drawn shows in nothing but the sum: not in what is checked, counted or computed.
            self._total.add_(answer, alpha=float(client in self._drawn))
            self._answered.add(client)
        if self._local is None and self._answered and not self.awaited:
            self.leave_out()
        return True

    def _largest(self, query: Query) -> float:
        """Return the largest norm of an honest answer; of one without noise, with certainty."""
        count, size = self.num_records, query.size(len(self._point))
        if self.sampling is not None:
            return norm_bound(query.clip_norm, 0.0, 1, size, 1)
        if self.noise == "server":
            return norm_bound(query.clip_norm, 0.0, count, size, count)
        batch = self.plan.rate(self._place[0]) * count
        return norm_bound(query.clip_norm, query.noise_multiplier, batch, size, count)

    def _largest_walk(self) -> float:
        """Return the farthest that an honest local routine goes, over at least one record.

        ‖x_k - x_(k-1)‖ = η ‖v_k‖, and v grows by a noised mean of clip norm C3 ‖x_(k-1) - x_(k-2)‖.
        """
        routine, v = self.local_routine, self._local
        assert routine is not None and v is not None
        q, z, draws = routine.sample_rate, routine.noise_multiplier, routine.local_steps
        mean = norm_bound(routine.diff_norm, z, 1.0, len(v), 1.0, draws) / q
        slope = float(v.double().norm())
        far = step = routine.learning_rate * slope
        for _ in range(1, routine.local_steps):
            slope += mean * step
            step = routine.learning_rate * slope
            far += step
        return 1.001 * far

    def state_dict(self) -> State:
        return {
            **super().state_dict(),
            "step": self._place[0],
            "part": self._place[1],
            "reason": self._reason,
            "missed": sorted(self._missed),
            "name": self._name,
            "charges": dict(self._charges),
            "estimator": self._driver.state,
            "local": self._local,
        }

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._local, self._name = state["local"], str(state.get("name", self._name))
        step, part = self._place = int(state["step"]), int(state["part"])
        # Where a worker goes on alone, the step's queries have all been answered.
        following = (step, part) if self._local is None else (step + 1, 0)
        self._driver = Driver(self.plan.estimator, state["estimator"], *following)
        self._reason, self._query, self._encoded = str(state["reason"]), None, ((), b"")
        self._ask()
        self._missed, self._charges = set(state.get("missed", ())), dict(state.get("charges") or {})


def _check_plan(plan: NoisePlan, noise: str) -> None:
    """Refuse plans that clients cannot hold a server to."""
    if instance("plan", plan, NoisePlan).shape.chosen != "in advance":
        raise ValueError(
            f"noise_schedule={plan.shape} chooses noise at run time, but clients book a plan that is "
            "declared before. Use a schedule that is a function of the step."
        )
    if not isinstance(plan.sampling, Poisson | FullBatch):
        raise ValueError(
            f"sampling={plan.sampling}: each client draws each batch by itself, from a number of "
            "records that it alone knows. Use Poisson() or FullBatch()."
        )
    if noise == "server" and plan.estimator.traits.queries_per_step > 1:
        raise ValueError(
            f"{plan.estimator} asks several queries on one batch: use noise='client', where each is "
            "noised before it leaves, once."
        )


# -- the client --------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class QueryClient(Client):
    """Answers what a :class:`~lightning_dp.federated.synchronous.SynchronousServer` asks.

    This client holds the server to the plan: the noise is at least z_t, the batch is its own, sampled
    with q_t, and step t is charged as planned, once, before its first query. Un-noised sums leave only
    if ``trusts_server``, and never go to disk; the ledger then books what the server promised to add.

    Args:
        records: this client's data.
        plan: z_t, q_t and the estimator, as at the server.
        ledger: of this data set.
        run: the name of the federation, as at the server.
        rounds: how many steps.
        target_epsilon, target_delta, relation, seed: as in
            :class:`~lightning_dp.federated.ClientPrivacy`.
        trusts_server: the server may have this client's un-noised sums, and noises them.
        local_routine: what this client does alone when it is its turn; with ``client``, its number,
            and ``num_clients``.

    Raises:
        ValueError: naming the argument that is out of its range.
    """

    kinds: ClassVar[tuple[str, ...]] = (_QUERY, _LOCAL)

    records: Records
    plan: NoisePlan
    ledger: ReleaseLedger
    _: KW_ONLY
    run: str
    rounds: int
    target_epsilon: float
    target_delta: float
    relation: Relation = "add_remove"
    trusts_server: bool = False
    local_routine: BVRLSGD | None = None
    client: int = 0
    num_clients: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        normalise(self, flag, "trusts_server")
        _check_plan(self.plan, "server" if self.trusts_server else "client")
        normalise(self, whole, "rounds", "num_clients")
        self.client = whole("client", self.client, 0, self.num_clients - 1)
        budget = (self.target_epsilon, self.target_delta, self.relation)
        # A step has two rounds in the ledger: 2 t, where all clients are asked, and 2 t + 1, where
        # one goes on alone.
        self._declare(2 * self.rounds, budget, self.seed)
        if self.local_routine is not None and self.records.unit == "client":
            raise ValueError("unit='client': the local routine is private for records and users.")
        check_engine(self.records, self.plan.estimator)

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, "trusts_server": self.trusts_server}

    def events(self, i: int) -> Sequence[AbstractEvent]:
        step, is_alone = divmod(i, 2)
        if is_alone:
            return _events_alone(self.local_routine, step, self.client, self.num_clients)
        if self.records.unit == "client":
            return [Gaussian(self.plan.noise_multiplier(step))]
        return [self.plan.event(step)]

    def read(self, request: Message) -> PlannedRelease:
        step, part = request.whole("round"), request.whole("part")
        place = {"round": step, "part": part}
        if request.kind == _LOCAL:
            return self._read_walk(request, step, place)
        if (unit := request.facts.get("unit", self.records.unit)) != self.records.unit:
            raise MessageError(
                f"The server counts by unit={reprlib.repr(unit)}, and this client by "
                f"unit={self.records.unit!r}. Use LocalRecords(unit='client') where clients are sampled."
            )
        query, noise = _query_from(request), request["noise"]
        if noise not in ("server", "client"):
            raise MessageError(f"noise={noise!r} must be 'server' or 'client'.")
        if noise == "server" and not self.trusts_server:
            raise MessageError(
                "The server asks for a sum without noise. If it may have that, and noises it, "
                "set trusts_server=True."
            )
        queries = self.plan.estimator.traits.queries_per_step
        if not part < queries:
            raise MessageError(f"Part {part} of step {step}: the plan has {queries} queries.")
        if step < self.rounds:  # else the ledger refuses it
            check_query(self.records, self.plan, query, step, part)

        def make(rng: np.random.Generator, source: NoiseSource) -> Message:
            batch = draw(self.records, self.plan.rate(step), rng, self.plan.sampling)
            if noise == "server":
                value = bounded(self.records, query, batch).value
            else:
                value = noised_sum(self.records, query, batch, source).value
            return Message(_ANSWER, place, {"sum": value})

        return PlannedRelease(2 * step, part, place, make, keep=noise == "client")

    def _read_walk(self, request: Message, step: int, place: dict[str, int]) -> PlannedRelease:
        """Check that a routine begins in this client's turn, at a model, with a step of some length."""
        routine = self.local_routine
        if routine is None or not self.events(2 * step + 1):
            raise MessageError(f"Step {step} is not this client's turn for a local routine.")
        x, v = request.tensor("x"), request.tensor("v")
        check_point(self.records, x, "x")
        check_point(self.records, v, "v")
        if len(v) != len(x) or v.dtype != x.dtype:
            raise MessageError(f"x has {len(x)} numbers of {x.dtype}, and v {len(v)} of {v.dtype}.")
        start = routine.start(x, v)
        check_point(self.records, start["x"], "x after the server's step")
        if not torch.equal(start["x"], x) and _next(routine, start) is None:
            raise MessageError("v is too short or too long for differences to be clipped.")

        def make(rng: np.random.Generator, source: NoiseSource) -> Message:
            state, rate = start, routine.sample_rate
            while (query := _next(routine, state)) is not None:
                batch = draw(self.records, rate, rng)
                released = noised_sum(self.records, query, batch, source)
                state = routine.tell(state, released.mean(rate * self.records.num_records))
            end = state["x"] if is_finite(state["x"]) else state["before"]
            return Message(_WALKED, place, {"x": end.to(x.dtype)})

        return PlannedRelease(2 * step + 1, 0, place, make)


def _events_alone(
    routine: BVRLSGD | None, step: int, client: int, workers: int
) -> list[AbstractEvent]:
    """Return what a step costs the worker that goes on alone after it; none at another's turn."""
    if routine is None or routine.worker_in_turn(step + 1, workers) != client:
        return []
    return [routine.event] * (routine.local_steps - 1)


def _next(routine: BVRLSGD, state: State) -> Query | None:
    """Return the query that the local routine asks; None where it ends."""
    try:
        query = routine.ask(state)
    except RuntimeError:  # the points are no longer finite, by noised values only
        return None
    is_asked = query is not None and (query.noise_multiplier == 0 or is_of_ordinary_size(query))
    return query if is_asked else None


# -- queries as messages -----------------------------------------------------------------------


def _query_message(query: Query, here: Tensor, facts: dict[str, Any]) -> Message:
    """Return a query as a message; ``here`` stands for the present parameters."""
    named = parts(at_point(query, here))
    tensors = {name: part for name, part in named.items() if isinstance(part, Tensor)}
    weights = {name: part for name, part in named.items() if isinstance(part, float)}
    numbers = {"clip_norm": query.clip_norm, "noise_multiplier": query.noise_multiplier}
    return Message(_QUERY, {**facts, **weights, **numbers}, tensors)


def _query_from(message: Message) -> Query:
    """Read a query; terms whose points are equal share one, and so a pass over the batch."""
    count = sum(name.startswith("weight") for name in message.facts)
    terms: list[Term] = []
    try:
        for number in range(count):
            weight, point = float(message[f"weight{number}"]), message.tensor(f"point{number}")
            for term in terms:
                if term.point is not None and torch.equal(term.point, point):
                    point = term.point
            terms.append(Term(weight, point, message.tensors.get(f"direction{number}")))
        numbers = float(message["clip_norm"]), float(message["noise_multiplier"])
        return Query(tuple(terms), *numbers, message.tensors.get("coordinates"))
    except (ValueError, TypeError, OverflowError) as error:
        raise MessageError(f"This query cannot be asked: {text_of(error)}") from None
