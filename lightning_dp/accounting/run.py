"""What a run did, in the order of time, and the numbers of its distinct steps after some lengths."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_matrix

from lightning_dp.accounting.base import FloatArray, History, Steps, merge
from lightning_dp.accounting.composition import CountsOf
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.grouping import Cell
from lightning_dp.accounting.pair_plan import EventPlan, pairs_of

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Distinct ``(z, q)``, and items ``(pair, count)`` in the order of time.

    ``pairs[i]`` is the number of the pair of item i; ``ends[k]`` items belong to the k-th length of
    interest. Lengths increase. ``events`` are the first items; those after them are the plan's,
    where it is a function of the step.
    """

    noise_multipliers: FloatArray
    sample_rates: FloatArray
    pairs: IntArray
    counts: FloatArray
    ends: IntArray
    events: list[tuple[AbstractEvent, int]]
    plan: EventPlan

    @classmethod
    def of(cls, plan: EventPlan, lengths: IntArray, spent: History) -> "Run":
        """What was spent, and then a plan; ``lengths`` of the plan in increasing order."""
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
            items,
            plan,
        )

    @property
    def size(self) -> int:
        """Number of lengths."""
        return int(self.ends.size)

    def history(self, k: int) -> History:
        """The history of the k-th length."""
        end = int(self.ends[k])
        if isinstance(self.plan, AbstractEvent):
            return self.events[:end]
        return [*self.events, *((self.plan(t), 1) for t in range(end - len(self.events)))]

    def sums(self, values: FloatArray) -> FloatArray:
        """Sum of ``values`` of the items for each length."""
        return np.asarray(np.concatenate(([0.0], np.cumsum(values)))[self.ends])

    def part(self, first: int, last: int) -> "Run":
        """Some of the lengths, and the pairs that they use."""
        end = int(self.ends[last - 1])
        used, numbers = np.unique(self.pairs[:end], return_inverse=True)
        return Run(
            self.noise_multipliers[used],
            self.sample_rates[used],
            np.asarray(numbers, dtype=np.int64),
            self.counts[:end],
            self.ends[first:last],
            self.events,
            self.plan,
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
            return np.cumsum(added[:, cell.members].toarray(), axis=0)

        return counts
