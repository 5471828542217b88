"""What a noise schedule is: a positive pure function of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["AbstractSchedule"]


class AbstractSchedule(ABC):
    """A shape s(t) > 0: the noise multiplier of step t is ``scale * s(t)``, t = 0, 1, ...

    The scale is ``noise_multiplier`` when it is given, and found by calibration to
    ``target_epsilon`` when it is not. A schedule never sees data and holds no state, so a resumed
    run continues where it was, and the whole plan is known before the first step.
    """

    @abstractmethod
    def __call__(self, step: int) -> float:
        """s(t) of step t >= 0."""
