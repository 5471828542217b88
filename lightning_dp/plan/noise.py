"""The noise of a whole training, as a planner sees it: one answer per mechanism."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning_dp.accounting.base import Relation
from lightning_dp.accounting.calibration import alike, calibrate_steps
from lightning_dp.accounting.gdp import mu_of_budget

__all__ = ["AbstractNoise", "IndependentNoise"]


class AbstractNoise(ABC):
    """A noise mechanism: how much noise a budget asks for, and what it adds up to.

    A planner asks nothing else, so that another mechanism (noise that is correlated over the steps,
    say) is one subclass.
    """

    name: str
    """A word for tables and JSON."""

    @abstractmethod
    def calibrated(
        self, sample_rate: float, steps: int, epsilon: float, delta: float, relation: Relation
    ) -> float:
        """Return the noise multiplier z with which the steps keep to the budget.

        Each step releases a sum of gradients clipped to C with noise of standard deviation z·C.
        """

    @abstractmethod
    def of_the_sum(self, noise_multiplier: float, steps: int) -> float:
        """Return the standard deviation, in units of C, of the noise in the sum of all releases."""


@dataclass(frozen=True)
class IndependentNoise(AbstractNoise):
    """Fresh noise at every step, as in DP-SGD: z is calibrated, and the sum has z·√T.

    Example:
        >>> noise = IndependentNoise()
        >>> z = noise.calibrated(0.01, 1000, epsilon=3.0, delta=1e-5, relation="add_remove")
        >>> round(z, 3), round(noise.of_the_sum(z, 1000), 1)
        (0.814, 25.7)
    """

    name = "independent"

    def calibrated(
        self, sample_rate: float, steps: int, epsilon: float, delta: float, relation: Relation
    ) -> float:
        if sample_rate == 1:  # exactly, and at once
            return full_batch_noise(epsilon, delta, relation) * math.sqrt(steps)
        return calibrate_steps(alike(sample_rate, steps), epsilon, delta, relation)

    def of_the_sum(self, noise_multiplier: float, steps: int) -> float:
        return noise_multiplier * math.sqrt(steps)


def full_batch_noise(epsilon: float, delta: float, relation: Relation) -> float:
    """Return the exact noise multiplier of one release about all records: Δ/μ, Δ = 1 or 2 (replace-one).

    T such releases have √T times as much each, so that their mean has the noise of one.

    Example:
        >>> round(full_batch_noise(3.0, 1e-5, "add_remove"), 3)
        1.391
    """
    return (2.0 if relation == "replace_one" else 1.0) / mu_of_budget(epsilon, delta)
