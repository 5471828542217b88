"""The most that a step of a plan costs, in few numbers: for the day when its journal is lost."""

from __future__ import annotations

import math
from typing import Any

from lightning_dp.plan import NoisePlan
from lightning_dp.schedules import Constant

__all__ = ["costliest_events"]

_NEAR = 0.98  # noise multipliers that share an entry
_HORIZON = 100_000  # steps looked at beyond the present one, of a plan without an end


def costliest_events(plan: NoisePlan, step: int, end: float) -> dict[str, Any] | None:
    """Bounds on the events of a plan, as plain types for a checkpoint.

    ``events`` holds pairs (position, event): up to the position of the next pair, no step of the
    plan from the first one on has less noise, or a larger rate, than the event. ``until`` is the
    position at which this knowledge ends; None if it is for good. ``stride`` is how many positions
    there are from one charged step to the next at most; None if that is not known.

    Args:
        plan: whose noise was fixed in advance.
        step: its present position.
        end: the position at which it ends; may be infinite.

    Returns:
        None if the plan affords no step.
    """
    if not math.isfinite(plan.scale):
        return None
    is_periodic = isinstance(plan.shape, Constant)
    # A later fit of more epochs goes beyond the end.
    last = plan.estimator.period if is_periodic else 2 * min(end, step + _HORIZON)
    entries, is_over = _entries(plan, int(last))
    silence = plan.estimator.longest_silence
    return {
        "events": [[position, plan.sampling.event(*pair).to_dict()] for position, pair in entries],
        "until": None if is_periodic or is_over else int(last),
        "stride": int(silence) + 1 if math.isfinite(silence) else None,
    }


def _entries(plan: NoisePlan, last: int) -> tuple[list[tuple[int, tuple[float, float]]], bool]:
    """Return where the least noise or the largest rate changes, and whether the plan ends itself."""
    entries: list[tuple[int, tuple[float, float]]] = []
    most, least, rate = math.inf, math.inf, 0.0  # of the entry; of all steps so far
    for position in range(last):
        try:
            noise, now = plan.noise_multiplier(position), plan.rate(position)
        except ValueError:
            return entries, True  # no run gets there
        if not entries or noise < _NEAR * most or now > rate:
            most = min(noise, least)
            entries.append((position, (most, now)))
        least, rate = min(least, noise), max(rate, now)
        entries[-1] = (entries[-1][0], (least, rate))
    return entries, False
