"""Noise schedules: shapes of the noise over steps, as pure functions of the step.

Those of "On Dynamic Noise Influence in Differential Private Learning" (anonymous submission) are
:class:`DynamicGD`, :class:`DynamicMomentum` and :class:`FromInfluence`. A schedule that depends on
released gradients derives from :class:`AbstractAdaptiveSchedule`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from torch import Tensor

from lightning_dp._validate import between, finite, normalise, number, positive, shown, whole
from lightning_dp.boundary import State

__all__ = [
    "AbstractAdaptiveSchedule",
    "AbstractSchedule",
    "Constant",
    "Cosine",
    "DynamicGD",
    "DynamicMomentum",
    "Exponential",
    "FromInfluence",
    "Polynomial",
    "StepDecay",
]

# When the noise of a step is chosen: before the first step; from what was released, but never below
# a plan made before the first step; or from what was released, without such a plan.
Choice: TypeAlias = Literal["in advance", "above a plan", "at run time"]


class AbstractSchedule(ABC):
    """A shape s(t) > 0: the noise multiplier of step t is ``scale * s(t)``, t = 0, 1, ...

    The scale is ``noise_multiplier`` when it is given, and found by calibration to
    ``target_epsilon`` when it is not. A schedule never sees data and holds no state, so a resumed
    run continues where it was, and the whole plan is known before the first step.
    """

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return s(t) of step t >= 0."""

    @property
    def chosen(self) -> Choice:
        """The time at which the noise is chosen; "in advance", except for adaptive schedules."""
        return "in advance"

    @property
    def is_constant(self) -> bool:
        """True if s(t) is the same at all steps."""
        return False

    def init(self) -> State:
        """Return the state before the first step."""
        return {}

    def now(self, state: State, step: int) -> float:
        """Return the shape that step t uses; s(t), except for adaptive schedules."""
        return self(step)

    def observe(self, state: State, released: Tensor) -> State:
        """Return the next state, after a noised mean gradient was released."""
        return state


class AbstractAdaptiveSchedule(AbstractSchedule):
    """A shape that may depend on released gradients. It never sees data.

    Calling it gives the shape that is expected; calibration plans with that. What is used at run
    time is :meth:`now`. The budget is guarded accordingly: full batches by μ-GDP, at no loss;
    Poisson batches by one Rényi order fixed before the start, at 6 to 7.5 % more noise; or, if
    :attr:`is_envelope`, by the expected shape as a plan fixed in advance, which ``now`` must not
    go below. Needs ``target_epsilon``, unless it is an envelope.

    Implementations are frozen dataclasses; the state is passed in and returned.
    """

    @property
    def is_envelope(self) -> bool:
        """True if ``now`` promises never to be below the expected shape."""
        return False

    @property
    def chosen(self) -> Choice:
        return "above a plan" if self.is_envelope else "at run time"

    @abstractmethod
    def init(self) -> State: ...

    @abstractmethod
    def now(self, state: State, step: int) -> float:
        """Return the shape of step t, positive and finite."""

    @abstractmethod
    def observe(self, state: State, released: Tensor) -> State: ...


@dataclass(frozen=True)
class Constant(AbstractSchedule):
    """s(t) = 1.

    Example:
        >>> Constant()(0), Constant()(999)
        (1.0, 1.0)
    """

    @property
    def is_constant(self) -> bool:
        return type(self) is Constant  # a subclass may be anything

    def __call__(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Exponential(AbstractSchedule):
    """s(t) = exp(-rate · t): exponential decay, σ_t = σ_0 e^(-kt).

    Args:
        rate: k per step; positive decays, negative grows. ``math.log(4) / steps`` ends at a
            quarter of the first step's noise.

    Example:
        >>> round(Exponential(rate=0.01)(100), 4)
        0.3679
    """

    rate: float

    def __post_init__(self) -> None:
        normalise(self, finite, "rate", of="Exponential")

    def __call__(self, step: int) -> float:
        return math.exp(-self.rate * step)


@dataclass(frozen=True)
class StepDecay(AbstractSchedule):
    """s(t) = factor^⌊t / every⌋.

    Args:
        every: steps between two changes, at least 1.
        factor: what the noise is multiplied by, greater than 0.

    Example:
        >>> [StepDecay(every=10, factor=0.5)(t) for t in (0, 9, 10, 25)]
        [1.0, 1.0, 0.5, 0.25]
    """

    every: int
    factor: float

    def __post_init__(self) -> None:
        normalise(self, whole, "every", of="StepDecay")
        normalise(self, positive, "factor", of="StepDecay")

    def __call__(self, step: int) -> float:
        return float(self.factor ** (step // self.every))


@dataclass(frozen=True)
class Polynomial(AbstractSchedule):
    """s(t) = end + (1 - end) (1 - t / steps)^power for t < steps; ``end`` from there on.

    Args:
        steps: T >= 1, after which the noise stays at ``end`` times the first step's.
        end: greater than 0; below 1 decays, above 1 grows.
        power: greater than 0; 1 is a straight line, larger decays earlier.

    Example:
        >>> schedule = Polynomial(steps=10, end=0.5, power=2)
        >>> [schedule(t) for t in (0, 5, 10, 1000)]
        [1.0, 0.625, 0.5, 0.5]
    """

    steps: int
    end: float
    power: float = 1.0

    def __post_init__(self) -> None:
        normalise(self, whole, "steps", of="Polynomial")
        normalise(self, positive, "end", "power", of="Polynomial")

    def __call__(self, step: int) -> float:
        remaining = max(0.0, 1 - step / self.steps)
        return float(self.end + (1 - self.end) * remaining**self.power)


@dataclass(frozen=True)
class Cosine(AbstractSchedule):
    """s(t) = end + (1 - end) (1 + cos(π t / steps)) / 2 for t < steps; ``end`` from there on.

    Args:
        steps: T >= 1, after which the noise stays at ``end`` times the first step's.
        end: greater than 0; below 1 decays, above 1 grows.

    Example:
        >>> schedule = Cosine(steps=10, end=0.5)
        >>> [round(schedule(t), 4) for t in (0, 5, 10, 1000)]
        [1.0, 0.75, 0.5, 0.5]
    """

    steps: int
    end: float

    def __post_init__(self) -> None:
        normalise(self, whole, "steps", of="Cosine")
        normalise(self, positive, "end", of="Cosine")

    def __call__(self, step: int) -> float:
        angle = math.pi * min(1.0, step / self.steps)
        return float(self.end + (1 - self.end) * (1 + math.cos(angle)) / 2)


@dataclass(frozen=True)
class FromInfluence(AbstractSchedule):
    r"""s(t) = (q_t / q_0)^(-1/4): minimises Σ q_t σ_t² at equal Σ 1/σ_t².

    "On Dynamic Noise Influence in Differential Private Learning" (anonymous submission),
    Lemma 4.1: the minimum of :math:`\sum_t q_t \sigma_t^2` under :math:`\sum_t 1/\sigma_t^2 = R` is
    (Σ √q_t)² / R, at :math:`\sigma_t^2 = \frac{1}{R} \sum_i \sqrt{q_i / q_t}`. The gain over constant
    noise is :math:`T^2 \mathrm{Var}(\sqrt{q_t}) / R`.

    Args:
        influence: q_0, ..., q_(T-1), each finite and greater than 0: how much the variance of step
            t's noise adds to the final loss; only ratios matter. **Taken from private data, it is a
            query to them that no ε covers**: use public data, theory, or an earlier release.

    Example:
        >>> [FromInfluence((1.0, 16.0))(t) for t in (0, 1)]    # noise is halved where it hurts most
        [1.0, 0.5]
    """

    influence: tuple[float, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.influence, tuple):
            raise ValueError(
                f"FromInfluence(influence={type(self.influence).__name__}) must be a tuple of "
                "numbers: FromInfluence(tuple(values))."
            )
        if not self.influence:
            raise ValueError("FromInfluence(influence=()) must hold one value for each step.")
        checked = tuple(
            positive(f"influence[{step}]", value, of="FromInfluence")
            for step, value in enumerate(self.influence)
        )
        object.__setattr__(self, "influence", checked)

    def __call__(self, step: int) -> float:
        if not 0 <= step < len(self.influence):
            raise ValueError(
                f"FromInfluence has {len(self.influence)} values and none for step {step}: give one "
                "for each step of the run."
            )
        # Lagrange: q_t = λ / σ_t⁴ at the minimum. In logarithms, no power of a q_t can overflow.
        return math.exp((math.log(self.influence[0]) - math.log(self.influence[step])) / 4)


@dataclass(frozen=True)
class DynamicGD(AbstractSchedule):
    r"""s(t) = γ^(t/4) with γ = 1 - 1/κ: minimises the utility bound of private gradient descent.

    "On Dynamic Noise Influence in Differential Private Learning" (anonymous submission),
    Theorem 4.3: for an M-smooth loss with PL constant μ, κ = M/μ, and learning rate 1/M, the noise
    of step t has influence :math:`q_t \propto \gamma^{T-t}` on the final loss, and the best
    :math:`\sigma_t^2 \propto \gamma^{t/2}` at equal :math:`\sum_t 1/\sigma_t^2`. That is
    ``Exponential(rate=-log(γ) / 4)``; it does not depend on the number of steps. For minibatches
    the influence is the same (Theorem 4.7).

    Args:
        kappa: κ > 1, the condition number. At κ = 1 only the last step's noise counts, and no
            positive schedule is best. An estimate of κ from private data is not covered by any ε.

    Example:
        >>> round(DynamicGD(kappa=10.0)(4), 10)     # γ = 0.9
        0.9
        >>> DynamicGD.recommended_steps(kappa=10.0, alpha=0.01)
        48
    """

    kappa: float

    def __post_init__(self) -> None:
        normalise(self, condition_number, "kappa", of="DynamicGD")

    def __call__(self, step: int) -> float:
        # FromInfluence's (q_t / q_0)^(-1/4) for q_t ∝ γ^(-t); log1p keeps γ's digits for a large κ.
        return math.exp(step / 4 * math.log1p(-1 / self.kappa))

    @staticmethod
    def recommended_steps(kappa: float, alpha: float) -> int:
        """Return T = ⌈2κ ln(1 + 1/(κα))⌉, Theorem 4.3.

        The proof's minimiser (its Eq. 26) is ⌈2 ln(1 + (1 - √γ)²/α) / ln(1/γ)⌉, which is smaller
        by about 2κ ln(4κ): the theorem puts 1/κ in the place of (1 - √γ)².

        Args:
            kappa: κ > 1.
            alpha: α = d G² / (2 R M N² (f(θ_1) - f(θ*))) > 0 (Eq. 2), for d parameters, clip norm
                G, N records and Σ_t 1/σ_t² = R.
        """
        kappa = condition_number("kappa", kappa, of="DynamicGD.recommended_steps")
        alpha = positive("alpha", alpha, of="DynamicGD.recommended_steps")
        return _whole_steps(2 * kappa * math.log1p(1 / kappa / alpha))


@dataclass(frozen=True)
class DynamicMomentum(AbstractSchedule):
    r"""s(t) = γ^(-t/4) if T <= T̂, else γ^(t/4), with γ = 1 - η0/κ: for momentum.

    "On Dynamic Noise Influence in Differential Private Learning" (anonymous submission),
    Theorem 4.6, for the bias-corrected average
    :class:`~lightning_dp.postprocessing.Momentum` with weight β and learning rate η0 / (2M): the
    influence of step t = 1..T is :math:`q_t = c_1 \gamma^{T+t}` in a run of T <= T̂ steps and
    :math:`q_t = c_2 \gamma^{\hat T-1} \gamma^{T-t}` in a longer one, where

        T̂ = max{t : γ^(t-1) >= (1-β) / (1-β^t)}.

    A short run is still averaging over all gradients, so the best noise *grows*; a long one is like
    plain gradient descent and it decays. One case applies to the whole run, so the constants
    c1, c2 cancel. The theorem asks for η0 <= 8 / (1 + √(1 + 64βγ(γ-β)^-2(1-β)^-3)), which
    is not checked. For β = 0 and T >= 2 it is ``DynamicGD(kappa / eta0)``.

    The shape depends on T only through the case; beyond ``steps`` it goes on by the same formula.

    Args:
        kappa: κ > 1, the condition number. An estimate from private data is not covered by any ε.
        eta0: η0 in (0, κ).
        beta: β in [0, γ), the weight of the past.
        steps: T >= 1, the length of the run.

    Example:
        >>> DynamicMomentum(kappa=100.0, eta0=1.0, beta=0.9, steps=500).turning_step
        230
        >>> short = DynamicMomentum(kappa=100.0, eta0=1.0, beta=0.9, steps=200)
        >>> long = DynamicMomentum(kappa=100.0, eta0=1.0, beta=0.9, steps=500)
        >>> round(short(40), 4), round(long(40), 4)
        (1.1057, 0.9044)
    """

    kappa: float
    eta0: float
    beta: float
    steps: int

    def __post_init__(self) -> None:
        normalise(self, condition_number, "kappa", of="DynamicMomentum")
        normalise(self, number, "eta0", of="DynamicMomentum")
        if not 0 < self.eta0 < self.kappa:
            raise ValueError(
                f"DynamicMomentum(eta0={self.eta0}) must be above 0 and below kappa={self.kappa}."
            )
        normalise(self, between("[0, 1)"), "beta", of="DynamicMomentum")
        if not self.beta < 1 - self.eta0 / self.kappa:
            raise ValueError(
                f"DynamicMomentum(beta={self.beta}) must be below gamma = 1 - eta0/kappa = "
                f"{1 - self.eta0 / self.kappa:.6g} (Theorem 4.6)."
            )
        normalise(self, whole, "steps", of="DynamicMomentum")

    @property
    def turning_step(self) -> int:
        """T̂, up to which the noise of a run grows."""
        return _turning_step(self.kappa, self.eta0, self.beta)

    def __call__(self, step: int) -> float:
        sign = -1 if self.steps <= self.turning_step else 1
        return math.exp(sign * step / 4 * math.log1p(-self.eta0 / self.kappa))

    @staticmethod
    def recommended_steps(kappa: float, eta0: float, alpha: float) -> int:
        """Return T = ⌈(2κ/η0) ln(1 + η0/(κα))⌉, Theorem 4.6 (there up to a constant factor).

        ``alpha`` is that of :meth:`DynamicGD.recommended_steps`.
        """
        kappa = condition_number("kappa", kappa, of="DynamicMomentum.recommended_steps")
        eta0 = positive("eta0", eta0, of="DynamicMomentum.recommended_steps")
        alpha = positive("alpha", alpha, of="DynamicMomentum.recommended_steps")
        return _whole_steps(2 * kappa / eta0 * math.log1p(eta0 / kappa / alpha))


@lru_cache(maxsize=16)
def _turning_step(kappa: float, eta0: float, beta: float) -> int:
    """Find T̂ by bisection, once: the schedule asks for it at every step."""

    def is_averaging(t: int) -> bool:
        """Return whether γ^(t-1) >= (1-β) / (1-β^t), in logarithms."""
        excess = math.log1p(-(beta**t)) - math.log1p(-beta)
        return (t - 1) * math.log1p(-eta0 / kappa) + excess >= 0

    # Lemma B.7: γ^(t-1) (1-β^t) rises and then falls, and is 1-β at t = 1. So the inequality holds up
    # to T̂ and never again: double t until it fails, then halve the gap.
    high = 2
    while is_averaging(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_averaging(middle) else (low, middle)
    return low


def condition_number(name: str, value: object, *, of: str | None = None) -> float:
    """Return a finite number greater than 1: at κ = 1, all noise but the last step's is free."""
    result = number(name, value, of=of)
    if not 1 < result < math.inf:
        raise ValueError(
            f"{shown(name, value, of)} must be finite and greater than 1: it is M / mu, smoothness "
            "over the PL constant."
        )
    return result


def _whole_steps(number: float) -> int:
    """Return a number of steps, or refuse one that no run could make."""
    if not number <= 1e18:
        raise ValueError(
            f"{number:g} steps are more than can be made: lower kappa, or raise alpha or eta0."
        )
    return math.ceil(number)
