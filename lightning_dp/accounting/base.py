"""The interface of accountants, their checks, a cache of answers, and the rounding of ε."""

from __future__ import annotations

import functools
import math
import reprlib
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from lightning_dp._validate import explained, probability
from lightning_dp.accounting.events import History, check_entry, counted
from lightning_dp.accounting.events import Relation as Relation
from lightning_dp.accounting.events import epsilon_text as epsilon_text
from lightning_dp.accounting.steps import EventPlan, FloatArray, first_events

LEAST_EPSILON = 1e-9
"""The smallest budget that noise is calibrated for; grids of losses are no finer."""

_MOST = 16  # values of a cache
_FACTORS = {"add_remove": 1.0, "replace_one": 2.0, "zero_out": 1.0}
_DELTA = explained(probability, "1e-5 or 1/N^1.1 are usual.")


class AbstractAccountant(ABC):
    """Turns a history of events into a statement ``(epsilon, delta)``.

    A history is a sequence of ``(event, count)``, in any order; equal events need not be merged.
    Promised by every implementation:

    - ``epsilon`` and ``delta`` are upper bounds: never below the true value of the composition of
      the events under ``relation``, up to the rounding that the class states;
    - an empty history (or counts of 0) gives ``epsilon = 0`` and ``delta = 0``;
    - a noise multiplier of 0 with a positive count gives ``epsilon = inf`` and ``delta = 1``;
    - the order of the events does not matter, ``(e, n)`` means n times ``(e, 1)``.

    ``relation`` is ``"add_remove"`` (one record added or removed), ``"replace_one"`` (one record
    exchanged: the sensitivity of a sum doubles), or ``"zero_out"`` (one record has no effect, and keeps
    its place: costs what ``"add_remove"`` does, and is all that a fixed order of records allows).
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in reports."""

    @abstractmethod
    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return the least epsilon that this accountant can show at ``delta`` in (0, 1)."""

    @abstractmethod
    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        """Return the least delta that this accountant can show at ``epsilon >= 0``."""

    is_its_own_guard: ClassVar[bool] = False
    """True if a budget must be kept by this accountant alone: it is a part of a larger one."""

    shares_curve: ClassVar[bool] = False
    """True if many lengths of a :meth:`curve` together cost little more than the longest one."""

    def curve(
        self,
        plan: EventPlan,
        lengths: NDArray[np.int64],
        delta: float,
        relation: Relation = "add_remove",
        spent: History = (),
    ) -> FloatArray:
        """Return the least epsilon of what was spent and the first n steps of a plan, for each n.

        Args:
            plan: one event for all steps, or a function from the step to its event.
            lengths: increasing numbers n of steps.
            delta, relation: as for :meth:`epsilon`.
            spent: what ran before.
        """
        found = [self.epsilon([*spent, *first_events(plan, n)], delta, relation) for n in lengths]
        return np.array(found, dtype=float)


def check_delta(delta: object) -> float:
    """Return ``delta`` if it is in (0, 1), else raise."""
    return float(_DELTA("delta", delta))


def check_relation(relation: str) -> float:
    """Return the factor on the sensitivity, 1 and for replace-one 2, or raise."""
    if isinstance(relation, str) and relation in _FACTORS:
        return _FACTORS[relation]
    raise ValueError(
        f"relation={reprlib.repr(relation)} must be 'add_remove', 'replace_one' or 'zero_out'."
    )


class EpsilonCache:
    """The latest few ε of an accountant, by the events of a history in any order.

    The ε of a whole plan, of which every step makes another part the past, is computed once.
    """

    def __init__(self, accountant: AbstractAccountant) -> None:
        self._accountant = accountant
        self._values: dict[object, float] = {}

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return the accountant's ε, computed or kept."""
        key = frozenset(counted(map(check_entry, history))), delta, relation
        if key not in self._values:
            if len(self._values) == _MOST:
                del self._values[next(iter(self._values))]
            self._values[key] = self._accountant.epsilon(history, delta, relation)
        return self._values[key]


@functools.lru_cache(maxsize=16)  # asked at every step, of few values
def float32_above(epsilon: float) -> float:
    """Return the least float32 that is not below ε: what loggers that store 32 bits must be given.

    Example:
        >>> float32_above(0.1) >= 0.1, float32_above(0.25)
        (True, 0.25)
    """
    with np.errstate(over="ignore"):  # that is inf
        nearest = np.float32(epsilon)
    if float(nearest) < epsilon:
        nearest = np.nextafter(nearest, np.float32(math.inf))
    return float(nearest)
