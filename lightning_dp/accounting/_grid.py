"""The automatic grid: fine enough for a wanted relative accuracy, no finer; for one length, or many.

Connecting the dots replaces a loss by one of its two neighbours on the grid and multiplies its
moment of order t by at most ``1 + t (t + 1) h^2 / 8``. By Chernoff's bound
``epsilon <= (K(t) + log g_max(t) - log delta) / t``, so T steps inflate epsilon by about
``T (t + 1) h^2 / 8``: a fixed h is a trap for many small steps. Here h is refined until this is
below ``rtol * epsilon``, with t the best tilt and T the expected number of steps, under the tilt,
whose loss is not at the grid point 0.

Lengths of one run that are close share a grid, a tilt and the transforms (:class:`CurveSearch`); where
these turn out to be poor for a length, it starts another group. Every value carries its own errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_matrix

from lightning_dp.accounting._composition import (
    Composed,
    ComposedLengths,
    CountsOf,
    Grid,
    MomentTable,
    compose,
    log_largest_weight,
    mixture_bound,
    useful_tilts,
    window,
)
from lightning_dp.accounting._grouping import Cell, Mixture, as_mixture, rounded
from lightning_dp.accounting._pmf import LossPmf, Node, cached_pmf
from lightning_dp.accounting.base import check_relation
from lightning_dp.accounting.events import AbstractEvent, History
from lightning_dp.accounting.gdp import HUGE, gdp_epsilon
from lightning_dp.accounting.steps import (
    ALL_NOISE,
    EventPlan,
    FloatArray,
    Steps,
    merge,
    pairs_of,
)

IntArray = NDArray[np.int64]

_POSITIVE = np.geomspace(1e-3, 1e7, 45)  # tilts, for losses of one step that reach as far as ...
_SHORT = 1e-3  # ... this, or farther
_NEAR = np.geomspace(0.3, 8.0, 18)
_MAX_POINTS = 2**20  # of the pmf of one step
_LONG = 2**18  # points of a grid that is not refined any more ...
_LONGEST = 2**21  # ... and of one on which rare losses make all of the cost
_TOO_LONG = 2**22  # of a window: its composition would take seconds, and gigabytes
_LOG_OUTSIDE = math.log(1e-12)  # of the tilted mass outside the window
_LOG_LOSS = 3.0  # of accuracy, relative to the best tilt
_LEAST_LOG_DELTA = -690.0  # about 1e-300: masses of smaller ones are no numbers
_LOG_TRUNCATED = -14.0  # of the mass of delta that may be moved to infinity
_EXACT = 32  # so few distinct steps are never grouped
_ROUGH_SPACING = 0.8  # of the nodes with which a grid is looked for
_ROUGH_ROUNDING = 0.05  # of their noise and rates
_MAX_ROUNDS = 8  # of grids, each finer than the one before
_RARE = 0.3  # of Chernoff's bound: a few rare losses make all of the cost
_ALL_POINTS = 5e7  # of all nodes together: about a second, for each direction
_BEYOND = 9.0  # a loss so far above epsilon counts as 1 - e^-9 anyway
_GROUP_POINTS = 2e7  # of the transforms of a group of lengths
_MAX_TOGETHER = 64  # lengths that share a grid
_MAX_RATIO = 4.0  # of the longest to the shortest of them
_NEAR_NEXT = 0.7  # of the next longer length's epsilon: losses below are left out at first


@dataclass(frozen=True)
class Target:
    """The wanted point of the curve: epsilon at ``log_delta``, or delta at ``epsilon``."""

    log_delta: float | None = None
    epsilon: float | None = None

    def read(self, composed: Composed) -> float:
        """The wanted value."""
        if self.log_delta is not None:
            return composed.epsilon(math.exp(self.log_delta))
        assert self.epsilon is not None
        return composed.delta(self.epsilon)

    def value_of_bound(self, bound: float) -> float:
        """Chernoff's bound as epsilon or delta."""
        return max(bound, 0.0) if self.log_delta is not None else math.exp(min(bound, 0.0))

    def epsilon_of_bound(self, bound: float) -> float:
        return bound if self.epsilon is None else self.epsilon

    def trusts(self, bound: float, value: float) -> bool:
        """True if a grid made for the bound is good enough for the value."""
        return self.log_delta is not None and value >= 0.8 * bound

    def tolerance(self, value: float, rtol: float) -> float:
        """A change of the value that is not worth a finer grid."""
        return 4 * rtol * value if self.log_delta is None else 2 * rtol * value + 1e-7


@dataclass(frozen=True)
class GridPlan:
    """A grid, the truncation of the pmfs, and Chernoff's bound: of epsilon, or of log delta."""

    grid: Grid
    log_tail: float
    limit: float
    bound: float
    reach: float  # of the losses of one step

    @property
    def is_too_long(self) -> bool:
        """True if nothing can be composed on it."""
        return self._points > _TOO_LONG

    @property
    def _points(self) -> float:
        low, high = self.grid.ends
        return (high - low) / self.grid.h

    def is_long(self, is_rare: bool) -> bool:
        """True if a finer grid would take too long; for one step with rare losses, less soon."""
        points = max(self._points, min(self.limit, self.reach) / self.grid.h)
        return points > (_LONGEST if is_rare else _LONG)


@dataclass(frozen=True)
class GridSearch:
    """Finds a grid that is fine enough for one of the pairs (P, Q) and, backward, (Q, P)."""

    rtol: float  # relative accuracy of epsilon with respect to the grid
    spacing: float  # relative distance of the noise multipliers between which is interpolated
    others: tuple[tuple[Node, int], ...]  # releases that are composed with all steps
    relation: str
    target: Target  # to be read
    backward: bool = False

    def worst_direction(self, steps: Steps) -> float:
        """Return the larger value of removing and adding a record; exchanging one is symmetric."""
        merged = _merge_full_batch(steps)
        value = self.value(merged, 0.0)
        if self.relation != "replace_one":
            value = max(value, replace(self, backward=True).value(merged, value))
        return value

    def profile(self, steps: Steps, epsilons: Sequence[float]) -> list[float]:
        """Return bounds of delta at each epsilon, all read from the grid of the target's epsilon."""
        at = self.target.epsilon
        if all(epsilon == at for epsilon in epsilons):
            return [self.worst_direction(steps)] * len(epsilons)
        merged = _merge_full_batch(steps)
        values = self._profile(merged, epsilons, 0.0)
        if self.relation != "replace_one":
            # Where this direction does not count at the target, its grid need not be fine.
            least = max(v for e, v in zip(epsilons, values, strict=True) if e == at)
            backward = replace(self, backward=True)._profile(merged, epsilons, least)
            values = [max(both) for both in zip(values, backward, strict=True)]
        return values

    def _profile(self, steps: Steps, epsilons: Sequence[float], least: float) -> list[float]:
        assert self.target.epsilon is not None
        mixture = self.rough(steps)
        plan, value = self.settle(mixture, least)
        # Delta falls with epsilon.
        bounds = [value if epsilon >= self.target.epsilon else 1.0 for epsilon in epsilons]
        if plan.is_too_long:
            return bounds
        if steps.counts.size > _EXACT:
            mixture = self.fine(steps, plan, _ALL_POINTS)
        composed = compose(mixture, self.maker(mixture, plan), plan.grid)
        return [
            min(bound, composed.delta(epsilon))
            for bound, epsilon in zip(bounds, epsilons, strict=True)
        ]

    def value(self, steps: Steps, least: float) -> float:
        """Return the value of merged steps, or a lower one if it is at most ``least``."""
        # The rough reading costs more than the steps do: its value is a bound, and its grid will do.
        plan, value = self.settle(self.rough(steps), least)
        if steps.counts.size <= _EXACT or value <= least or plan.is_too_long:
            return value
        mixture = self.fine(steps, plan, _ALL_POINTS)
        return float(min(value, self._read(mixture, plan)))

    def rough(self, steps: Steps) -> Mixture:
        """Few nodes, to find the grid with; the steps themselves if they are few."""
        few, exact = steps, _EXACT
        if steps.counts.size > _EXACT:
            few, exact = rounded(steps, _ROUGH_ROUNDING), 1
        return as_mixture(few, self.relation, _ROUGH_SPACING, exact).beside(self.others)

    def fine(self, steps: Steps, plan: GridPlan, most_points: float) -> Mixture:
        """Nodes at the wanted distance, or as near as the number of grid points allows."""
        spacing = self.spacing
        while True:
            mixture = as_mixture(steps, self.relation, spacing, _EXACT).beside(self.others)
            few = self._points(mixture, plan) <= most_points
            if mixture.is_exact or few or spacing >= _ROUGH_SPACING:
                return mixture
            spacing *= 1.2

    def _points(self, mixture: Mixture, plan: GridPlan) -> float:
        """Number of grid points of all pmfs and transforms together, a measure of time."""
        window_width = plan.grid.ends[1] - plan.grid.ends[0]
        total = 0.0
        for node in mixture.nodes:
            down, up = node.support(plan.log_tail, self.relation)
            total += min(down, plan.limit) + min(up, plan.limit) + window_width
        return total / plan.grid.h

    def settle(self, mixture: Mixture, least: float) -> tuple[GridPlan, float]:
        """Return a grid that is fine enough, and the value on it or on a finer one.

        The first grid has the accuracy wanted for Chernoff's bound. Where that is far above the
        value, the grid is refined until the value settles.
        """
        value, rtol = math.inf, self.rtol
        plan = finer = self.plan(mixture, least, math.inf)
        for _ in range(_MAX_ROUNDS):
            bound = self.target.value_of_bound(finer.bound)
            if bound <= least:
                return finer, bound
            if finer.is_too_long:
                return plan, min(value, bound)
            # Each of them is an upper bound, so the least one is.
            last, value = value, min(value, self._read(mixture, finer), bound)
            if last - value <= self.target.tolerance(value, rtol):
                return plan, value
            plan = finer
            is_rare = len(mixture.nodes) == 1 and value < _RARE * bound
            if value <= least or finer.is_long(is_rare) or self.target.trusts(bound, value):
                break
            finer = self.plan(mixture, least, plan.grid.h / 4)
        return plan, value

    def _read(self, mixture: Mixture, plan: GridPlan) -> float:
        return self.target.read(compose(mixture, self.maker(mixture, plan), plan.grid))

    def maker(self, mixture: Mixture, plan: GridPlan) -> Callable[[int], LossPmf]:
        """A function from a node to its pmf on the grid of a plan; remembered when there are few."""
        where = (plan.grid.h, plan.log_tail, self.relation, self.backward, plan.limit)
        if len(mixture.nodes) <= 4:
            return lambda number: cached_pmf(mixture.nodes[number], *where)
        return lambda number: mixture.nodes[number].pmf(*where)

    def plan(self, mixture: Mixture, least: float, coarsest: float) -> GridPlan:
        """Refine a coarse grid until connecting the dots costs at most ``rtol`` of ``epsilon``.

        Args:
            mixture: the steps, or a rough pessimistic reading of them with few nodes.
            least: an epsilon below which accuracy is of no interest.
            coarsest: an upper limit of h.
        """
        target, log_steps = self.target, math.log(mixture.total)
        log_tail = _tail(-30.0 if target.log_delta is None else target.log_delta, log_steps)
        least = least if target.epsilon is None else 0.0
        # No epsilon that is asked for here is larger: without a limit, losses of steps with little
        # noise would take all memory.
        limit, h = -_snap(-(max(HUGE, target.epsilon or 0.0) + _BEYOND)), 0.0
        # Grid, moments, best tilt and epsilon depend on each other: refine until they agree.
        while True:
            reach = max(sum(node.support(log_tail, self.relation)) for node in mixture.nodes)
            h = h if h > 0 else min(_snap(reach / 512), coarsest, 1.0)
            # Tilts go as one over a loss.
            positive = _POSITIVE if reach >= _SHORT else _POSITIVE * -_snap(-_SHORT / reach)
            plan = GridPlan(Grid(h, 0.0, (0.0, 0.0), positive), log_tail, limit, math.inf, reach)
            make = self.maker(mixture, plan)
            pmfs = [make(node) for node in range(len(mixture.nodes))]
            # A step is a mixture of its corners, and so has at most the largest of their masses.
            infinity = sum(
                cell.total * max(pmfs[k].infinity for k in cell.corners) for cell in mixture.cells
            )
            moments = _moments(pmfs, h, positive)
            bounds = mixture_bound(mixture, moments)
            # Beyond a few 1 / h connecting the dots alone makes the moments large, as said above.
            best, bound = _chernoff(positive, bounds, target, infinity, 4 / h)
            tilt, epsilon = float(positive[best]), target.epsilon_of_bound(bound)
            # Accuracy relative to epsilon; where epsilon is nearly 0, to the width of the loss.
            scale = max(epsilon, least, 0.1 * _deviation(positive, bounds, best), 1e-9)
            # spread (tilt + 1) h^2 / 8 <= rtol scale, by the docstring of the module.
            spread = _spread(mixture, pmfs, moments[:, best])
            wanted = math.sqrt(8 * self.rtol * scale / ((tilt + 1) * spread))
            wanted = max(wanted, min(reach, scale + _BEYOND) / _MAX_POINTS)
            tail = log_tail
            if target.log_delta is None:  # not known before: truncate relative to its bound
                finite = _chernoff(positive, bounds, target, 0.0, 4 / h)[1]
                tail = _tail(max(min(finite, 0.0), _LEAST_LOG_DELTA), log_steps)
            if h <= wanted and tail >= log_tail:
                break
            # On a coarse grid all of this is rough, so the wanted spacing is approached in turns.
            h, log_tail = min(h, max(_snap(wanted), h / 32)), tail
            if math.isfinite(epsilon):
                limit = -_snap(-(epsilon + _BEYOND))
        coarse = np.concatenate((-positive[::-3], [0.0], positive[::3]))
        tilts = np.concatenate((-tilt * _NEAR, coarse, tilt * _NEAR))
        bounds = mixture_bound(mixture, _moments(pmfs, h, tilts))
        _, bound = _chernoff(tilts, bounds, target, infinity, 4 / h)
        epsilon = target.epsilon_of_bound(bound)
        tilt, ends = _narrowest(tilts, bounds, min(epsilon, 1e6), 4 / h)
        useful = useful_tilts(tilts, bounds, tilt, ends)
        return GridPlan(Grid(h, tilt, ends, tilts[useful]), log_tail, limit, bound, reach)


def _merge_full_batch(steps: Steps) -> Steps:
    """Full-batch Gaussians are together one Gaussian, exactly."""
    full = steps.sample_rates == 1.0
    if np.count_nonzero(full) == 0:
        return steps
    z = 1 / math.sqrt(math.fsum(steps.counts[full] / steps.noise_multipliers[full] ** 2))
    return Steps(
        np.append(steps.noise_multipliers[~full], z),
        np.append(steps.sample_rates[~full], 1.0),
        np.append(steps.counts[~full], 1.0),
    )


def _moments(pmfs: list[LossPmf], h: float, tilts: FloatArray) -> FloatArray:
    """Log moments: a row for each node, a column for each tilt."""
    table, at = None, (h, tilts.tobytes())
    for pmf in pmfs:
        if at not in pmf.moments:  # of a pmf that is remembered, where only counts differ
            table = table or MomentTable(h, tilts)
            pmf.moments[at] = table.of(pmf)
    return np.stack([pmf.moments[at] for pmf in pmfs])


def _narrowest(
    tilts: FloatArray, bounds: FloatArray, epsilon: float, largest_tilt: float
) -> tuple[float, tuple[float, float]]:
    """Among the tilts whose bound of delta at ``epsilon`` is nearly the best, the narrowest window.

    Just above the best tilt the moments may explode: rare large losses begin to dominate.
    """
    usable = np.flatnonzero((tilts > 0) & (tilts <= largest_tilt) & (tilts < tilts.max()))
    t = tilts[usable]
    exponent = bounds[usable] + log_largest_weight(t) - t * epsilon
    good = usable[exponent <= exponent.min() + _LOG_LOSS]
    choices = [
        (float(tilts[i]), window(tilts, bounds, float(tilts[i]), _LOG_OUTSIDE)) for i in good
    ]
    return min(choices, key=lambda choice: choice[1][1] - choice[1][0])


def _tail(log_delta: float, log_steps: float) -> float:
    """The logarithm of the mass of one step to move to infinity; in steps of 8, to share pmfs."""
    return 8.0 * math.floor((log_delta - log_steps + _LOG_TRUNCATED) / 8.0)


def _snap(h: float) -> float:
    """The power of the square root of 2 below h (-h: above), so that nearby calls share grids."""
    if h < 0:
        return -float(2.0 ** (math.ceil(2 * math.log2(-h)) / 2))
    return float(2.0 ** (math.floor(2 * math.log2(h)) / 2))


def _chernoff(
    tilts: FloatArray, bounds: FloatArray, target: Target, infinity: float, largest_tilt: float
) -> tuple[int, float]:
    """Index of the best tilt in (0, largest_tilt], and the bound: of epsilon, or of log delta."""
    usable = np.flatnonzero((tilts > 0) & (tilts <= largest_tilt) & (tilts < tilts.max()))
    t = tilts[usable]
    reach = bounds[usable] + log_largest_weight(t)
    if target.log_delta is not None:
        room = math.exp(target.log_delta) * (1 - 1e-9) - infinity
        log_room = math.log(room) if room > 0 else target.log_delta
        values = (reach - log_room) / t
        best = int(np.argmin(values))
        return int(usable[best]), float(values[best]) if room > 0 else math.inf
    assert target.epsilon is not None
    values = reach - t * target.epsilon
    best = int(np.argmin(values))
    finite = float(values[best])
    log_infinity = math.log(infinity) if infinity > 0 else -math.inf
    return int(usable[best]), float(np.logaddexp(finite, log_infinity)) + 1e-9


def _deviation(tilts: FloatArray, bounds: FloatArray, best: int) -> float:
    """Standard deviation of the tilted loss, from the second difference of K on the table."""
    middle = min(max(best, 1), tilts.size - 2)
    t, k = tilts[middle - 1 : middle + 2], bounds[middle - 1 : middle + 2]
    slopes = np.diff(k) / np.diff(t)
    return math.sqrt(max(2 * float(slopes[1] - slopes[0]) / float(t[2] - t[0]), 0.0))


def _spread(mixture: Mixture, pmfs: list[LossPmf], moments: FloatArray) -> float:
    """Expected number of steps, under the tilt, whose loss is not at the grid point 0."""
    total = 0.0
    center = np.array([p.probabilities[-p.start] for p in pmfs])
    for cell in mixture.cells:
        corners = list(cell.corners)
        weights = (cell.counts @ cell.weights()) * np.exp(moments[corners] - moments[corners].max())
        at_zero = center[corners] * np.exp(-moments[corners])
        total += cell.total * max(1 - float(weights @ at_zero / weights.sum()), 0.0)
    return max(total, 1.0)


# -- many lengths ------------------------------------------------------------------------------


class CurveSearch:
    """The lengths of one run, in groups that share a grid."""

    def __init__(self, search: GridSearch, delta: float) -> None:
        self._search, self._delta = search, delta

    def values(self, run: Run) -> FloatArray:
        """epsilon of every length."""
        relation = self._search.relation
        if self._search.others:
            without = np.full(run.size, math.inf)
        else:  # without amplification: exact for full batches, a bound for all
            factor = check_relation(relation)
            squares = run.sums(run.counts * (1 / run.noise_multipliers[run.pairs]) ** 2)
            mus = [factor * math.sqrt(square) for square in squares]
            without = np.array([gdp_epsilon(mu, self._delta) for mu in mus])
            if np.all(run.sample_rates == 1.0):
                return without
        values = np.zeros(run.size)
        self._raise_to(values, run, self._search)
        if relation != "replace_one":
            self._raise_to(values, run, replace(self._search, backward=True))
        return np.asarray(np.minimum(values, without))

    def _raise_to(self, values: FloatArray, run: Run, search: GridSearch) -> None:
        """Raise ``values`` to those of one direction, in groups from the longest length down."""
        steps = run.sums(run.counts)
        last = run.size
        while last > 0 and steps[last - 1] > 0:
            first = int(np.argmax(steps[:last] * _MAX_RATIO >= steps[last - 1]))
            first = max(first, last - _MAX_TOGETHER)
            found = self._group(run.part(first, last), search, float(values[last - 1]))
            part = values[last - found.size : last]
            part[:] = np.maximum(part, found)
            last -= found.size

    def _group(self, run: Run, search: GridSearch, least: float) -> FloatArray:
        """epsilon of the last length, and of those just before it for which its grid is good."""
        lengths = self._compose(run, search, least)
        if lengths is None:
            return np.array([search.value(run.steps(), least)])
        values: list[float] = []
        longest, allowed = 0.0, 0.0
        for k in range(run.size - 1, -1, -1):
            composed, value = self._read(lengths, k, values[-1] if values else -math.inf)
            good = composed.has_small_error(value, self._delta)
            if not values:
                if not good:
                    value = min(value, search.value(run.steps(), least))
                longest = value
            if value > 0:
                # What connecting the dots costs, by the docstring of the module; tilts go as
                # 1 / epsilon.
                tilt = composed.tilt * longest / value
                cost = lengths.steps[k] * (tilt + 1) * composed.h**2 / value
                allowed = allowed or 2 * cost
                good = good and cost <= allowed
            if values and not good:
                break
            values.append(value)
        return np.array(values[::-1])

    def _compose(self, run: Run, search: GridSearch, least: float) -> ComposedLengths | None:
        """All lengths, on a grid for the last one with a window that suits the others too.

        None where no grid could be composed.
        """
        steps = run.steps()
        rough = search.rough(steps)
        plan, value = search.settle(rough, least)
        if value <= least:  # this direction does not count
            plan = search.plan(rough, 0.0, math.inf)
        if plan.is_too_long:
            return None
        low, high = plan.grid.ends
        plan = replace(plan, grid=replace(plan.grid, ends=(low - (high - low) / 2, high)))
        mixture = search.fine(steps, plan, _GROUP_POINTS)
        make = search.maker(mixture, plan)
        return ComposedLengths(mixture, make, plan.grid, run.counts_of())

    def _read(self, lengths: ComposedLengths, k: int, next_value: float) -> tuple[Composed, float]:
        """The k-th length and its epsilon, which is likely to be near that of the next length."""
        composed = lengths.composed(k, above=_NEAR_NEXT * next_value)
        value = composed.epsilon(self._delta)
        if value <= _NEAR_NEXT * next_value + 2 * composed.h:
            composed = lengths.composed(k)
            value = composed.epsilon(self._delta)
        return composed, value


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
            np.minimum(known.real, ALL_NOISE),
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
