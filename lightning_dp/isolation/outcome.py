"""The outcome of an isolation probe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from lightning_dp.isolation.kinds import NO_KINDS, SyntheticKinds

__all__ = ["BY_CONSTRUCTION", "CONDITION", "ISOLATED", "Isolation", "Outcome", "first_failure"]

Outcome = Literal["isolated", "coupled", "kept", "refused", "not probed"]

BY_CONSTRUCTION = "by construction: each record runs alone"
CONDITION = "provided that no target is ignored (ignore_index=-100)"
_WATCHED = " (every batch is watched for ignored targets)"


@dataclass(frozen=True)
class Isolation:
    """Outcome of a probe; nothing in it comes from a value of the data, except by your own call.

    Args:
        outcome: "isolated"; "coupled" (a record moved another's gradient); "kept" (records are
            written into weights or buffers); "refused" (the gradient engine cannot tell the
            records apart); "not probed".
        reason: why, with the cure; "" if isolated. Of an exception of the model its type only.
        modules: names of the modules through which records are coupled, or of the tensors.
        condition: further assumption that the verdict rests on; "" if there is none.
        is_doubtful: True if that often fails: records have several targets each, as where padding
            is ignored.
        is_mean_of_targets: True if the loss is a mean over the targets of all records, by torch's
            own functions: each real batch must be watched for ignored ones.
        ignored: how many targets every record ignores by the model's own doing, for each such mean.
        sentinels: for losses written by hand, the places of tensors in a batch and the values in
            them that may not occur.
        kinds: synthetic records that the model took, and that moved no other's gradient. Empty
            where the records were given.
        left_out: what could not be tried, in words without values.
        notes: facts for the report, in words without values, that are no fault.
        topic: of a refusal, the anchor of its entry on the troubleshooting page.
    """

    outcome: Outcome
    reason: str = ""
    modules: tuple[str, ...] = ()
    condition: str = ""
    is_doubtful: bool = False
    is_mean_of_targets: bool = False
    ignored: tuple[int, ...] = ()
    sentinels: tuple[tuple[int, int], ...] = ()
    kinds: SyntheticKinds = NO_KINDS
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    topic: str = ""

    def __str__(self) -> str:
        if self.outcome == "not probed":
            return f"not probed ({self.reason})"
        verdict = "isolated" if self.outcome == "isolated" else f"FAILED: {self.reason}"
        watched = _WATCHED if self.is_mean_of_targets or self.sentinels else ""
        condition = f", {self.condition}" if self.condition else ""
        left_out = f" (not tried: {'; '.join(self.left_out)})" if self.left_out else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"probed, {verdict}{watched}{left_out}{condition}{notes}"


ISOLATED = Isolation("isolated")


def first_failure(found: Iterable[Isolation]) -> Isolation:
    """Return the first outcome that is not "isolated", else all of them in one."""
    total = ISOLATED
    for each in found:
        if each.outcome != "isolated":
            return each
        total = replace(
            total,
            condition=total.condition or each.condition,
            is_doubtful=total.is_doubtful or each.is_doubtful,
            is_mean_of_targets=total.is_mean_of_targets or each.is_mean_of_targets,
            ignored=total.ignored or each.ignored,
            sentinels=total.sentinels + each.sentinels,
            kinds=each.kinds if each.kinds.ran else total.kinds,
            left_out=total.left_out + each.left_out,
            notes=tuple(dict.fromkeys(total.notes + each.notes)),
        )
    return total
