"""Noise that goes to its last value along a power of the remaining time."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp._validate import normalise, positive, whole
from lightning_dp.schedules.base import AbstractSchedule

__all__ = ["Polynomial"]


@dataclass(frozen=True)
class Polynomial(AbstractSchedule):
    """s(t) = end + (1 - end) (1 - t / steps)^power for t < steps; ``end`` from there on.

    Args:
        steps: T >= 1, after which the noise stays at ``end`` times the first step's.
        end: greater than 0; below 1 decays, above 1 grows.
        power: greater than 0; 1 is a straight line, larger decays earlier.

    Raises:
        ValueError: for values outside these bounds.

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
