"""DP-SGD's estimator: the mean of the clipped gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_dp._validate import above_0, normalise
from lightning_dp.boundary import Query, Release, State, Term
from lightning_dp.estimators.base import AbstractEstimator, Traits

__all__ = ["MeanGradient"]


@dataclass(frozen=True)
class MeanGradient(AbstractEstimator):
    r"""(Σ_i clip_C(g_i(x_t)) + N(0, z²C² I)) / B, B the expected batch size.

    The gradient estimate of DP-SGD (Abadi et al. 2016, arXiv:1607.00133, Algorithm 1), with the
    expected instead of the realised batch size.

    Args:
        max_grad_norm: C > 0, the clip norm of one record's gradient. Infinite only together with
            ``noise_multiplier=0``.

    Raises:
        ValueError: if ``max_grad_norm`` is not greater than 0.

    Example:
        >>> query = MeanGradient(max_grad_norm=0.5).ask({}, [], step=0, noise_multiplier=1.0)
        >>> query.clip_norm, query.noise_multiplier
        (0.5, 1.0)
    """

    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        normalise(self, above_0, "max_grad_norm")

    @property
    def traits(self) -> Traits:
        return Traits(longest_silence=0, clip_norms=(self.max_grad_norm,))

    def init(self, params: Sequence[Tensor]) -> State:
        return {}

    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query:
        return Query((Term(),), self.max_grad_norm, noise_multiplier)

    def recall(self, query: Query, step: int, part: int) -> State:
        return {}

    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor, State]:
        return released.value, state
