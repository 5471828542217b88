"""Histories and plans as arrays: 100,000 steps without 100,000 events."""

from __future__ import annotations

import math
import reprlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_dp._refusals import RefusedSetting
from lightning_dp.accounting.events import (
    AbstractEvent,
    AbstractExternal,
    History,
    Relation,
    check_entry,
    check_history,
    sampled_gaussian,
)

FloatArray: TypeAlias = NDArray[np.float64]

NO_NOISE = 1e-100  # sums of 1 / z² over steps with less could overflow, so it counts as none


@dataclass(frozen=True)
class Steps:
    """A checked history: distinct ``(z, q)`` in increasing order, with their counts."""

    noise_multipliers: FloatArray
    sample_rates: FloatArray
    counts: FloatArray

    @property
    def total(self) -> float:
        """Number of steps."""
        return float(self.counts.sum())

    @property
    def has_noiseless(self) -> bool:
        """True if a step has no noise, or next to none."""
        return bool(np.any(self.noise_multipliers < NO_NOISE))

    @property
    def mu(self) -> float:
        """``sqrt(sum_t z_t^-2)``; that of the steps read as full batches, under add/remove."""
        if self.has_noiseless:
            return math.inf
        return math.sqrt(math.fsum(self.counts * (1 / self.noise_multipliers) ** 2))

    def scaled(self, scale: float) -> Steps:
        """Return the steps with their noise times a number; what overflows is the largest number."""
        with np.errstate(over="ignore"):  # which is less noise
            noise = np.minimum(self.noise_multipliers * scale, sys.float_info.max)
        return Steps(noise, self.sample_rates, self.counts)

    def events(self) -> list[tuple[AbstractEvent, int]]:
        """Return the steps as a history."""
        columns = (self.noise_multipliers, self.sample_rates, self.counts)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [(sampled_gaussian(z, q), int(count)) for z, q, count in rows]

    def at(self, places: NDArray[np.intp]) -> Steps:
        """Return some of the steps."""
        return Steps(self.noise_multipliers[places], self.sample_rates[places], self.counts[places])


def merge(history: History) -> Steps:
    """Check a history and merge equal ``(z, q)``."""
    counts: dict[tuple[float, float], int] = {}
    for entry in history:
        event, count = check_entry(entry)
        if count:
            pair = event.pair
            counts[pair] = counts.get(pair, 0) + count
    pairs = np.array(list(counts), dtype=float).reshape(-1, 2)
    return merge_arrays(pairs[:, 0], pairs[:, 1], np.array(list(counts.values()), dtype=float))


def merge_arrays(
    noise_multipliers: FloatArray, sample_rates: FloatArray, counts: FloatArray | None = None
) -> Steps:
    """Merge equal ``(z, q)`` of legal steps; each counts once unless it is said how often."""
    pairs = noise_multipliers + 1j * sample_rates  # complex numbers are sorted by both parts
    distinct, places = np.unique(pairs, return_inverse=True)
    totals = np.bincount(places.reshape(-1), weights=counts, minlength=distinct.size)
    return Steps(distinct.real.copy(), distinct.imag.copy(), totals.astype(float))


def joined(first: Steps, second: Steps) -> Steps:
    """Return the steps of both."""
    parts = [(s.noise_multipliers, s.sample_rates, s.counts) for s in (first, second)]
    return merge_arrays(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))


@dataclass(frozen=True)
class CheckedHistory(Sequence[tuple[AbstractEvent, int]]):
    """A history whose steps were merged once, for accountants that are asked often.

    Args:
        events: what was given.
        steps: all Gaussian steps, merged.
        others: what is no Gaussian that could be merged, with counts above 0.
        later: those of the steps that follow the events.
    """

    events: History
    steps: Steps
    others: tuple[tuple[AbstractExternal, int], ...] = ()
    later: Steps | None = None

    @classmethod
    def of(cls, history: History, name: str = "history") -> CheckedHistory:
        """Check a history, the argument of that name, and merge it."""
        if isinstance(history, cls):
            return history
        entries = check_history(history, name)
        steps = merge([entry for entry in entries if not isinstance(entry[0], AbstractExternal)])
        external = [(e, n) for e, n in entries if isinstance(e, AbstractExternal) and n]
        return cls(entries, steps, tuple(external))

    def external(self, relation: Relation) -> tuple[tuple[AbstractExternal, int], ...]:
        """Return other releases; raise ValueError for one without a guarantee under the relation."""
        check_places(self.events, relation)
        return self.others

    def followed_by(self, steps: Steps) -> CheckedHistory:
        """Return it with further steps, of which there may be many."""
        return replace(self, steps=joined(self.steps, steps), later=steps)

    @cached_property
    def _entries(self) -> History:
        return self.events if self.later is None else [*self.events, *self.later.events()]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: Any) -> Any:
        return self._entries[index]


def check_places(history: History, relation: Relation) -> None:
    """Refuse "add_remove" for records in a fixed order, which one record more would move.

    Raises:
        ValueError: naming the relations that can be asked for.
    """
    fixed = relation == "add_remove" and next((e for e, n in history if n and e.needs_places), None)
    if fixed:
        raise RefusedSetting(
            f"{fixed} is about records in a fixed order, where one record more or less moves others to "
            "other steps: relation='add_remove' has no bound there. Ask for relation='zero_out' (one "
            "record has no effect, and keeps its place; same ε as add_remove has elsewhere), or "
            "'replace_one'.",
            topic="fixed-order",
        )


class AbstractPairPlan(ABC):
    """A function from the step 0, 1, ... to its event that also gives many steps at once."""

    @abstractmethod
    def __call__(self, step: int) -> AbstractEvent:
        """Return the event of a step."""

    @abstractmethod
    def pairs(self, first: int, last: int) -> tuple[FloatArray, FloatArray]:
        """Return (z, q) of the steps ``first <= t < last``, those of their events."""


EventPlan: TypeAlias = AbstractPairPlan | Callable[[int], AbstractEvent] | AbstractEvent


def check_plan(plan: object) -> None:
    """Raise TypeError unless it is a plan of events."""
    if not (isinstance(plan, AbstractEvent) or callable(plan)):
        raise TypeError(
            f"plan={reprlib.repr(plan)} must be an event, or a function from the step to its event."
        )


def pairs_of(
    plan: AbstractPairPlan | Callable[[int], AbstractEvent], first: int, last: int
) -> tuple[FloatArray, FloatArray]:
    """Return (z, q) of the steps ``first <= t < last`` of a plan."""
    if isinstance(plan, AbstractPairPlan):
        return plan.pairs(first, last)
    pairs = np.array([plan(step).pair for step in range(first, last)], dtype=float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def first_events(plan: EventPlan, n: int) -> list[tuple[AbstractEvent, int]]:
    """Return the events of the first ``n`` steps of a plan."""
    if isinstance(plan, AbstractEvent):
        return [(plan, n)]
    return [(plan(step), 1) for step in range(n)]
