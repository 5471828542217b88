"""The accountant interface, and the checks that every accountant shares."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_dp._validate import number, whole
from lightning_dp.accounting.events import AbstractEvent

Relation = Literal["add_remove", "replace_one"]
History = Sequence[tuple[AbstractEvent, int]]
FloatArray = NDArray[np.float64]


class AbstractAccountant(ABC):
    """Turns a history of events into a statement ``(epsilon, delta)``.

    A history is a sequence of ``(event, count)``, in any order; equal events need not be merged.
    Promised by every implementation:

    - ``epsilon`` and ``delta`` are upper bounds: never below the true value of the composition of
      the events under ``relation``, up to the rounding that the class states;
    - an empty history (or counts of 0) gives ``epsilon = 0`` and ``delta = 0``;
    - a noise multiplier of 0 with a positive count gives ``epsilon = inf`` and ``delta = 1``;
    - the order of the events does not matter, ``(e, n)`` means n times ``(e, 1)``.

    ``relation`` is ``"add_remove"`` (one record added or removed) or ``"replace_one"`` (one record
    exchanged: the sensitivity of a sum doubles).
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What a report prints."""

    @abstractmethod
    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return the least epsilon that this accountant can show at ``delta`` in (0, 1)."""

    @abstractmethod
    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        """Return the least delta that this accountant can show at ``epsilon >= 0``."""


class AbstractStepsAccountant(AbstractAccountant):
    """An accountant that also takes merged steps, of which there may be very many."""

    @abstractmethod
    def epsilon_of(self, steps: "Steps", delta: float, relation: Relation) -> float:
        """Like :meth:`epsilon`."""


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
        """Whether a step has no noise at all."""
        return bool(np.any(self.noise_multipliers == 0.0))

    def scaled(self, scale: float) -> "Steps":
        """The steps with their noise times a number; one that overflows is the largest number."""
        with np.errstate(over="ignore"):  # which is less noise
            noise = np.minimum(self.noise_multipliers * scale, sys.float_info.max)
        return Steps(noise, self.sample_rates, self.counts)

    def at(self, places: NDArray[np.intp]) -> "Steps":
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


def check_delta(delta: float) -> float:
    """Return ``delta`` if it is in (0, 1), else raise."""
    if not 0.0 < number("delta", delta) < 1.0:
        raise ValueError(f"delta must be in (0, 1), got {delta}; 1e-5 or 1/N^1.1 are usual.")
    return float(delta)


def check_epsilon(epsilon: float) -> float:
    """Return ``epsilon`` if it is finite and not negative, else raise."""
    if not 0.0 <= number("epsilon", epsilon) < math.inf:
        raise ValueError(f"epsilon must be finite and at least 0, got {epsilon}.")
    return float(epsilon)


def check_relation(relation: str) -> float:
    """Return the factor on the sensitivity, 1 for add/remove and 2 for replace-one, or raise."""
    if relation == "add_remove":
        return 1.0
    if relation == "replace_one":
        return 2.0
    raise ValueError(f"relation must be 'add_remove' or 'replace_one', got {relation!r}.")


def check_entry(entry: object) -> tuple[AbstractEvent, int]:
    """Return a legal entry of a history, or raise."""
    if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], AbstractEvent)):
        raise ValueError(f"a history holds pairs (event, count), got {entry!r}.")
    event, count = entry
    if type(count) is int and count >= 0:  # nearly always, and histories are long
        return event, count
    try:
        return event, whole("count", count, 0)
    except ValueError:
        raise ValueError(
            f"count must be an integer of at least 0, got {count!r} for {event!r}."
        ) from None
