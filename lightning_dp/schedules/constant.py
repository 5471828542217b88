"""The same noise at every step."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dp.schedules.base import AbstractSchedule

__all__ = ["Constant"]


@dataclass(frozen=True)
class Constant(AbstractSchedule):
    """s(t) = 1.

    Example:
        >>> Constant()(0), Constant()(999)
        (1.0, 1.0)
    """

    def __call__(self, step: int) -> float:
        return 1.0
