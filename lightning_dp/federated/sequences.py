"""Sequences agreed on before the first round: gradients per round, and step sizes after t gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from lightning_dp._validate import between, normalise, not_negative, positive, whole, whole_from_0

__all__ = [
    "AbstractSampleSizes",
    "AbstractStepSizes",
    "ConstantSteps",
    "InverseRootSteps",
    "InverseSteps",
    "PolynomialSizes",
    "PowerSizes",
    "rounds_for",
]


class AbstractSampleSizes(ABC):
    """A sequence s_0, s_1, ... of whole numbers >= 1, agreed on before the first round."""

    @abstractmethod
    def __call__(self, i: int) -> int:
        """s_i."""


@dataclass(frozen=True)
class PolynomialSizes(AbstractSampleSizes):
    """s_i = ⌈a (i + first)^c + b⌉; a = 0 is a constant size b.

    van Dijk et al., Asynchronous Federated Learning with Reduced Number of Rounds and with
    Differential Privacy from Less Aggregated Gaussian Noise (2020), Section E.2.2, O(i) method.

    Args:
        a, b: at least 0; so large that s_0 >= 1.
        c: in [0, 1].
        first: what i = 0 stands for in the formula.

    Example:
        >>> [PolynomialSizes(a=1.322, b=16)(i) for i in range(4)]
        [16, 18, 19, 20]
    """

    a: float
    b: float = 0.0
    c: float = 1.0
    first: int = 0

    def __post_init__(self) -> None:
        normalise(self, not_negative, "a", "b", of="PolynomialSizes")
        normalise(self, whole_from_0, "first", of="PolynomialSizes")
        normalise(self, between("[0, 1]"), "c")
        _check_first(self)

    def __call__(self, i: int) -> int:
        power: float = float(i + self.first) ** self.c
        return math.ceil(self.a * power + self.b)


@dataclass(frozen=True)
class PowerSizes(AbstractSampleSizes):
    """s_i = ⌈N q (i + m)^p⌉: the sequences of the differentially private algorithm.

    van Dijk et al. (2020), Theorem 3.

    Args:
        num_records: N of the client.
        rate: q > 0.
        offset: m >= 0.
        power: p in [0, 1]; 0 is a constant size.

    Example:
        >>> sizes = PowerSizes(10_000, rate=1.3216327772100012e-4, offset=12.106237281566509)
        >>> sizes(0), sizes(182), sum(sizes(i) for i in range(183))
        (16, 257, 25027)
    """

    num_records: int
    rate: float
    offset: float = 0.0
    power: float = 1.0

    def __post_init__(self) -> None:
        normalise(self, whole, "num_records")
        normalise(self, positive, "rate")
        normalise(self, not_negative, "offset", of="PowerSizes")
        normalise(self, between("[0, 1]"), "power")
        _check_first(self)

    def __call__(self, i: int) -> int:
        size: float = self.num_records * self.rate * (i + self.offset) ** self.power
        return math.ceil(float(size) * (1 - 1e-12))  # 16.000000000000004 is 16


def rounds_for(sizes: Callable[[int], int], gradients: float) -> int:
    """Return the least T with s_0 + ... + s_(T-1) >= ``gradients``.

    Example:
        >>> rounds_for(PolynomialSizes(a=0, b=16), 25_000)
        1563
    """
    gradients = positive("gradients", gradients)
    total, i = 0, 0
    while total < gradients:
        total, i = total + sizes(i), i + 1
    return i


def _check_first(sizes: AbstractSampleSizes) -> None:
    if not sizes(0) >= 1:
        raise ValueError(f"{sizes} gives s_0 = {sizes(0)}: a round needs at least one gradient.")


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
