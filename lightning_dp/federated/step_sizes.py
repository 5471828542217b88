"""Step sizes after t gradients, and the one step size of a round that follows from them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning_dp._validate import normalise, not_negative, positive

__all__ = ["AbstractStepSizes", "ConstantSteps", "InverseRootSteps", "InverseSteps"]


class AbstractStepSizes(ABC):
    """η_t, a function of the number t of gradients before; the step size of round i is
    η̄_i = η_t at t = s_0 + ... + s_(i-1)."""

    @abstractmethod
    def __call__(self, t: float) -> float:
        """η_t."""


@dataclass(frozen=True)
class _AbstractFallingSteps(AbstractStepSizes):
    """η0 over something that grows with β >= 0.

    Raises:
        ValueError: for ``eta0`` that is not finite and above 0, or ``beta`` that is not at least 0.
    """

    eta0: float
    beta: float

    def __post_init__(self) -> None:
        normalise(self, positive, "eta0")
        normalise(self, not_negative, "beta")


@dataclass(frozen=True)
class ConstantSteps(AbstractStepSizes):
    """η_t = η0.

    Example:
        >>> ConstantSteps(0.0025)(1000)
        0.0025
    """

    eta0: float

    def __post_init__(self) -> None:
        normalise(self, positive, "eta0")

    def __call__(self, t: float) -> float:
        return self.eta0


@dataclass(frozen=True)
class InverseSteps(_AbstractFallingSteps):
    """η_t = η0 / (1 + β t), for strongly convex problems.

    Example:
        >>> InverseSteps(0.1, beta=0.001)(1000)
        0.05
    """

    def __call__(self, t: float) -> float:
        return self.eta0 / (1 + self.beta * t)


@dataclass(frozen=True)
class InverseRootSteps(_AbstractFallingSteps):
    """η_t = η0 / (1 + β √t), for other problems.

    Example:
        >>> InverseRootSteps(0.1, beta=0.01)(10_000)
        0.05
    """

    def __call__(self, t: float) -> float:
        return self.eta0 / (1 + self.beta * math.sqrt(t))
