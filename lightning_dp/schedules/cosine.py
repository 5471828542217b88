"""Noise that goes to its last value along half a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp._validate import normalise, positive, whole
from lightning_dp.schedules.base import AbstractSchedule

__all__ = ["Cosine"]


@dataclass(frozen=True)
class Cosine(AbstractSchedule):
    """s(t) = end + (1 - end) (1 + cos(π t / steps)) / 2 for t < steps; ``end`` from there on.

    Args:
        steps: T >= 1, after which the noise stays at ``end`` times the first step's.
        end: greater than 0; below 1 decays, above 1 grows.

    Raises:
        ValueError: for values outside these bounds.

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
