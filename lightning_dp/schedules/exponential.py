"""Noise that decays (or grows) by the same factor at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp._validate import normalise, number
from lightning_dp.schedules.base import AbstractSchedule

__all__ = ["Exponential"]


@dataclass(frozen=True)
class Exponential(AbstractSchedule):
    """s(t) = exp(-rate · t): exponential decay, σ_t = σ_0 e^(-kt).

    Args:
        rate: k per step; positive decays, negative grows. ``math.log(4) / steps`` ends at a
            quarter of the first step's noise.

    Raises:
        ValueError: if ``rate`` is not finite.

    Example:
        >>> round(Exponential(rate=0.01)(100), 4)
        0.3679
    """

    rate: float

    def __post_init__(self) -> None:
        normalise(self, number, "rate", of="Exponential")
        if not math.isfinite(self.rate):
            raise ValueError(f"Exponential(rate={self.rate}) must be a finite number.")

    def __call__(self, step: int) -> float:
        return math.exp(-self.rate * step)
