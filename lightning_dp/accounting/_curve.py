"""epsilon along a plan: many lengths of one run, composed together.

Lengths that are close share a grid, a tilt and the transforms; where these turn out to be poor for
a length, it starts another group. Every value carries its own errors, as in
:mod:`_composition`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_matrix

from lightning_dp.accounting._composition import Composed, ComposedLengths, CountsOf
from lightning_dp.accounting._grid import GridSearch, Target, plan_grid, pmf_maker
from lightning_dp.accounting._grouping import Cell
from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.accounting.events import AbstractEvent, History
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.accounting.steps import EventPlan, FloatArray, Steps, merge, pairs_of

__all__ = ["Run", "Together"]

_MAX_POINTS = 2e7  # of the transforms of a group
_MAX_TOGETHER = 64  # lengths that share a grid
_MAX_RATIO = 4.0  # of the longest to the shortest of them
_NEAR = 0.7  # of the next longer length's epsilon: losses below are left out at first


class Together:
    """The lengths of one run, in groups that share a grid."""

    def __init__(self, search: GridSearch, delta: float, relation: Relation) -> None:
        self._search, self._delta, self._relation = search, delta, relation
        self._target = Target(log_delta=math.log(delta))

    def values(self, run: Run) -> FloatArray:
        """epsilon of every length."""
        without = self._without(run)
        if np.all(run.sample_rates == 1.0) and not self._search.others:
            return without
        values = np.zeros(run.size)
        self._raise_to(values, run, backward=False)
        if self._relation == "add_remove":
            self._raise_to(values, run, backward=True)
        return np.asarray(np.minimum(values, without))

    def _without(self, run: Run) -> FloatArray:
        """epsilon without amplification: exact for full batches, a bound for all; inf next to others."""
        if self._search.others:
            return np.full(run.size, math.inf)
        factor = check_relation(self._relation)
        squares = run.sums(run.counts * (1 / run.noise_multipliers[run.pairs]) ** 2)
        return np.array([gdp_epsilon(factor * math.sqrt(s), self._delta) for s in squares])

    def _raise_to(self, values: FloatArray, run: Run, backward: bool) -> None:
        """Raise ``values`` to those of one direction, in groups from the longest length down."""
        steps = run.sums(run.counts)
        last = run.size
        while last > 0 and steps[last - 1] > 0:
            first = int(np.argmax(steps[:last] * _MAX_RATIO >= steps[last - 1]))
            first = max(first, last - _MAX_TOGETHER)
            found = self._group(run.part(first, last), backward, float(values[last - 1]))
            part = values[last - found.size : last]
            part[:] = np.maximum(part, found)
            last -= found.size

    def _group(self, run: Run, backward: bool, least: float) -> FloatArray:
        """epsilon of the last length, and of those just before it for which its grid is good."""
        lengths = self._compose(run, backward, least)
        if lengths is None:
            return np.array([self._alone(run, backward, least)])
        values: list[float] = []
        longest, allowed = 0.0, 0.0
        for k in range(run.size - 1, -1, -1):
            composed, value = self._read(lengths, k, values[-1] if values else -math.inf)
            good = composed.has_small_error(value, self._delta)
            if not values:
                if not good:
                    value = min(value, self._alone(run, backward, least))
                longest = value
            if value > 0:
                # What connecting the dots costs, see the module grid; tilts go as 1 / epsilon.
                tilt = composed.tilt * longest / value
                cost = lengths.steps[k] * (tilt + 1) * composed.h**2 / value
                allowed = allowed or 2 * cost
                good = good and cost <= allowed
            if values and not good:
                break
            values.append(value)
        return np.array(values[::-1])

    def _compose(self, run: Run, backward: bool, least: float) -> ComposedLengths | None:
        """All lengths, on a grid for the last one with a window that suits the others too.

        None where no grid could be composed.
        """
        search, relation, steps = self._search, self._relation, run.steps()
        rough = search.rough(steps, relation)
        plan, value = search.settle(rough, self._target, relation, backward, least)
        if value <= least:  # this direction does not count
            rtol = search.rtol
            plan = plan_grid(rough, self._target, rtol, relation, backward, 0.0, math.inf)
        if plan.is_too_long:
            return None
        low, high = plan.grid.ends
        plan = replace(plan, grid=replace(plan.grid, ends=(low - (high - low) / 2, high)))
        mixture = search.fine(steps, plan, relation, _MAX_POINTS)
        make = pmf_maker(mixture, plan, relation, backward)
        return ComposedLengths(mixture, make, plan.grid, run.counts_of())

    def _alone(self, run: Run, backward: bool, least: float) -> float:
        """epsilon of the last length on a separate grid."""
        return self._search.one_direction(
            run.steps(), self._target, self._relation, backward, least
        )

    def _read(self, lengths: ComposedLengths, k: int, next_value: float) -> tuple[Composed, float]:
        """The k-th length and its epsilon, which is likely to be near that of the next length."""
        composed = lengths.composed(k, above=_NEAR * next_value)
        value = composed.epsilon(self._delta)
        if value <= _NEAR * next_value + 2 * composed.h:
            composed = lengths.composed(k)
            value = composed.epsilon(self._delta)
        return composed, value


IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Distinct ``(z, q)``, and items ``(pair, count)`` in the order of time.

    ``pairs[i]`` is the number of the pair of item i; ``ends[k]`` items belong to the k-th length of
    interest. Lengths increase.
    """

    noise_multipliers: FloatArray
    sample_rates: FloatArray
    pairs: IntArray
    counts: FloatArray
    ends: IntArray

    @classmethod
    def of(cls, plan: EventPlan, lengths: IntArray, spent: History) -> Run:
        """Past charges, and then a plan; ``lengths`` of the plan in increasing order."""
        merge(spent)  # checks it
        items = [(event, count) for event, count in spent if count]
        ends = np.full(lengths.size, len(items))
        more: tuple[FloatArray, FloatArray] = (np.zeros(0), np.zeros(0))
        if isinstance(plan, AbstractEvent):
            repeats = np.diff(lengths, prepend=0)
            items.extend((plan, int(count)) for count in repeats if count)
            ends = ends + np.cumsum(repeats > 0)
        elif lengths.size:
            more = pairs_of(plan, 0, int(lengths[-1]))
            ends = ends + lengths
        table = np.array([event.pair for event, _ in items], dtype=float).reshape(-1, 2)
        counts = np.array([float(count) for _, count in items])
        pairs = np.append(table[:, 0], more[0]) + 1j * np.append(table[:, 1], more[1])
        known, numbers = np.unique(pairs, return_inverse=True)
        return cls(
            known.real.copy(),
            known.imag.copy(),
            np.asarray(numbers.reshape(-1), dtype=np.int64),
            np.append(counts, np.ones(more[0].size)),
            ends,
        )

    @property
    def size(self) -> int:
        """Number of lengths."""
        return int(self.ends.size)

    def sums(self, values: FloatArray) -> FloatArray:
        """Sum of ``values`` of the items for each length."""
        return np.asarray(np.concatenate(([0.0], np.cumsum(values)))[self.ends])

    def part(self, first: int, last: int) -> Run:
        """Some of the lengths, and the pairs that they use."""
        end = int(self.ends[last - 1])
        used, numbers = np.unique(self.pairs[:end], return_inverse=True)
        return Run(
            self.noise_multipliers[used],
            self.sample_rates[used],
            np.asarray(numbers, dtype=np.int64),
            self.counts[:end],
            self.ends[first:last],
        )

    def steps(self) -> Steps:
        """All steps: the pairs in the order of their numbers."""
        totals = np.bincount(self.pairs, weights=self.counts, minlength=self.noise_multipliers.size)
        return Steps(self.noise_multipliers, self.sample_rates, np.asarray(totals))

    def counts_of(self) -> CountsOf:
        """A function from a cell of :meth:`steps` to the numbers of its members in each length."""
        length = np.searchsorted(self.ends, np.arange(self.pairs.size), side="right")
        shape = (self.size, self.noise_multipliers.size)
        added = csc_matrix((self.counts, (length, self.pairs)), shape=shape)

        def counts(cell: Cell) -> FloatArray:
            if cell.members.size == 0:  # other releases, which all lengths share
                return np.tile(cell.counts, (self.size, 1))
            return np.cumsum(added[:, cell.members].toarray(), axis=0)

        return counts
