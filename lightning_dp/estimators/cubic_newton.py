"""Cubic-regularised Newton steps from noisy gradients and Hessian-vector products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_dp._refusals import RefusedRun, RefusedSetting
from lightning_dp._validate import (
    between,
    flag,
    normalise,
    not_negative,
    optional,
    positive,
    seed,
    whole,
)
from lightning_dp.boundary import Query, Release, State, Term
from lightning_dp.estimators.base import AbstractEstimator, Traits, share_of_noise
from lightning_dp.functional import flatten, length, number_of_entries, shared_mask

__all__ = ["CubicNewton", "average_weight", "inner_step"]


@dataclass(frozen=True)
class CubicNewton(AbstractEstimator):
    r"""x_(t+1) = x_t + α Σ_(s=1..τ) 2s / (τ (τ + 1)) v_s: τ noisy steps on a cubic model of the loss.

    In each round a public random set c of k of the d coordinates, v_0 = 0 in R^k, and for s < τ

    G_s = (Σ_i clip_Δ([g_i]_c + [H_i]_cc v_s) + N(0, z_s² Δ_s² I)) / B,  Δ_s = √(k/d) (C_g + C_H ‖v_s‖),

    v_(s+1) = Proj(v_s - η_s (G_s + λ ([x_t]_c + v_s) + (M/2) ‖v_s‖ v_s)),  η_s = 2 / (μ (s + 2)),

    g_i and H_i the gradient and the Hessian of record i at x_t. Nothing of size d × d is made; one
    further pass over the batch answers an inner step.

    - Δ_s is the sensitivity of an inner step under add/remove for every batch size: v_s is made of
      released values. The noise follows the actual ‖v_s‖.
    - Rounds on one batch (default): a Trainer step is a round. Its τ queries on one Poisson sample
      are one Gaussian, z = (Σ_s z_s^-2)^(-1/2) with z_s = z √τ, amplified once. ``noise_multiplier``
      and calibration set z of the round.
    - ``fresh_batches=True``: a Trainer step is one inner step on its own batch, with multiplier z;
      parameters move at every τ-th step only.
    - The factor √(k/d) lowers bound and clipped gradient alike: keeping k of d makes messages
      shorter, not noise smaller. There is no factor d/k in the step; a learning rate of α d/k
      gives the paper's.
    - The estimate is minus the step, for plain ``torch.optim.SGD`` whose learning rate is α (1 in
      the paper; a scheduler makes α_t). Any other optimizer is refused.
    - λ ‖x‖²/2 is public and has no part in the records' loss, nor in any clipping.

    The steps η_s of the paper are stable where the curvature is at most about μ, or in a small box:
    with a larger curvature L set ``max_step_size`` to 1/L, or a larger ``strong_convexity``.

    Huo, Liu, Ding, Johansson and Shi, Federated Cubic Regularized Newton Learning with
    Sparsification-amplified Differential Privacy, Algorithms 1 and 2 in the central form, with an
    average that leaves θ_0 out; accounted soundly, and not by its Theorem 1.

    Args:
        strong_convexity: μ > 0.
        hessian_lipschitz: M >= 0; 0 leaves the cubic term out.
        inner_steps: τ >= 1.
        max_grad_norm: C_g > 0, a bound on the norm of one record's gradient.
        max_hessian_norm: C_H > 0, a bound on the norm of one record's Hessian.
        keep: k; at most d.
        keep_fraction: k / d in (0, 1], instead of ``keep``; k is rounded, and at least 1. Default
            all coordinates.
        mask_seed: makes the public sets, by :func:`lightning_dp.functional.shared_mask`.
        box: h > 0: every entry of θ stays in [-h, h]; None for no bounds.
        weight_decay: λ >= 0.
        max_step_size: an upper bound on η_s > 0; None for the paper's steps.
        fresh_batches: a batch for every inner step.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> newton = CubicNewton(strong_convexity=0.1, hessian_lipschitz=1.0, inner_steps=5)
        >>> query = newton.ask(newton.init([torch.zeros(3)]), [torch.zeros(3)], 0, 2.0)
        >>> query.clip_norm, round(query.noise_multiplier, 3), newton.queries_per_step
        (1.0, 4.472, 5)
    """

    strong_convexity: float
    hessian_lipschitz: float
    inner_steps: int
    max_grad_norm: float = 1.0
    max_hessian_norm: float = 1.0
    keep: int | None = None
    keep_fraction: float | None = None
    mask_seed: int = 0
    box: float | None = None
    weight_decay: float = 0.0
    max_step_size: float | None = None
    fresh_batches: bool = False

    def __post_init__(self) -> None:
        normalise(self, positive, "strong_convexity", "max_grad_norm", "max_hessian_norm")
        normalise(self, not_negative, "hessian_lipschitz", "weight_decay")
        normalise(self, optional(positive), "box", "max_step_size")
        normalise(self, whole, "inner_steps")
        normalise(self, optional(whole), "keep")
        normalise(self, seed, "mask_seed")
        normalise(self, optional(between("(0, 1]")), "keep_fraction")
        normalise(self, flag, "fresh_batches")
        if self.keep is not None and self.keep_fraction is not None:
            raise ValueError(
                f"keep={self.keep} and keep_fraction={self.keep_fraction} both say how many "
                "coordinates are kept: give one of them."
            )

    # -- what is planned -------------------------------------------------------------------

    @property
    def queries_per_step(self) -> int:
        """The queries of a step on its one batch, one for each inner step, or one in all."""
        return 1 if self.fresh_batches else self.inner_steps

    @property
    def traits(self) -> Traits:
        return Traits(
            queries_per_step=self.queries_per_step,
            longest_silence=0,
            uses_hessian=self.inner_steps > 1,
            estimates_gradient=False,
        )

    def check(self, optimizer: Optimizer) -> None:
        if type(optimizer) is not SGD:
            raise RefusedSetting(
                f"CubicNewton computes the whole step, and {type(optimizer).__name__} would change it. "
                "Use torch.optim.SGD(params, lr=1.0); lr is the paper's step scale α.",
                topic="optimizer",
            )
        for group in optimizer.param_groups:
            for name in ("momentum", "weight_decay", "nesterov", "maximize"):
                if group[name]:
                    raise RefusedSetting(
                        f"torch.optim.SGD({name}={group[name]}) changes the step of CubicNewton. "
                        "Leave it out; an L2 term is CubicNewton(weight_decay=...).",
                        topic="optimizer",
                    )
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.query_size(number_of_entries([param for param in params if param.requires_grad]))

    def query_size(self, size: int) -> int:
        """Return k for d = ``size`` coordinates.

        Raises:
            ValueError: if ``keep`` is larger than d.
        """
        if self.keep_fraction is not None:
            return max(1, round(self.keep_fraction * size))
        if self.keep is not None and self.keep > size:
            raise ValueError(f"keep={self.keep} coordinates of {size}: keep at most all of them.")
        return size if self.keep is None else self.keep

    def coordinates(self, round_: int, size: int) -> Tensor | None:
        """Return c of a round, sorted, or None for all ``size`` coordinates."""
        keep = self.query_size(size)
        return None if keep == size else _mask(self.mask_seed, round_, size, keep)

    # -- one inner step --------------------------------------------------------------------

    def init(self, params: Sequence[Tensor]) -> State:
        self.query_size(number_of_entries(params))
        return {"round": 0, "inner": 0, "offset": None, "average": None}

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query:
        size = number_of_entries(params)
        coordinates = self.coordinates(state["round"], size)
        offset, terms = state["offset"], [Term()]
        distance = 0.0 if offset is None else state.get("distance")
        if distance is None:  # a state of an earlier release
            distance = float(length(offset))
        if distance:
            terms.append(Term(1.0, direction=_scattered(offset, coordinates, size)))
        # ‖[g_i]_c + [H_i]_cc v‖ <= C_g + C_H ‖v‖. A random set c of k coordinates holds at most k/d of
        # the squared norm on average, hence the factor √(k/d); what is longer is clipped. So the bound
        # holds in any case, and needs nothing about g_i or H_i.
        bound = self.max_grad_norm + self.max_hessian_norm * distance
        return Query(
            tuple(terms),
            math.sqrt(self.query_size(size) / size) * bound,
            share_of_noise(noise_multiplier, self.queries_per_step),
            coordinates,
        )

    def recall(self, query: Query, step: int, part: int) -> State:
        round_, inner = divmod(step, self.inner_steps) if self.fresh_batches else (step, part)
        offset = query.terms[-1].direction if inner else None
        if offset is not None:
            coordinates = self.coordinates(round_, len(offset))
            offset = offset if coordinates is None else offset[coordinates]
        return {"round": round_, "inner": inner, "offset": offset, "average": None}

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor | None, State]:
        point = flatten(params)
        size, inner = point.numel(), state["inner"]
        coordinates = self.coordinates(state["round"], size)
        here = point if coordinates is None else point[coordinates.to(point.device)]
        offset = torch.zeros_like(released.value) if inner == 0 else state["offset"]
        average = torch.zeros_like(offset) if inner == 0 else state["average"]
        offset = self._step(offset, released.value, here.to(offset.dtype), inner)
        distance = float(length(offset))  # the one look at the device
        self._check_finite(distance, inner)
        average = average + average_weight(inner + 1, self.inner_steps) * offset
        if inner + 1 == self.inner_steps:
            following = {"round": state["round"] + 1, "inner": 0, "offset": None, "average": None}
            return -_scattered(average, coordinates, size), following
        following = {
            **state,
            "inner": inner + 1,
            "offset": offset,
            "distance": distance,
            "average": average,
        }
        waits = torch.zeros(size, dtype=offset.dtype, device=offset.device)
        return (waits if self.fresh_batches else None), following

    def _step(self, offset: Tensor, slope: Tensor, here: Tensor, inner: int) -> Tensor:
        """Return v_(s+1), from v_s and G_s at the coordinates of x_t that are kept."""
        if self.weight_decay:  # the gradient of λ ‖x_t + v‖²/2: public, so added after the noise
            slope = slope + self.weight_decay * (here + offset)
        return inner_step(
            offset,
            slope,
            inner,
            strong_convexity=self.strong_convexity,
            hessian_lipschitz=self.hessian_lipschitz,
            max_step_size=self.max_step_size,
            bounds=None if self.box is None else (-self.box - here, self.box - here),
        )

    def _check_finite(self, distance: float, inner: int) -> None:
        if not math.isfinite(distance):
            raise RefusedRun(
                f"CubicNewton: inner step {inner} of {self.inner_steps} is no longer finite: the "
                f"steps 2 / ({self.strong_convexity} (s + 2)) are too long for the curvature. Set "
                "box, or max_step_size to 1 / (largest curvature), or a larger strong_convexity.",
                topic="diverged",
            )


def inner_step(
    offset: Tensor,
    slope: Tensor,
    step: int,
    *,
    strong_convexity: float,
    hessian_lipschitz: float,
    max_step_size: float | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    r"""Return v_(s+1) = Proj(v_s - η_s (slope + (M/2) ‖v_s‖ v_s)), η_s = 2 / (μ (s + 2)).

    One step of projected gradient descent on m(v) = g·v + v·Hv / 2 + (M/6) ‖v‖³, whose gradient is
    g + H v + (M/2) ‖v‖ v. Where m is μ-strongly convex, these steps and the average of the v_s
    with weights proportional to s (:func:`average_weight`) reach the minimum at the rate O(1/τ)
    even if the slopes are noisy (no logarithm, as 1/(μ s) with a plain average would have).

    Args:
        offset: v_s, how far the iterate is from the point of the model.
        slope: g + H v_s, or an estimate of it.
        step: s = 0, 1, ...
        strong_convexity: μ.
        hessian_lipschitz: M, as in the estimator.
        max_step_size: an upper bound on η_s; None for none.
        bounds: least and largest v, entry by entry; None projects nothing.

    Source: Algorithm 2 (GMSolver) of the paper that ``CubicNewton`` names.
    """
    size = 2 / (strong_convexity * (step + 2))
    size = size if max_step_size is None else min(size, max_step_size)
    cubic = (hessian_lipschitz / 2 * length(offset)).to(offset)  # no wait for the device
    moved = offset - size * (slope + cubic * offset)
    return moved if bounds is None else torch.clamp(moved, *bounds)


def average_weight(step: int, inner_steps: int) -> float:
    """Return 2 s / (τ (τ + 1)), the weight of θ_s in the average over s = 1..τ; they add up to 1."""
    return 2 * step / (inner_steps * (inner_steps + 1))


@lru_cache(maxsize=4)
def _mask(seed: int, round_: int, size: int, keep: int) -> Tensor:
    """Keep the set of a round, which several inner steps use."""
    return shared_mask(seed, round_, size, keep)


def _scattered(values: Tensor, coordinates: Tensor | None, size: int) -> Tensor:
    """Return a vector of ``size`` entries: the values at the coordinates, zeros elsewhere."""
    if coordinates is None:
        return values
    full = torch.zeros(size, dtype=values.dtype, device=values.device)
    full[coordinates.to(values.device)] = values
    return full
