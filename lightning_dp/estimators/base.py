"""What an estimator is: it asks, and turns the noised answer into a gradient estimate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from lightning_dp.query import Query

__all__ = ["AbstractEstimator", "State"]

# Tensors, numbers, strings, and lists and dicts of them: it goes into checkpoints.
State: TypeAlias = dict[str, Any]


class AbstractEstimator(ABC):
    """Public in, public out: an estimator never sees data, so it cannot break the guarantee.

    Implementations are frozen dataclasses that hold configuration. The state is made by
    :meth:`init`, handed to each call, and returned by :meth:`tell`; the mechanism saves it.
    """

    @abstractmethod
    def init(self, params: Sequence[Tensor]) -> State:
        """The state before the first step. ``params``: the trainable parameters."""

    @abstractmethod
    def ask(
        self, state: State, params: Sequence[Tensor], step: int, noise_multiplier: float
    ) -> Query:
        """The query of step t, with at least the planned ``noise_multiplier``."""

    @abstractmethod
    def tell(
        self, state: State, params: Sequence[Tensor], released: Tensor
    ) -> tuple[Tensor, State]:
        """The gradient estimate and the next state.

        Args:
            released: the noised sum divided by the expected batch size, flat of length d.

        Returns:
            a flat vector of length d that the optimizer uses as the gradient, and the new state
            (``state`` itself is not changed).
        """
