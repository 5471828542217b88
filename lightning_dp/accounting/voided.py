"""A run that looked at real records and had to end: what it released before has no ε any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dp.accounting.events import AbstractEvent

__all__ = ["Voided", "VoidedRunError", "reason_in", "steps_in"]

_Runs = Mapping[str, Sequence[tuple[AbstractEvent, int]]]


class VoidedRunError(RuntimeError):
    """Real records failed a check, so the run is over for good and ε of it is withdrawn.

    Args:
        reason: module and kind of what was found; never a value, a count or a record.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"This private run is voided: {reason} The step was not released. That the run ended "
            "here depends on the records, and no ε covers it: ε of all that it released before is "
            "withdrawn, nothing more is saved, and neither it nor an earlier checkpoint of it can "
            "be resumed. Begin a new run, with a new DifferentialPrivacy and weights from before."
        )
        self.reason = reason

    def __reduce__(self) -> tuple[type[VoidedRunError], tuple[str]]:
        return type(self), (self.reason,)


@dataclass(frozen=True)
class Voided(AbstractEvent):
    """The end of a run whose guarantee is withdrawn: for every accountant a step without noise.

    In a journal it outlives checkpoints and reports that were written before.

    Args:
        reason: as in :class:`VoidedRunError`.

    Raises:
        ValueError: if ``reason`` is no text.

    Example:
        >>> from lightning_dp.accounting import PLDAccountant
        >>> PLDAccountant().epsilon([(Voided("a chunk had no answer."), 1)], delta=1e-5)
        inf
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise ValueError(f"reason={self.reason!r} must be a text.")

    @property
    def pair(self) -> tuple[float, float]:
        """``(0.0, 1.0)``: no noise, on all records."""
        return 0.0, 1.0

    def to_dict(self) -> dict[str, object]:
        """Return the name and the reason."""
        return {"event": "Voided", "reason": self.reason}


def reason_in(runs: _Runs) -> str | None:
    """Why ε of these charges is withdrawn; None if it is not."""
    events = (event for charges in runs.values() for event, _ in charges)
    return next((event.reason for event in events if isinstance(event, Voided)), None)


def steps_in(runs: _Runs) -> int:
    """How many noised steps were charged."""
    return sum(
        count
        for charges in runs.values()
        for event, count in charges
        if not isinstance(event, Voided)
    )
