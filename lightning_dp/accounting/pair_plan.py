"""Plans as arrays: what 100,000 steps are, without making 100,000 events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from lightning_dp.accounting.base import FloatArray, Steps, merge_arrays
from lightning_dp.accounting.events import AbstractEvent

__all__ = ["AbstractPairPlan", "EventPlan", "PlannedSteps"]


class AbstractPairPlan(ABC):
    """A function from the step 0, 1, ... to its event that also tells many steps at once."""

    @abstractmethod
    def __call__(self, step: int) -> AbstractEvent:
        """The event of a step."""

    @abstractmethod
    def pairs(self, first: int, last: int) -> tuple[FloatArray, FloatArray]:
        """(z, q) of the steps ``first <= t < last``, those of their events."""


EventPlan = AbstractPairPlan | Callable[[int], AbstractEvent] | AbstractEvent


class PlannedSteps:
    """The first steps of a plan, remembered as far as they were asked for.

    Args:
        plan: one event for all steps, or a function from the step to its event.
    """

    def __init__(self, plan: EventPlan) -> None:
        self._plan = plan
        self._noise = np.zeros(0)
        self._rates = np.zeros(0)

    def first(self, n: int) -> Steps:
        """The first ``n`` steps, merged."""
        if isinstance(self._plan, AbstractEvent):
            z, q = self._plan.pair
            return merge_arrays(np.array([z]), np.array([q]), np.array([float(n)]))
        known = self._noise.size
        if n > known:
            noise, rates = pairs_of(self._plan, known, n)
            self._noise = np.append(self._noise, noise)
            self._rates = np.append(self._rates, rates)
        return merge_arrays(self._noise[:n], self._rates[:n])


def pairs_of(
    plan: AbstractPairPlan | Callable[[int], AbstractEvent], first: int, last: int
) -> tuple[FloatArray, FloatArray]:
    """(z, q) of the steps ``first <= t < last`` of a plan."""
    if isinstance(plan, AbstractPairPlan):
        return plan.pairs(first, last)
    pairs = np.array([plan(step).pair for step in range(first, last)], dtype=float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
