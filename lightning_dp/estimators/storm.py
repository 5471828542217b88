"""A recursive-momentum estimator: differences that forget, without restarts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_dp._validate import between, normalise, positive
from lightning_dp.boundary import Query, Release, State, Term
from lightning_dp.estimators.base import AbstractEstimator, Traits, distance
from lightning_dp.functional import flatten

__all__ = ["Storm"]


@dataclass(frozen=True)
class Storm(AbstractEstimator):
    r"""v_t = (1 - a) v_(t-1) + (Σ_i clip_C(g_i(x_t) - (1 - a) g_i(x_(t-1))) + noise) / B,

    C = a C1 + (1 - a) C2 ‖x_t - x_(t-1)‖, both gradients of the same records. The first step is
    DP-SGD's with clip norm C1. a = 1 is DP-SGD at every step; small a are differences whose noise
    is forgotten after about 1/a steps instead of at a restart.

    The combination of Cutkosky and Orabona (STORM, 2019, arXiv:1905.10018, equation 2), clipped
    and noised. C depends on released values only, so each step is one (subsampled) Gaussian.

    Args:
        momentum: a in (0, 1].
        max_grad_norm: C1 > 0, the clip norm of a gradient.
        diff_norm: C2 > 0, the clip norm of a difference over the distance of its points.

    Raises:
        ValueError: naming the argument that is out of its range.

    Example:
        >>> storm = Storm(momentum=0.1, max_grad_norm=1.0, diff_norm=2.0)
        >>> state = storm.init([])
        >>> storm.ask(state, [], step=0, noise_multiplier=1.0).clip_norm
        1.0
    """

    momentum: float
    max_grad_norm: float = 1.0
    diff_norm: float = 1.0

    def __post_init__(self) -> None:
        normalise(self, between("(0, 1]"), "momentum", of="Storm")
        normalise(self, positive, "max_grad_norm", "diff_norm")

    @property
    def traits(self) -> Traits:
        return Traits(longest_silence=0, is_entrywise=True)

    def memory(self, step: int) -> float:
        return 1 - self.momentum

    def init(self, params: Sequence[Tensor]) -> State:
        return {"estimate": None, "point": None}

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query:
        keep = 1 - self.momentum
        if state["estimate"] is None or keep == 0:
            return Query((Term(),), self.max_grad_norm, noise_multiplier)
        # g(x_t) - (1 - a) g(x_(t-1)) = a g(x_t) + (1 - a) (g(x_t) - g(x_(t-1))): a gradient and a
        # difference, each with its bound; the sum of both bounds is the clip norm.
        radius = self.diff_norm * distance(params, state["point"])
        clip_norm = self.momentum * self.max_grad_norm + keep * radius
        return Query((Term(), Term(-keep, state["point"])), clip_norm, noise_multiplier)

    def recall(self, query: Query, step: int, part: int) -> State:
        before = query.terms[-1].point if step else None
        return {"estimate": before, "point": before}

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor, State]:
        estimate = released.value
        if state["estimate"] is not None:
            estimate = (1 - self.momentum) * state["estimate"] + estimate
        return estimate, {"estimate": estimate, "point": flatten(params)}
