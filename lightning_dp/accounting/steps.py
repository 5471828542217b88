"""Histories and plans as arrays: what 100,000 steps are, without making 100,000 events."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_dp.accounting.events import AbstractEvent, History, check_entry

__all__ = [
    "AbstractPairPlan",
    "EventPlan",
    "FloatArray",
    "PlannedSteps",
    "Steps",
    "joined",
    "merge",
    "merge_arrays",
]


FloatArray: TypeAlias = NDArray[np.float64]


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
        """True if a step has no noise at all."""
        return bool(np.any(self.noise_multipliers == 0.0))

    def scaled(self, scale: float) -> Steps:
        """The steps with their noise times a number; one that overflows is the largest number."""
        with np.errstate(over="ignore"):  # which is less noise
            noise = np.minimum(self.noise_multipliers * scale, sys.float_info.max)
        return Steps(noise, self.sample_rates, self.counts)

    def at(self, places: NDArray[np.intp]) -> Steps:
        """Some of the steps."""
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
    """The steps of both."""
    parts = [(s.noise_multipliers, s.sample_rates, s.counts) for s in (first, second)]
    return merge_arrays(*(np.concatenate(pair) for pair in zip(*parts, strict=True)))


class AbstractPairPlan(ABC):
    """A function from the step 0, 1, ... to its event that also tells many steps at once."""

    @abstractmethod
    def __call__(self, step: int) -> AbstractEvent:
        """The event of a step."""

    @abstractmethod
    def pairs(self, first: int, last: int) -> tuple[FloatArray, FloatArray]:
        """(z, q) of the steps ``first <= t < last``, those of their events."""


EventPlan: TypeAlias = AbstractPairPlan | Callable[[int], AbstractEvent] | AbstractEvent


class PlannedSteps:
    """The first steps of a plan, remembered as far as they were asked for.

    Args:
        plan: one event for all steps, or a function from the step to its event.
    """

    def __init__(self, plan: EventPlan) -> None:
        self._plan = plan
        self._noise = np.zeros(0)
        self._rates = np.zeros(0)

    def first(self, n: int) -> Steps:
        """The first ``n`` steps, merged."""
        if isinstance(self._plan, AbstractEvent):
            z, q = self._plan.pair
            return merge_arrays(np.array([z]), np.array([q]), np.array([float(n)]))
        known = self._noise.size
        if n > known:
            noise, rates = pairs_of(self._plan, known, n)
            self._noise = np.append(self._noise, noise)
            self._rates = np.append(self._rates, rates)
        return merge_arrays(self._noise[:n], self._rates[:n])


def pairs_of(
    plan: AbstractPairPlan | Callable[[int], AbstractEvent], first: int, last: int
) -> tuple[FloatArray, FloatArray]:
    """(z, q) of the steps ``first <= t < last`` of a plan."""
    if isinstance(plan, AbstractPairPlan):
        return plan.pairs(first, last)
    pairs = np.array([plan(step).pair for step in range(first, last)], dtype=float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
