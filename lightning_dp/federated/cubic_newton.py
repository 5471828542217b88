"""DP-FCRN: synchronous rounds of private cubic-regularised Newton steps, with short messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_dp.accounting import AbstractEvent, History, PLDAccountant, Relation
from lightning_dp.accounting.guards import FixedGuard
from lightning_dp.accounting.ledger import Ledger
from lightning_dp.estimators import CubicNewton
from lightning_dp.mechanism import Mechanism
from lightning_dp.noise import NoiseSource, random_generator
from lightning_dp.plan import NoisePlan
from lightning_dp.query import BoundedSum, Query
from lightning_dp.sampling import AbstractSampling, FullBatch, Poisson
from lightning_dp.schedules import Constant
from lightning_dp.sparsify import SparseVector, random_k
from lightning_dp.world import World

__all__ = ["Answer", "CubicNewtonClient", "CubicNewtonServer", "FederatedCubicNewton"]

Answer = Callable[[Query, Sequence[int]], BoundedSum]


@dataclass(frozen=True)
class FederatedCubicNewton:
    r"""What server and clients of a DP-FCRN run agree on: all of it public.

    Round t = 0, 1, ...: the server sends x_t; client i makes a round of ``newton`` at x_t on its own
    records, with its own noise on each of the τ inner queries, and sends S_i(α u_i), where u_i is its
    step and S_i(u) is d/k times a public random k of d entries; x_(t+1) = x_t + Σ_i S_i(α u_i) / n.

    - A client trusts nobody: noise is added before anything leaves it, to sums over its records in
      which one record has norm at most Δ_s = √(k/d) (C_g + C_H ‖v_s‖). Whatever server and other
      clients do, a record pays for the rounds of its own client only: :meth:`history`.
    - The k entries of a round are those that ``newton`` solves for, and each client has a set of its
      own. With ``whole_steps`` it solves for all d entries, Δ_s = C_g + C_H ‖v_s‖, and sends k of
      them: E S_i(u_i) is then the whole step, at the price of d/k times the noise.
    - One inner step (τ = 1) is Fed-SGD with learning rate α min(1/μ, ``max_step_size``).

    Algorithm 1 of DP-FCRN, with the package's accounting in place of its Theorem 1.

    Args:
        newton: the step, and how many coordinates are sent (``keep`` or ``keep_fraction``).
        clients: n >= 1, numbered 0, ..., n - 1.
        rounds: T >= 1.
        noise_multiplier: z >= 0 of a whole round (of an inner step with ``fresh_batches``).
        sample_rate: q in (0, 1], the Poisson rate of a client's batches; 1 is all of its records.
        step_scale: α > 0.
        whole_steps: see above.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> newton = CubicNewton(1.0, 0.0, inner_steps=4, keep=2, max_step_size=0.5)
        >>> run = FederatedCubicNewton(newton, clients=3, rounds=10, noise_multiplier=20.0)
        >>> run.history()
        [(Gaussian(noise_multiplier=20.0), 10)]
        >>> server = run.server(torch.zeros(8))
        >>> server.round, len(server.request(client=0))
        (0, 72)
    """

    newton: CubicNewton
    clients: int
    rounds: int
    noise_multiplier: float
    sample_rate: float = 1.0
    step_scale: float = 1.0
    whole_steps: bool = False

    def __post_init__(self) -> None:
        for name in ("clients", "rounds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier={self.noise_multiplier} must be finite and at least 0."
            )
        if not 0 < self.sample_rate <= 1:
            raise ValueError(f"sample_rate={self.sample_rate} must be in (0, 1].")
        if not 0 < self.step_scale < math.inf:
            raise ValueError(f"step_scale={self.step_scale} must be finite and greater than 0.")

    @property
    def sampling(self) -> AbstractSampling:
        return FullBatch() if self.sample_rate == 1 else Poisson()

    @property
    def releases_per_round(self) -> int:
        """How many events a round makes: 1, or τ with ``fresh_batches``."""
        return self.newton.inner_steps if self.newton.fresh_batches else 1

    def mask_seed(self, client: int) -> int:
        """The public seed of a client's coordinate sets."""
        if not (isinstance(client, int) and 0 <= client < self.clients):
            raise ValueError(f"client={client!r} must be one of 0, ..., {self.clients - 1}.")
        return (self.newton.mask_seed + client) % 2**64

    def event(self) -> AbstractEvent:
        """One release, for a record of a client that takes part."""
        return self.sampling.event(self.noise_multiplier, self.sample_rate)

    def history(self) -> History:
        """Everything that is asked about one record in the whole run."""
        return [(self.event(), self.rounds * self.releases_per_round)]

    def server(self, point: Tensor) -> CubicNewtonServer:
        """The server, at x_0 (flat, float32 or float64)."""
        return CubicNewtonServer(self, point)

    def client(
        self, client: int, answer: Answer, num_records: int, ledger: Ledger, seed: int | None = None
    ) -> CubicNewtonClient:
        """One client; see there."""
        return CubicNewtonClient(self, client, answer, num_records, ledger, seed)


class CubicNewtonServer:
    """The server's part: it sees what clients send, and never any data.

    Replies are taken in any order, each once; the round ends with the last one, and the mean is
    taken in the order of the clients, so that the order of arrival changes no bit. A client that was
    not heard of is asked for the same round again.

    Attributes:
        point: x_t.
        round: t; :attr:`is_done` when it is T.
        received_bytes: of replies that were used.
    """

    def __init__(self, run: FederatedCubicNewton, point: Tensor) -> None:
        run.newton.kept(point.numel())
        if not bool(torch.isfinite(point).all()):
            raise ValueError("point must be finite.")
        self._run = run
        # Checks shape and type too.
        self._request = SparseVector(point.detach().cpu().clone(), point.numel(), 0, 0)
        self._replies: dict[int, SparseVector] = {}
        self.received_bytes = 0

    @property
    def point(self) -> Tensor:
        return self._request.values.clone()

    @property
    def round(self) -> int:
        return self._request.round_

    @property
    def is_done(self) -> bool:
        return self.round >= self._run.rounds

    def request(self, client: int) -> bytes | None:
        """What to send to a client; None if nothing is owed by it now. Asking twice is harmless."""
        self._run.mask_seed(client)
        return None if self.is_done or client in self._replies else self._request.to_bytes()

    def receive(self, client: int, reply: bytes) -> bool:
        """Use a reply; False, and nothing changes, if it was used before or its round is over.

        Raises:
            ValueError: if it is not what this client was asked for; nothing changes.
        """
        seed = self._run.mask_seed(client)
        update = SparseVector.from_bytes(reply)
        size = self._request.size
        expected = (size, self._run.newton.kept(size), seed)
        if (update.size, update.keep, update.seed) != expected or update.round_ > self.round:
            raise ValueError(
                f"Client {client} sent {update.keep} of {update.size} coordinates of seed "
                f"{update.seed} in round {update.round_}; asked for were {expected[1]} of {size} of "
                f"seed {seed} in round {self.round}."
            )
        if not bool(torch.isfinite(update.values).all()):
            raise ValueError(f"Client {client} sent values that are not finite.")
        if update.round_ < self.round or client in self._replies or self.is_done:
            return False
        self._replies[client] = update
        self.received_bytes += len(reply)
        if len(self._replies) == self._run.clients:
            self._finish_round()
        return True

    def _finish_round(self) -> None:
        point = self._request.values
        total = torch.zeros_like(point, dtype=torch.float64)
        for client in range(self._run.clients):
            total += self._replies[client].dense()
        moved = (point + total / self._run.clients).to(point.dtype)
        self._request = SparseVector(moved, self._request.size, 0, self.round + 1)
        self._replies = {}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers; replies of the round under way included."""
        return {
            "point": self.point,
            "round": self.round,
            "received_bytes": self.received_bytes,
            "replies": {client: reply.values for client, reply in self._replies.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict` of a server of the same run."""
        size, round_ = self._request.size, int(state["round"])
        if state["point"].numel() != size:
            raise ValueError(f"The state has {state['point'].numel()} parameters, this run {size}.")
        self._request = SparseVector(state["point"].clone(), size, 0, round_)
        self._replies = {
            client: SparseVector(values, size, self._run.mask_seed(client), round_)
            for client, values in state["replies"].items()
        }
        self.received_bytes = int(state["received_bytes"])


class CubicNewtonClient:
    """One client's part: it alone sees its records, and what leaves it is noised and booked.

    - A release is charged to the ledger, durably, before a record is touched.
    - A request that comes again gets the same bytes, not a second draw of the noise.
    - What the ledger holds at the start counts against the run's rounds: a client that lost its
      state asks no more of its records than what was planned.

    Args:
        run: what was agreed on.
        client: which one, 0, ..., n - 1.
        answer: ``answer(query, records)``: the clipped sum of a query (all its points are given)
            over these of the records 0, ..., N - 1. Sensitive. A gradient engine, or a formula.
        num_records: N, public.
        ledger: of this client for this run, begun.
        seed: for tests only: noise and samples are then a function of seed, client and round.
    """

    def __init__(
        self,
        run: FederatedCubicNewton,
        client: int,
        answer: Answer,
        num_records: int,
        ledger: Ledger,
        seed: int | None = None,
    ) -> None:
        if not num_records >= 1:
            raise ValueError(f"num_records={num_records} must be at least 1.")
        newton = replace(run.newton, mask_seed=run.mask_seed(client))
        if run.whole_steps:
            newton = replace(newton, keep=None, keep_fraction=None)
        self._run, self._client, self._answer, self._seed = run, client, answer, seed
        self._newton, self._ledger = newton, ledger
        planned = run.rounds * run.releases_per_round
        self._mechanism = Mechanism(
            NoisePlan(
                run.noise_multiplier, Constant(), run.sampling, run.sample_rate, self._newton
            ),
            (),
            ledger,
            FixedGuard(max(0, planned - ledger.steps)),
            num_records,
            NoiseSource(seed),
            World(),
        )
        self._replies: dict[int, bytes] = {}

    def epsilon(self, delta: float, relation: Relation = "add_remove") -> float:
        """What this client has spent, by the accountant, from its ledger."""
        return PLDAccountant().epsilon(self._ledger.history(), delta, relation)

    def answer(self, request: bytes) -> bytes:
        """The reply to a request of the server.

        Raises:
            ValueError: for a request that is not of this run or of a round that is long over.
            BudgetExhausted: if the run's rounds are used up; nothing is charged.
        """
        asked = SparseVector.from_bytes(request)
        if asked.keep != asked.size:
            raise ValueError(f"The request has {asked.keep} of {asked.size} parameters; need all.")
        if asked.round_ not in self._replies:
            if self._replies and asked.round_ < max(self._replies):
                raise ValueError(f"Round {asked.round_} is over; its reply is no longer kept.")
            if asked.round_ >= self._run.rounds:
                raise ValueError(f"Round {asked.round_} is none of {self._run.rounds} rounds.")
            step = self._step(asked.values, asked.round_)
            message = random_k(
                (self._run.step_scale * step).to(asked.values.dtype),
                self._run.newton.kept(asked.size),
                self._newton.mask_seed,
                asked.round_,
            )
            self._replies = {asked.round_: message.to_bytes()}
        return self._replies[asked.round_]

    def _step(self, point: Tensor, round_: int) -> Tensor:
        """α = 1: what this client would add to x_t."""
        mechanism, run, of_round = self._mechanism, self._run, self._run.releases_per_round
        place = {
            "step": round_ * of_round,
            "estimator": {**self._newton.init([point]), "round": round_},
        }
        mechanism.load_state_dict({**mechanism.state_dict(), **place})
        stream = (self._client, round_)
        if self._seed is not None:
            mechanism.noise = NoiseSource(_combined(self._seed, *stream))
        chosen = random_generator(self._seed, 1, *stream)
        step = torch.zeros_like(point)
        for _ in range(of_round):
            mechanism.ask([point])
            records = run.sampling.draw(int(mechanism.num_records), run.sample_rate, chosen)

            def answer(records: NDArray[np.int64] = records) -> None:
                query = mechanism.query
                assert query is not None
                terms = tuple(
                    replace(term, point=point if term.point is None else term.point)
                    for term in query.terms
                )
                mechanism.answer(self._answer(replace(query, terms=terms), records.tolist()))

            answer()
            step = step - mechanism.tell([point], answer)
        return step

    def state_dict(self) -> dict[str, Any]:
        """The last reply, as a tensor of bytes by its round. The ledger saves itself."""
        return {
            "replies": {
                round_: torch.frombuffer(bytearray(reply), dtype=torch.uint8)
                for round_, reply in self._replies.items()
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._replies = {
            int(round_): reply.numpy().tobytes() for round_, reply in state["replies"].items()
        }


def _combined(*numbers: int) -> int:
    """One number for several that are below 2^64."""
    return sum(number << (64 * place) for place, number in enumerate(numbers))
