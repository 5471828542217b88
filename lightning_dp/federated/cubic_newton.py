"""DP-FCRN: each client makes a round of private cubic Newton on its own, and sends k numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lightning_dp._validate import flag, normalise, not_negative, number, positive, whole
from lightning_dp.accounting import AbstractEvent
from lightning_dp.estimators import CubicNewton
from lightning_dp.sampling import AbstractSampling, FullBatch, Poisson
from lightning_dp.sparsify import SparseVector, random_k

__all__ = ["CubicNewtonPlan"]


@dataclass(frozen=True)
class CubicNewtonPlan:
    r"""What server and clients of a DP-FCRN run agree on: all of it public.

    Round t = 0, 1, ...: the server sends x_t; client i makes a round of ``newton`` at x_t on its own
    records, with its own noise on each of the τ inner queries
    (:class:`~lightning_dp.federated.CubicNewtonClient`), and sends the k values of S_i(u_i), where
    u_i is its step and S_i(u) is d/k times a public random k of d entries. The server,
    :class:`~lightning_dp.federated.AsyncServer`, makes x_(t+1) = x_t + (α/n) Σ_i S_i(u_i).

    - A client trusts nobody: noise is added before anything leaves it, to sums over its records in
      which one record has norm at most Δ_s = √(k/d) (C_g + C_H ‖v_s‖). Whatever server and other
      clients do, a record pays for the rounds of its own client only.
    - The k entries of a round are those that ``newton`` solves for, and each client has a set of its
      own. With ``whole_steps`` it solves for all d entries, Δ_s = C_g + C_H ‖v_s‖, and sends k of
      them: E S_i(u_i) is then the whole step, at the price of d/k times the noise.
    - A client whose budget is used up leaves; its step is 0 from then on.
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

    def __post_init__(self) -> None:
        normalise(self, whole, "clients", "rounds")
        normalise(self, positive, "step_scale")
        normalise(self, flag, "whole_steps")

    # -- what it costs -----------------------------------------------------------------------

    def sampling(self, sample_rate: float) -> AbstractSampling:
        """How batches are drawn: a rate of 1 is all records. Raises ValueError outside (0, 1]."""
        if not 0 < number("sample_rate", sample_rate) <= 1:
            raise ValueError(f"sample_rate={sample_rate} must be in (0, 1].")
        return FullBatch() if sample_rate == 1 else Poisson()

    def events(self, noise_multiplier: float, sample_rate: float = 1.0) -> list[AbstractEvent]:
        """What one round asks of a record: one event, or τ with ``fresh_batches``.

        Args:
            noise_multiplier: z >= 0 of a whole round (of an inner step with ``fresh_batches``).
            sample_rate: q in (0, 1]; 1 is all records of the client.

        Raises:
            ValueError: for numbers outside these ranges.
        """
        noise_multiplier = not_negative("noise_multiplier", noise_multiplier)
        event = self.sampling(sample_rate).event(noise_multiplier, sample_rate)
        return [event] * (self.newton.inner_steps if self.newton.fresh_batches else 1)

    # -- one client's step -------------------------------------------------------------------

    def mask_seed(self, client: int) -> int:
        """The public seed of a client's coordinate sets."""
        if isinstance(client, bool) or not (isinstance(client, int) and 0 <= client < self.clients):
            raise ValueError(f"client={client!r} must be one of 0, ..., {self.clients - 1}.")
        return (self.newton.mask_seed + client) % 2**64

    def newton_of(self, client: int) -> CubicNewton:
        """What a client solves: for the entries that it sends, or for all of them."""
        newton = replace(self.newton, mask_seed=self.mask_seed(client))
        return replace(newton, keep=None, keep_fraction=None) if self.whole_steps else newton

    def update(self, step: Tensor, t: int, client: int) -> Tensor:
        """The values of S_i(u): what client i sends of its step in round t."""
        keep = self.newton.kept(len(step))
        return random_k(step, keep, self.mask_seed(client), t).values

    # -- for the server ----------------------------------------------------------------------

    @property
    def lag(self) -> int:
        """1: synchronous."""
        return 1

    def check(self, size: int, num_clients: int) -> None:
        """Raise ValueError unless it is for so many parameters and clients."""
        self.newton.kept(size)
        if num_clients != self.clients:
            raise ValueError(f"num_clients={num_clients}, but the plan has clients={self.clients}.")

    def update_size(self, size: int) -> int:
        """k of ``size`` parameters."""
        return self.newton.kept(size)

    def move(self, point: Tensor, i: int, update: Tensor, client: int) -> Tensor:
        """``point`` + (α/n) S, from the values of S."""
        sent = SparseVector(update.to(point.dtype), len(point), self.mask_seed(client), i)
        alpha = self.step_scale / self.clients
        return point.index_add(0, sent.coordinates(), sent.values, alpha=alpha)
