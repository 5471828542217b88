"""Post-processors: changes to the gradient estimate after the noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from lightning_dp._validate import between, flag, normalise, not_negative
from lightning_dp.boundary import State
from lightning_dp.estimators.base import AbstractEstimator
from lightning_dp.functional import laplacian_smoothing, number_of_entries

__all__ = ["AbstractPostProcessor", "LaplacianSmoothing", "Momentum"]


class AbstractPostProcessor(ABC):
    """Maps the gradient estimate to another, after the noise: it costs no privacy.

    Implementations are frozen dataclasses; their state is passed in and returned.
    """

    is_entrywise: ClassVar[bool] = False
    """Each entry of the result is made from that entry of the estimates alone.

    Then it works on sharded parameters, of which each process has some entries.
    """

    def filter(self, step: int, size: int) -> tuple[float, float] | None:
        """Return (a, b) of step t: the result is a times the one before, plus b times the estimate.

        Where entries are mixed, b² is what is left of the variance of independent noise in them. None
        where it is made otherwise, and the noise in it is not known in advance.

        Args:
            step: t, from 0.
            size: d, the number of entries.
        """
        return None

    @abstractmethod
    def init(self, params: Sequence[Tensor]) -> State:
        """The state before the first step; estimates hold one entry for each of the parameters'."""

    @abstractmethod
    def apply(self, state: State, estimate: Tensor) -> tuple[Tensor, State]:
        """The new flat estimate and the next state; neither argument is changed."""


@dataclass(frozen=True)
class Momentum(AbstractPostProcessor):
    """m_t = [β (1 - β^(t-1)) m_(t-1) + (1 - β) g_t] / (1 - β^t), t = 1, 2, ...

    A convex combination of all released gradients, so the first steps are not too small. Use it
    with an optimizer that has no momentum itself.

    Args:
        beta: β in [0, 1); 0 is the identity.

    Example:
        >>> momentum = Momentum(beta=0.9)
        >>> m, state = momentum.apply(momentum.init([torch.zeros(1)]), torch.tensor([1.0]))
        >>> m, state = momentum.apply(state, torch.tensor([0.0]))
        >>> m                                        # weights 0.9 * 0.1 and 0.1 over their sum
        tensor([0.4737])
    """

    beta: float
    is_entrywise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        normalise(self, between("[0, 1)"), "beta", of="Momentum")

    def filter(self, step: int, size: int) -> tuple[float, float]:
        weight = (1 - self.beta) / (1 - self.beta ** (step + 1))
        return 1 - weight, weight

    def init(self, params: Sequence[Tensor]) -> State:
        return {"average": torch.zeros(number_of_entries(params)), "steps": 0}

    def apply(self, state: State, estimate: Tensor) -> tuple[Tensor, State]:
        steps = state["steps"] + 1
        weight = (1 - self.beta) / (1 - self.beta**steps)
        average = torch.lerp(state["average"].to(estimate), estimate, weight)
        return average, {"average": average, "steps": steps}


@dataclass(frozen=True)
class LaplacianSmoothing(AbstractPostProcessor):
    r"""u = A_σ⁻¹ g with A_σ = I - σL, L the 1-D Laplacian with periodic boundary.

    DP-LSSGD with the optimizer SGD, DP-LSAdam with Adam (Wang et al. 2019, "DP-LSSGD: A Stochastic
    Optimization Method to Lift the Utility in Privacy-Preserving ERM", arXiv:1906.12056,
    Algorithm 1). Each entry becomes an average of its neighbours in the flat gradient, with weights
    ω^|j| / √(1 + 4σ), ω = (2σ + 1 - √(4σ + 1)) / (2σ). The noise is averaged away, and so is what
    differs between neighbouring weights: it pays where the noise is large and neighbours have
    similar gradients, as the weights of neighbouring pixels in a linear layer.

    The noise's part in the utility bound of convex losses (Theorem 2) shrinks to γ of what it was,
    γ = (1 + ω^d) / ((1 - ω^d) √(4σ + 1)) (Proposition 1), d the number of entries: .447, .333, .277
    for σ = 1, 2, 3 and d >= 100. Its square norm shrinks to (1 + 2σ) / (1 + 4σ)^(3/2) of what it
    was: .268, .185, .149.

    Args:
        sigma: σ >= 0; 0 is the identity. The paper uses 0.2 to 3.
        per_parameter: smooth each parameter's part by itself, as the authors' programs do, instead
            of the whole flat vector (the paper's text), where the last entries of one parameter
            and the first ones of the next are neighbours.

    Example:
        >>> smoothing = LaplacianSmoothing(sigma=1.0)
        >>> state = smoothing.init([torch.zeros(2, 2)])
        >>> smoothing.apply(state, torch.tensor([0.0, 5.0, 0.0, 0.0]))[0]
        tensor([1.0000, 2.3333, 1.0000, 0.6667])
    """

    sigma: float
    per_parameter: bool = False

    def __post_init__(self) -> None:
        normalise(self, not_negative, "sigma", of="LaplacianSmoothing")
        normalise(self, flag, "per_parameter", of="LaplacianSmoothing")

    def filter(self, step: int, size: int) -> tuple[float, float] | None:
        if self.per_parameter:  # whose sizes differ, and so does what is left
            return None
        return 0.0, math.sqrt(variance_left(self.sigma, size))

    def init(self, params: Sequence[Tensor]) -> State:
        return (
            {"sizes": [number_of_entries([param]) for param in params]}
            if self.per_parameter
            else {}
        )

    def apply(self, state: State, estimate: Tensor) -> tuple[Tensor, State]:
        if not self.per_parameter:
            return laplacian_smoothing(estimate, self.sigma), state
        parts = torch.split(estimate, state["sizes"])
        return torch.cat([laplacian_smoothing(part, self.sigma) for part in parts]), state


@cache
def variance_left(sigma: float, size: int) -> float:
    """Return the share of independent noise's variance that Laplacian smoothing leaves.

    The sum of its squared weights; of those far more than √σ entries away nothing is left.

    Example:
        >>> round(variance_left(1.0, size=1000), 4)  # (1 + 2σ) / (1 + 4σ)^(3/2)
        0.2683
    """
    impulse = torch.zeros(min(size, 1 << 16), dtype=torch.float64)
    impulse[0] = 1.0
    return float(laplacian_smoothing(impulse, sigma).square().sum())


def postprocessed(
    processors: Sequence[AbstractPostProcessor],
    states: Sequence[State],
    estimate: Tensor,
    params: Sequence[Tensor],
) -> tuple[Tensor, list[State]]:
    """Return an estimate as post-processors leave it, one after the other, and their next states.

    There are no states before the first step.
    """
    now = states or [processor.init(params) for processor in processors]
    following = []
    for processor, state in zip(processors, now, strict=True):
        estimate, state = processor.apply(state, estimate)
        following.append(state)
    return estimate, following


@dataclass
class NoiseFilter:
    r"""The variance of the noise in each entry of the private gradient, followed over steps.

    It is known for chains of filters of first order: with x_0 the estimate and x_1, ... what the
    post-processors make of it, each is :math:`x_i(t) = a_i(t) x_i(t-1) + b_i(t) x_{i-1}(t)`, and x_0 has
    the release in the place of the x before it. The covariance of the noise in (x_0, x_1, ...) follows
    step by step; the last variance is :math:`\sum_k h_k^2 s_k^2`, h the response of the whole chain to
    the release of step k and s_k the standard deviation of its noise.

    Args:
        estimator: turns releases into estimates.
        postprocessing: applied to these, in order.

    Example:
        >>> from lightning_dp import MeanGradient
        >>> chain = NoiseFilter(MeanGradient(), [Momentum(0.5)])
        >>> chain.advance(step=0, noise_std=1.0, size=10)
        1.0
        >>> round(chain.advance(step=1, noise_std=1.0, size=10), 4)  # (1/3)² + (2/3)²
        0.5556
    """

    estimator: AbstractEstimator
    postprocessing: Sequence[AbstractPostProcessor]
    covariance: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = 1 + len(self.postprocessing)
        self.covariance = [[0.0] * size for _ in range(size)]

    @property
    def part_without_variance(self) -> str | None:
        """The name of the first part whose noise is not known; None if all are."""
        if self.estimator.memory(0) is None:
            return repr(self.estimator)
        mixing = [each for each in self.postprocessing if not each.is_entrywise]
        unknown = [each for each in self.postprocessing if each.filter(0, 2) is None] + mixing[1:]
        return repr(unknown[0]) if unknown else None

    def advance(self, step: int, noise_std: float, size: int) -> float | None:
        """Return the variance at step t; None if it is not known.

        Args:
            step: t, from 0.
            noise_std: of the noise in each entry of the release.
            size: d, the entries of the gradient.
        """
        memory = self.estimator.memory(step)
        filters = [each.filter(step, size) for each in self.postprocessing]
        if memory is None or None in filters:
            return None
        if memory == 0 and not filters:  # as nearly always
            self.covariance = [[noise_std**2]]
            return noise_std**2
        before = self.covariance
        row, gain = (
            [0.0] * len(before),
            1.0,
        )  # of x_(i-1), on the x of the step before and the release
        rows, gains = list[list[float]](), list[float]()
        for i, (kept, new) in enumerate([(memory, 1.0), *filters]):  # type: ignore[misc]
            row, gain = [new * each for each in row], new * gain
            row[i] += kept
            rows.append(row)
            gains.append(gain)
        both = list(zip(rows, gains, strict=True))
        moved = [[sum(map(float.__mul__, row, column)) for column in before] for row in rows]
        self.covariance = [
            [sum(map(float.__mul__, a, b)) + g * h * noise_std**2 for b, h in both]
            for a, g in zip(moved, gains, strict=True)
        ]
        return self.covariance[-1][-1]
