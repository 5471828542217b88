"""Sequences agreed on before the first round: gradients per round, and step sizes after t gradients."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_dp._validate import between, normalise, not_negative, positive, whole, whole_from_0

__all__ = [
    "AbstractSampleSizes",
    "AbstractStepSizes",
    "ConstantSteps",
    "DelaySizes",
    "InverseRootSteps",
    "InverseSteps",
    "LogarithmicSizes",
    "PolynomialSizes",
    "PowerSizes",
    "delay_is_permissible",
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
class LogarithmicSizes(AbstractSampleSizes):
    """s_i = ⌈a j / ln j + b⌉, j = i + first.

    van Dijk et al. (2020), Section E.2.2, O(i / ln i) method. Below j = 3 the formula is not
    increasing, so ``first`` is at least 3.

    Args:
        a, b: at least 0; so large that s_0 >= 1.

    Example:
        >>> [LogarithmicSizes(a=50)(i) for i in range(3)]
        [137, 145, 156]
    """

    a: float
    b: float = 0.0
    first: int = 3

    def __post_init__(self) -> None:
        normalise(self, not_negative, "a", "b", of="LogarithmicSizes")
        normalise(self, whole_from_0, "first", of="LogarithmicSizes")
        if not self.first >= 3:
            raise ValueError(f"first={self.first} must be at least 3: i / ln i falls before that.")
        _check_first(self)

    def __call__(self, i: int) -> int:
        j = i + self.first
        return math.ceil(self.a * j / math.log(j) + self.b)


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


def _slow_logarithm(x: float) -> float:
    """Return γ(x) = 4 ln x, for which the convergence rate of strongly convex problems holds."""
    return 4 * math.log(x)


@dataclass(frozen=True)
class DelaySizes(AbstractSampleSizes):
    """The largest sizes for which a permissible delay τ is kept.

    For τ(x) = M1 + ((x + M0) / γ(x + M0))^(1/g) and a lag of at most d rounds,

        s_i = ⌈S((m + i + 1) / (d + 1)) / (d + 1)⌉,  S(x) = ((x / ω(x)) (g - 1) / g)^(1/(g - 1)),
        ω(x) = γ((x (g - 1) / g)^(g/(g - 1))),

    with M0 = ((m + 1) (g - 1) / g)^(g/(g - 1)) and M1 = max(d + 1, s_0 / 2, ``least_delay``), keeps
    τ(s_0 + ... + s_i) >= s_(i-d) + ... + s_i: :func:`delay_is_permissible`.

    van Dijk et al. (2020), Lemmas B.3 and C.2.2.

    Args:
        lag: d >= 1.
        offset: m >= 0, so large that γ is positive from (m + 1) / (d + 1) on.
        exponent: g > 1; 2 for strongly convex problems.
        slow: γ, a slowly increasing function; 4 ln x by default.
        least_delay: what τ may be in any case: 2 L α / μ for a loss with these constants.

    Example:
        >>> sizes = DelaySizes(lag=1, offset=2 * 2 * 1450)
        >>> sizes(0), sizes(1000), delay_is_permissible(sizes, sizes.delay, lag=1, rounds=500)
        (13, 15, True)
    """

    lag: int
    offset: float
    exponent: float = 2.0
    slow: Callable[[float], float] = field(default=_slow_logarithm, repr=False, compare=False)
    least_delay: float = 0.0

    def __post_init__(self) -> None:
        normalise(self, whole, "lag")
        normalise(self, between("(1, inf)"), "exponent")
        normalise(self, not_negative, "offset", "least_delay", of="DelaySizes")
        x = (self.offset + 1) / (self.lag + 1)
        if not self.slow(self._power(x)) > 0:
            raise ValueError(
                f"offset={self.offset} is too small: γ must be positive at (offset + 1) / (lag + 1)."
            )
        _check_first(self)

    def _power(self, x: float) -> float:
        g = self.exponent
        return float((x * (g - 1) / g) ** (g / (g - 1)))

    def __call__(self, i: int) -> int:
        g, d = self.exponent, self.lag
        x = (self.offset + i + 1) / (d + 1)
        size: float = (x / self.slow(self._power(x)) * (g - 1) / g) ** (1 / (g - 1))
        return math.ceil(size / (d + 1))

    def delay(self, x: float) -> float:
        """τ(x), in gradients, after x gradients."""
        shifted = x + self._power(self.offset + 1)
        least = max(self.lag + 1, self(0) / 2, self.least_delay)
        return float(least + (shifted / self.slow(shifted)) ** (1 / self.exponent))


def delay_is_permissible(
    sizes: Callable[[int], int], delay: Callable[[float], float], *, lag: int, rounds: int
) -> bool:
    """Tell whether τ(s_0 + ... + s_i) >= s_(i-d) + ... + s_i in every round i < ``rounds``.

    What is on the right is at most the number of gradients that a model used in round i may lack;
    on the left is how many it may lack for the convergence rate to hold.

    Args:
        sizes: s_i, over all clients together.
        delay: τ, increasing.
        lag: d, in rounds.
        rounds: how many rounds to look at.

    Raises:
        ValueError: if ``lag`` is negative or ``rounds`` is below 1.

    Example:
        >>> import math
        >>> delay_is_permissible(lambda i: 10, lambda x: math.sqrt(x), lag=1, rounds=100)
        False
    """
    lag, rounds = whole("lag", lag, 0), whole("rounds", rounds)
    values = [sizes(i) for i in range(rounds)]
    sums = list(itertools.accumulate(values))
    return all(delay(sums[i]) >= sum(values[max(0, i - lag) : i + 1]) for i in range(rounds))


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
