"""What a post-processor is: a function of released values, free of privacy cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from lightning_dp.estimators.base import State

__all__ = ["AbstractPostProcessor"]


class AbstractPostProcessor(ABC):
    """Maps the gradient estimate to another, after the noise: it costs no privacy.

    Implementations are frozen dataclasses; their state is passed in and returned.
    """

    @abstractmethod
    def init(self, params: Sequence[Tensor]) -> State:
        """The state before the first step; estimates hold one entry for each of the parameters'."""

    @abstractmethod
    def apply(self, state: State, estimate: Tensor) -> tuple[Tensor, State]:
        """The new flat estimate and the next state; neither argument is changed."""
