"""Noise that drops by a factor at fixed intervals."""

from __future__ import annotations

from dataclasses import dataclass

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
        if not self.every >= 1:
            raise ValueError(f"StepDecay(every={self.every}) must be at least 1 step.")
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"StepDecay(factor={self.factor}) must be finite and greater than 0.")

    def __call__(self, step: int) -> float:
        return float(self.factor ** (step // self.every))
