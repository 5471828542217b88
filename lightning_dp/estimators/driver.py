"""The driver, the only caller of an estimator's ask and tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_dp._refusals import RefusedRun
from lightning_dp.boundary import Query, Release, State
from lightning_dp.estimators.base import AbstractEstimator

__all__ = ["Driver"]


def _alone(query: Query | None) -> Query | None:
    return query


@dataclass(frozen=True)
class Driver:
    """An estimator, its state, and how far it is.

    It sees queries and releases only, and never changes: :meth:`tell` returns the driver to go on
    with. A step that breaks off is begun again from the driver that it began with.

    Args:
        estimator: asks, and is told.
        state: the estimator's.
        step: t of the step that is next, or that was begun.
        part: queries of this step that were answered.

    Example:
        >>> import torch
        >>> from lightning_dp.estimators import MeanGradient
        >>> params = [torch.zeros(2)]
        >>> driver = Driver.begin(MeanGradient(), params)
        >>> driver.ask(params, noise_multiplier=1.0).clip_norm
        1.0
        >>> estimate, driver = driver.tell(params, Release(torch.tensor([1.0, 2.0]), 1.0))
        >>> estimate.tolist(), driver.step
        ([1.0, 2.0], 1)
    """

    estimator: AbstractEstimator
    state: State = field(repr=False)
    step: int = 0
    part: int = 0

    @classmethod
    def begin(cls, estimator: AbstractEstimator, params: Sequence[Tensor]) -> Driver:
        """Return the driver before the first step."""
        return cls(estimator, estimator.init(params))

    def ask(
        self,
        params: Sequence[Tensor],
        noise_multiplier: float,
        agree: Callable[[Query | None], Query | None] = _alone,
    ) -> Query | None:
        """Return the next query; None, at the first part of a step only, if nothing is asked.

        Args:
            params: the trainable parameters.
            noise_multiplier: z that the step was planned with, or charged with.
            agree: makes the query the same on all processes of a job.

        Raises:
            RuntimeError: if a step that has begun has neither a further query nor an estimate.
        """
        if self.part and not self.part < (queries := self.estimator.traits.queries_per_step):
            raise RefusedRun(
                f"{self.estimator} made no estimate after {self.part} queries at step {self.step}, but "
                f"declares queries_per_step={queries}.",
                topic="out-of-order",
            )
        query = agree(self.estimator.ask(self.state, params, self.step, noise_multiplier))
        if query is None and self.part:
            raise RefusedRun(
                f"{self.estimator} asks nothing at step {self.step}, and has no estimate.",
                topic="out-of-order",
            )
        return query

    def tell(self, params: Sequence[Tensor], released: Release) -> tuple[Tensor | None, Driver]:
        """Hand over the noised mean.

        Returns:
            the gradient estimate, or None if a further query is to be asked on the same batch; and
            the driver to go on with.
        """
        estimate, state = self.estimator.tell(self.state, params, self.step, released)
        step, part = (self.step, self.part + 1) if estimate is None else (self.step + 1, 0)
        return estimate, Driver(self.estimator, state, step, part)
