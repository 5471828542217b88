"""The charges of runs, in their order, and how two records of them become one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from lightning_dp._refusals import Refusal
from lightning_dp._validate import whole
from lightning_dp.accounting.events import (
    AbstractEvent,
    AbstractExternal,
    History,
    counted,
    event_from_dict,
)


class JournalError(Refusal, RuntimeError):
    """The record of what was spent is missing, damaged or in use: training must not go on."""


class Charges(Mapping[str, History]):
    """The events that each run was charged, in their order; equal neighbours are counted together.

    A run is one fit in one process, or one round of a federated client. Charges are only ever added.

    Example:
        >>> from lightning_dp.accounting import Gaussian
        >>> charges = Charges({"a run": [(Gaussian(2.0), 3)]})
        >>> charges.append("another", Gaussian(2.0))
        >>> charges.steps, charges.length("another"), charges.history()
        (4, 1, [(Gaussian(noise_multiplier=2.0), 4)])
    """

    def __init__(self, runs: Mapping[str, History] | None = None) -> None:
        self._runs: dict[str, list[tuple[AbstractEvent, int]]] = {}
        self._lengths: dict[str, int] = {}
        self._steps = 0
        self._voided: str | None = None
        self.merge({} if runs is None else runs)

    def __getitem__(self, run: str) -> History:
        return self._runs[run]

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._runs})"

    @property
    def steps(self) -> int:
        """Number of noised steps, over all runs; what others released is none."""
        return self._steps

    @property
    def total(self) -> int:
        """Number of charges, over all runs, also of those that are no steps."""
        return sum(self._lengths.values())

    @property
    def voided(self) -> str | None:
        """The reason for which ε of these charges is withdrawn; None if it is not."""
        return self._voided

    @property
    def external(self) -> list[tuple[AbstractExternal, int]]:
        """Releases of others about the same records, as they were declared."""
        return [
            (event, count) for event, count in self.history() if isinstance(event, AbstractExternal)
        ]

    def length(self, run: str) -> int:
        """Return the number of charges of a run; 0 for one that has none."""
        return self._lengths.get(run, 0)

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """Return all events with their counts; the order has no meaning for ε."""
        return counted(chain.from_iterable(self._runs.values()))

    def append(self, run: str, event: AbstractEvent) -> None:
        """Add the next charge of a run."""
        charges = self._runs.setdefault(run, [])
        if charges and charges[-1][0] == event:
            charges[-1] = (event, charges[-1][1] + 1)
        else:
            charges.append((event, 1))
        self._lengths[run] = self.length(run) + 1
        self._count(event, 1)

    def merge(self, other: Mapping[str, History]) -> None:
        """Add what another record knows: the longer one of each run.

        Raises:
            JournalError: if two records of a run contradict each other; nothing is added.
        """
        longer = {run: _longer(run, self.get(run, ()), charges) for run, charges in other.items()}
        for run, charges in longer.items():
            self._runs[run] = list(charges)
            self._lengths[run] = _length(charges)
        self._steps, self._voided = 0, None
        for event, count in chain.from_iterable(self._runs.values()):
            self._count(event, count)

    def knows_more(self, run: str, other: Charges) -> bool:
        """Return whether this record of a run is longer than the other's.

        Raises:
            JournalError: if the two contradict each other.
        """
        _longer(run, self.get(run, ()), other.get(run, ()))
        return self.length(run) > other.length(run)

    def _count(self, event: AbstractEvent, count: int) -> None:
        self._steps += count * event.num_steps
        if not event.is_step and self._voided is None:
            self._voided = event.withdrawn

    def to_dict(self) -> dict[str, Any]:
        """Return plain types, for checkpoints and reports."""
        return {
            run: [[event.to_dict(), count] for event, count in charges]
            for run, charges in self.items()
        }

    @classmethod
    def from_dict(cls, runs: Mapping[str, Any]) -> Charges:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError, TypeError, AttributeError: if it is something else.
        """
        return cls(
            {
                run: [(event_from_dict(event), whole("count", count)) for event, count in charges]
                for run, charges in runs.items()
            }
        )


def _length(charges: History) -> int:
    return sum(count for _, count in charges)


def _longer(run: str, a: History, b: History) -> History:
    """Return the longer one of two records of a run, if the other is a beginning of it."""
    short, long = sorted((a, b), key=_length)
    # All entries agree, except that the shorter record may end within its last one.
    begins = all(
        ours[0] == theirs[0]
        and (ours[1] == theirs[1] or (i == len(short) - 1 and ours[1] < theirs[1]))
        for i, (ours, theirs) in enumerate(zip(short, long, strict=False))
    )
    if not begins or len(short) > len(long):
        raise JournalError(
            f"Two records of run {run} contradict each other; neither can be trusted.",
            topic="journal-behind",
        )
    return long
