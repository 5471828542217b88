"""Noise chosen at run time, from what was released so far."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from lightning_dp.estimators.base import State
from lightning_dp.schedules.base import AbstractSchedule

__all__ = ["AbstractAdaptiveSchedule"]


class AbstractAdaptiveSchedule(AbstractSchedule):
    """A shape that may depend on released gradients. It never sees data.

    Calling it gives the shape that is expected; calibration plans with that. What is used at run
    time is :meth:`value`. The budget is guarded accordingly: full batches by μ-GDP, at no loss;
    Poisson batches by one Rényi order fixed before the start, at 6 to 7.5 % more noise; or, if
    :attr:`is_envelope`, by the expected shape as a plan fixed in advance, which ``value`` must not
    go below. Needs ``target_epsilon``, unless it is an envelope.

    Implementations are frozen dataclasses; the state is passed in and returned.
    """

    @property
    def is_envelope(self) -> bool:
        """Whether ``value`` promises never to be below the expected shape."""
        return False

    @abstractmethod
    def init(self) -> State:
        """The state before the first step."""

    @abstractmethod
    def value(self, state: State, step: int) -> float:
        """The shape of step t, positive and finite."""

    @abstractmethod
    def observe(self, state: State, released: Tensor) -> State:
        """The next state, after a noised mean gradient was released."""
