"""Histories and plans as arrays: 100,000 steps without 100,000 events."""

from __future__ import annotations

import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_dp._refusals import RefusedSetting
from lightning_dp.accounting.events import (
    AbstractEvent,
    History,
    Relation,
    check_entry,
    check_history,
    sampled_gaussian,
)

FloatArray: TypeAlias = NDArray[np.float64]

NO_NOISE = 1e-100  # sums of 1 / z² over steps with less could overflow, so it counts as none
ALL_NOISE = 1e100  # of whose square there is a number; more counts as this


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
        """Return the steps with their noise times a number."""
        with np.errstate(over="ignore"):
            noise = np.minimum(self.noise_multipliers * scale, ALL_NOISE)
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
    noise = np.minimum(noise_multipliers, ALL_NOISE)
    pairs = noise + 1j * sample_rates  # complex numbers are sorted by both parts
    distinct, places = np.unique(pairs, return_inverse=True)
    totals = np.bincount(places.reshape(-1), weights=counts, minlength=distinct.size)
    return Steps(distinct.real.copy(), distinct.imag.copy(), totals.astype(float))


def joined(first: Steps, second: Steps) -> Steps:
    """Return the steps of both."""
    parts = [(s.noise_multipliers, s.sample_rates, s.counts) for s in (first, second)]
    return merge_arrays(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))


@dataclass(frozen=True)
class CheckedHistory(Sequence[tuple[AbstractEvent, int]]):
    """A history whose steps were merged once, for accountants that are asked often."""

    events: History  # as given
    steps: Steps  # all that are Gaussian, merged
    others: History = ()  # no pairs that could be merged, with counts above 0
    later: Steps | None = None  # those of the steps that follow the events

    @classmethod
    def of(cls, history: History, name: str = "history") -> CheckedHistory:
        """Check a history, the argument of that name, and merge it."""
        if isinstance(history, cls):
            return history
        entries = check_history(history, name)
        steps = merge([entry for entry in entries if entry[0].is_pair])
        return cls(entries, steps, tuple((e, n) for e, n in entries if n and not e.is_pair))

    def external(self, relation: Relation) -> History:
        """Return releases that are no pair; raise ValueError for one the relation does not bound."""
        check_bounded(self.events, relation)
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


def check_bounded(history: History, relation: Relation) -> None:
    """Refuse a relation under which an event has no bound.

    Raises:
        ValueError: naming the relations that can be asked for.
    """
    for event, count in history:
        if count and (reason := event.no_bound.get(relation)) is not None:
            raise RefusedSetting(reason, topic="fixed-order")


class AbstractPairPlan(ABC):
    """A function from the step 0, 1, ... to its event that also gives many steps at once."""

    @property
    def is_exact(self) -> bool:
        """False if pairs are bounds, and events cost less."""
        return True

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


def has_pairs(plan: EventPlan, lengths: Iterable[int], relation: Relation) -> bool:
    """Return whether pairs are all that the first steps of a plan cost, for each length."""
    if isinstance(plan, AbstractPairPlan):
        return plan.is_exact
    n = max(lengths, default=0)
    events = [plan] if isinstance(plan, AbstractEvent) else map(plan, range(n))
    return all(event.is_pair and relation not in event.no_bound for event in events)


def first_events(plan: EventPlan, n: int) -> list[tuple[AbstractEvent, int]]:
    """Return the events of the first ``n`` steps of a plan."""
    if isinstance(plan, AbstractEvent):
        return [(plan, n)]
    return [(plan(step), 1) for step in range(n)]
