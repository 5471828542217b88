"""Noise that drops by a factor at fixed intervals."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp._validate import normalise, positive, whole
from lightning_dp.schedules.base import AbstractSchedule

__all__ = ["StepDecay"]


@dataclass(frozen=True)
class StepDecay(AbstractSchedule):
    """s(t) = factor^⌊t / every⌋.

    Args:
        every: steps between two changes, at least 1.
        factor: what the noise is multiplied by, greater than 0.

    Raises:
        ValueError: for values outside these bounds.

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
