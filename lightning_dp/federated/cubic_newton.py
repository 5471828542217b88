"""DP-FCRN: each client makes a round of private cubic Newton on its own, and sends k numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lightning_dp._noise import NoiseSource
from lightning_dp._refusals import text_of
from lightning_dp._validate import (
    between,
    flag,
    instance,
    normalise,
    not_negative,
    optional,
    positive,
    whole,
)
from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.estimators import CubicNewton
from lightning_dp.federated.asynchronous import RoundClient, RoundPlan
from lightning_dp.federated.client import (
    PlannedRelease,
    at_point,
    check_engine,
    draw,
    is_of_ordinary_size,
    noised_sum,
)
from lightning_dp.federated.ledger import ReleaseLedger
from lightning_dp.federated.protocol import Message, MessageError, Records, norm_bound
from lightning_dp.functional import random_k, shared_mask
from lightning_dp.sampling import AbstractSampling, FullBatch, Poisson

__all__ = ["CubicNewtonClient", "CubicNewtonPlan"]

_log = logging.getLogger("lightning_dp.federated")
_LONGEST = 1e150  # whose square is finite


@dataclass(frozen=True)
class CubicNewtonPlan(RoundPlan):
    r"""The public plan that server and clients of a DP-FCRN run agree on.

    Round t = 0, 1, ...: the server sends x_t; client i makes a round of ``newton`` at x_t on its own
    records, with its own noise on each of the τ inner queries (:class:`CubicNewtonClient`), and
    sends the k values of S_i(u_i), where u_i is its step and S_i(u) is d/k times a public random k
    of d entries. The server,
    :class:`~lightning_dp.federated.AsyncServer`, makes x_(t+1) = x_t + (α/n) Σ_i S_i(u_i).

    - One record has norm at most Δ_s = √(k/d) (C_g + C_H ‖v_s‖) in the sums that are noised.
    - The k entries of a round are those that ``newton`` solves for, and each client has its own
      set. With ``whole_steps`` it solves for all d entries, Δ_s = C_g + C_H ‖v_s‖, and sends k of
      them: E S_i(u_i) is then the whole step, at the price of d/k times the noise.
    - One inner step (τ = 1) is Fed-SGD with learning rate α min(1/μ, ``max_step_size``).

    Algorithm 1 of Huo, Liu, Ding, Johansson and Shi, Federated Cubic Regularized Newton Learning
    with Sparsification-amplified Differential Privacy, with the package's accounting in place of
    its Theorem 1.

    Args:
        newton: the step, and how many coordinates are sent (``keep`` or ``keep_fraction``).
        clients: n >= 1, numbered 0, ..., n - 1.
        rounds: T >= 1.
        step_scale: α > 0.
        whole_steps: see above.
        noise_multiplier, min_batch_size: z of a client's rounds at most, and q N at least, if they
            are agreed on. Then the server refuses updates that are longer than they allow. Where
            the client is the unit, ``min_batch_size`` is what its sums are divided by.
        sample_rate: q of a client at most, if it is agreed on. Then the server computes ε by the plan,
            at this q and ``noise_multiplier``: a client with less noise pays more.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> import torch
        >>> from lightning_dp.federated import AsyncServer
        >>> newton = CubicNewton(1.0, 0.0, inner_steps=4, keep=2, max_step_size=0.5)
        >>> plan = CubicNewtonPlan(newton, clients=3, rounds=10)
        >>> server = AsyncServer("trial", plan, torch.zeros(8), num_clients=3)
        >>> server.round, plan.update_size(8), plan.events(noise_multiplier=20.0)
        (0, 2, [Gaussian(noise_multiplier=20.0)])
    """

    newton: CubicNewton
    clients: int
    rounds: int
    step_scale: float = 1.0
    whole_steps: bool = False
    noise_multiplier: float | None = None
    min_batch_size: float = 1.0
    sample_rate: float | None = None

    def __post_init__(self) -> None:
        normalise(self, whole, "clients", "rounds")
        normalise(self, positive, "step_scale", "min_batch_size")
        normalise(self, optional(not_negative), "noise_multiplier")
        normalise(self, optional(between("(0, 1]")), "sample_rate")
        normalise(self, flag, "whole_steps")

    # -- what it costs -----------------------------------------------------------------------

    def sampling(self, sample_rate: float) -> AbstractSampling:
        """Return the sampling scheme of a rate in (0, 1], where 1 takes all records."""
        sample_rate = between("(0, 1]")("sample_rate", sample_rate)
        return FullBatch() if sample_rate == 1 else Poisson()

    def events(self, noise_multiplier: float, sample_rate: float = 1.0) -> list[AbstractEvent]:
        """Return the events of one round for a record: one, or τ with ``fresh_batches``.

        Args:
            noise_multiplier: z >= 0 of a whole round (of an inner step with ``fresh_batches``).
            sample_rate: q in (0, 1]; 1 is all records of the client.

        Raises:
            ValueError: for numbers outside these ranges.
        """
        noise_multiplier = not_negative("noise_multiplier", noise_multiplier)
        event = self.sampling(sample_rate).event(noise_multiplier, sample_rate)
        return [event] * (self.newton.inner_steps if self.newton.fresh_batches else 1)

    def cost(self, i: int, num_records: int) -> list[AbstractEvent] | None:
        if self.noise_multiplier is None or self.sample_rate is None:
            return None
        return self.events(self.noise_multiplier, self.sample_rate)

    # -- one client's step -------------------------------------------------------------------

    def mask_seed(self, client: int) -> int:
        """Return the public seed of a client's coordinate sets."""
        client = whole("client", client, 0, self.clients - 1)
        return (self.newton.mask_seed + client) % 2**64

    def newton_of(self, client: int) -> CubicNewton:
        """Return the step that a client solves: for the entries that it sends, or for all."""
        newton = replace(self.newton, mask_seed=self.mask_seed(client))
        return replace(newton, keep=None, keep_fraction=None) if self.whole_steps else newton

    def update(self, step: Tensor, t: int, client: int) -> Tensor:
        """Return the values of S_i(u), which client i sends of its step in round t."""
        keep = self.newton.query_size(len(step))
        return random_k(step, keep, self.mask_seed(client), t).values

    # -- for the server ----------------------------------------------------------------------

    def update_size(self, size: int) -> int:
        return self.newton.query_size(size)

    def bound(self, i: int, point: Tensor) -> float:
        """Return the largest norm of an honest client's k values in a round at x.

        V_0 = 0 and V_(s+1) = V_s + η_s (A_s + λ (‖x‖ + V_s) + (M/2) V_s²) + ‖x - Π(x)‖ bound ‖v_s‖,
        where Π projects onto the box, and A_s bounds the noised mean: the
        :func:`~lightning_dp.federated.protocol.norm_bound` of a sum with clip norm
        √(k/d) (C_g + C_H V_s) over the least expected batch size. A step is an average of the v_s,
        d/k times which is sent; in a box of half-width β, ‖v_s‖ <= ‖x‖ + β √d.
        """
        if self.noise_multiplier is None:
            return math.inf
        newton, x = self.newton_of(0), point.double()
        size, tau, beta = newton.query_size(len(x)), newton.inner_steps, newton.box or math.inf
        outside = float((x - x.clamp(-beta, beta)).norm())
        z = self.noise_multiplier * (1 if newton.fresh_batches else math.sqrt(tau))
        length, longest, far = 0.0, 0.0, float(x.norm())
        for s in range(tau):
            of_a_record = newton.max_grad_norm + newton.max_hessian_norm * length
            clip_norm = math.sqrt(size / len(x)) * of_a_record
            total = norm_bound(clip_norm, z, self.min_batch_size, size, draws=tau)
            slope = total / self.min_batch_size + newton.weight_decay * (far + length)
            eta = min(2 / (newton.strong_convexity * (s + 2)), newton.max_step_size or math.inf)
            length += eta * (slope + newton.hessian_lipschitz / 2 * length**2) + outside
            length = min(length, far + beta * math.sqrt(len(x)), _LONGEST)
            longest = max(longest, length)
        return 1.001 * longest * len(x) / self.newton.query_size(len(x))

    def factor(self, i: int, size: int) -> float:
        return self.step_scale / self.clients

    def coordinates(self, i: int, size: int, client: int = 0) -> Tensor | None:
        return shared_mask(self.mask_seed(client), i, size, self.update_size(size))


@dataclass(eq=False, repr=False)
class CubicNewtonClient(RoundClient):
    """Client i of a :class:`~lightning_dp.federated.cubic_newton.CubicNewtonPlan`.

    Noise, sampling and budget are this client's choice. Where the inner steps diverge (by noised values
    only), it sends zeros, and logs it.

    Args:
        records: this client's data.
        plan: what was agreed on.
        ledger: of this data set.
        run: the name of the federation, as at the server.
        client: its number.
        noise_multiplier: z >= 0 of a whole round (of an inner step with ``fresh_batches``).
        target_epsilon, target_delta, relation, seed: as in
            :class:`~lightning_dp.federated.ClientPrivacy`.
        sample_rate: q in (0, 1], the Poisson rate of its batches; 1 is all of its records.

    Raises:
        ValueError: naming the argument that is out of its range.
    """

    records: Records
    plan: CubicNewtonPlan
    ledger: ReleaseLedger
    _: KW_ONLY
    run: str
    client: int
    noise_multiplier: float
    target_epsilon: float
    target_delta: float
    sample_rate: float = 1.0
    relation: Relation = "add_remove"
    seed: int | None = None

    def __post_init__(self) -> None:
        normalise(self, not_negative, "noise_multiplier")
        normalise(self, between("(0, 1]"), "sample_rate")
        instance("plan", self.plan, CubicNewtonPlan)
        for name in ("noise_multiplier", "sample_rate"):
            self._check_limit(name, getattr(self, name), getattr(self.plan, name))
        budget = (self.target_epsilon, self.target_delta, self.relation)
        self._declare(self.plan.rounds, budget, self.seed)
        if not self.records.num_records >= 1:
            raise ValueError(f"num_records={self.records.num_records} must be at least 1.")
        # A whole client's N is as private as its records: it may not scale what leaves.
        is_whole = self.records.unit == "client"
        own = self.sample_rate * self.records.num_records
        self._batch_size = self.plan.min_batch_size if is_whole else own
        if self.plan.noise_multiplier is not None:
            self._check_limit("-min_batch_size", -self._batch_size, -self.plan.min_batch_size)
        check_engine(self.records, self.plan.newton)
        self._newton = self.plan.newton_of(self.client)  # raises for a number out of range

    def events(self, i: int) -> Sequence[AbstractEvent]:
        rate = 1.0 if self.records.unit == "client" else self.sample_rate
        return self.plan.events(self.noise_multiplier, rate)

    def read(self, request: Message) -> PlannedRelease:
        planned, dtype = super().read(request), request.tensor("model").dtype
        if dtype not in (torch.float32, torch.float64):
            raise MessageError(
                f"The model is of {dtype}; DP-FCRN needs float32 or float64. Call model.float()."
            )
        return planned

    def update(
        self, i: int, point: Tensor, rng: np.random.Generator, source: NoiseSource
    ) -> Tensor:
        """Return the k values of this client's step from x_i. Every query is noised."""
        newton, q, params = self._newton, self.sample_rate, [point]
        state = {**newton.init(params), "round": i}
        step, batch = torch.zeros_like(point), list[int]()
        for inner in range(newton.inner_steps):
            if inner == 0 or newton.fresh_batches:
                batch = draw(self.records, q, rng, self.plan.sampling(q))
            query = at_point(newton.ask(state, params, i, self.noise_multiplier), point)
            why = ""
            if query.noise_multiplier > 0 and not is_of_ordinary_size(query):
                why = f"inner step {inner} asks for clip norm {query.clip_norm}"
            else:
                released = noised_sum(self.records, query, batch, source)
                mean = released.mean(self._batch_size)
                try:
                    estimate, state = newton.tell(state, params, i, mean)
                except RuntimeError as error:
                    why = text_of(error)
            if why:
                _log.warning("Client %d sends zeros for round %d: %s", self.client, i, why)
                step = torch.zeros_like(point)
                break
            step = step if estimate is None else step - estimate
        return self.plan.update(step.to(point.dtype), i, self.client)
