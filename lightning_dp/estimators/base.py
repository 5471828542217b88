"""What an estimator is: it asks, and turns the noised answer into a gradient estimate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from lightning_dp.query import Query, Release

__all__ = ["AbstractEstimator", "State"]

# Tensors, numbers, strings, and lists and dicts of them: it goes into checkpoints.
State: TypeAlias = dict[str, Any]


class AbstractEstimator(ABC):
    """Public in, public out: an estimator never sees data, so it cannot break the guarantee.

    Implementations are frozen dataclasses that hold configuration. The state is made by
    :meth:`init`, handed to each call, and returned by :meth:`tell`; the mechanism saves it.

    An estimator whose steps are not all alike says so in advance, as functions of the step: the
    noise is planned, and the batches are drawn, by :meth:`relative_noise` and
    :meth:`relative_rate`, which repeat after :attr:`period` steps.
    """

    @property
    def period(self) -> int:
        """The number of steps after which the kinds of steps repeat."""
        return 1

    def relative_noise(self, step: int) -> float:
        """What multiplies the noise schedule's multiplier at step t; > 0."""
        return 1.0

    def relative_rate(self, step: int) -> float:
        """What multiplies the sampling rate at step t (the product is at most 1); >= 1."""
        return 1.0

    @abstractmethod
    def init(self, params: Sequence[Tensor]) -> State:
        """The state before the first step. ``params``: the trainable parameters."""

    @abstractmethod
    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query | None:
        """The query of step t, with at least the planned ``noise_multiplier``.

        None asks nothing: nothing is charged, and :meth:`tell` is given zeros without noise.
        """

    @abstractmethod
    def tell(
        self, state: State, params: Sequence[Tensor], step: int, released: Release
    ) -> tuple[Tensor, State]:
        """The gradient estimate and the next state.

        Args:
            released: the noised sum divided by the expected batch size, flat of length d, with
                the standard deviation of the noise in it.

        Returns:
            a flat vector of length d that the optimizer uses as the gradient, and the new state
            (``state`` itself is not changed).
        """
