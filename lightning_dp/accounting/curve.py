"""epsilon along a plan: many lengths of one run, composed together.

The characteristic function of the first n steps is the product over these steps. Its logarithm at
one frequency is a sum over steps, and inside a cell of :mod:`grouping` a series in the two
weights: for all lengths at once it is a matrix of cumulated moments times a matrix of transforms.
Lengths that are close share a grid and a tilt; where these turn out to be poor for a length, it is
given a grid of its own. Every value carries its own errors, as in :mod:`composition`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import fft

from lightning_dp.accounting.base import (
    AbstractAccountant,
    FloatArray,
    History,
    Relation,
    Steps,
    check_delta,
    check_relation,
    merge,
)
from lightning_dp.accounting.composition import Composed
from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.gdp import gdp_epsilon
from lightning_dp.accounting.grid import Plan, Target, grid_points, plan_grid, pmf_maker
from lightning_dp.accounting.grouping import Cell, Mixture, as_mixture
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.accounting.pmf import LossPmf
from lightning_dp.accounting.tilting import MomentTable, log_largest_weight, outside

EventPlan = Callable[[int], AbstractEvent] | AbstractEvent
ComplexArray = NDArray[np.complex128]
IntArray = NDArray[np.int64]

_EXACT = 32
_ROUGH_SPACING = 0.8
_MAX_POINTS = 2e7
_MAX_TOGETHER = 64  # lengths that share a grid
_MAX_RATIO = 4.0  # of the longest to the shortest of them
_MAX_ORDER = 6
_TRUNCATION = 1e-8
_FEW = 8
_NEGLIGIBLE = -46.0
_TINY = 1e-300
_UNIT = 2.0**-52
_ALL_STEPS = 32
_RATIO = 1.02


def epsilon_curve(
    plan: EventPlan,
    at_steps: ArrayLike,
    delta: float,
    relation: Relation = "add_remove",
    accountant: AbstractAccountant | None = None,
    spent: History = (),
) -> FloatArray:
    """epsilon after each of several numbers of steps of a plan, in one go.

    Args:
        plan: one event for all steps, or a function from the step 0, 1, ... to its event.
        at_steps: numbers of steps, each at least 0, in any order.
        delta: in (0, 1).
        relation: ``"add_remove"`` or ``"replace_one"``.
        accountant: :class:`PLDAccountant` by default, for which lengths share their work.
        spent: what ran before.

    Returns:
        For each n in ``at_steps`` an upper bound of the epsilon of ``spent`` and the first n
        steps. It does not fall with n.

    Raises:
        ValueError: if an argument is illegal.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> epsilon_curve(PoissonGaussian(1.0, 0.01), [0, 100, 1000], delta=1e-5).round(2)
        array([0.  , 0.72, 1.83])
    """
    check_delta(delta)
    check_relation(relation)
    lengths = _check_lengths(at_steps)
    judge = PLDAccountant() if accountant is None else accountant
    distinct, places = np.unique(lengths, return_inverse=True)
    run = _Run.of(plan, distinct, spent)
    if not isinstance(judge, PLDAccountant) or np.any(run.noise_multipliers == 0.0):
        values = np.array([judge.epsilon(run.history(k), delta, relation) for k in range(run.size)])
    else:
        values = _Together(judge, run, delta, relation).values()
    return np.asarray(np.maximum.accumulate(values)[places].reshape(lengths.shape))


class EpsilonCurve:
    """epsilon along a plan, read pessimistically between nodes.

    The nodes are every number of steps up to 32, then a geometric sequence with ratio 1.02, and
    ``steps``. They are computed together when the first value is read.

    Args:
        plan: one event for all steps, or a function from the step 0, 1, ... to its event.
        steps: length of the plan, at least 0.
        delta: in (0, 1).
        relation: ``"add_remove"`` or ``"replace_one"``.
        accountant: :class:`PLDAccountant` by default.
        spent: what ran before.

    Raises:
        ValueError: if an argument is illegal.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> curve = EpsilonCurve(PoissonGaussian(1.0, 0.01), steps=100, delta=1e-5)
        >>> round(curve.at(100), 2)
        0.72
    """

    def __init__(
        self,
        plan: EventPlan,
        steps: int,
        delta: float,
        relation: Relation = "add_remove",
        accountant: AbstractAccountant | None = None,
        spent: History = (),
    ) -> None:
        self._arguments = (plan, check_delta(delta), relation, accountant, spent)
        check_relation(relation)
        self.nodes = _nodes(int(_check_lengths([steps])[0]))
        self._values: FloatArray | None = None

    def at(self, steps: int) -> float:
        """epsilon after ``steps`` steps: the value of the next node, so never below the truth."""
        if not 0 <= steps <= self.nodes[-1]:
            raise ValueError(f"steps must be in 0 .. {self.nodes[-1]}, got {steps}.")
        if self._values is None:
            plan, delta, relation, accountant, spent = self._arguments
            self._values = epsilon_curve(plan, self.nodes, delta, relation, accountant, spent)
        return float(self._values[np.searchsorted(self.nodes, steps)])


def _nodes(steps: int) -> IntArray:
    """Every length up to 32, then a geometric sequence, and the last."""
    nodes = list(range(min(steps, _ALL_STEPS) + 1))
    while nodes[-1] < steps:
        nodes.append(min(steps, max(nodes[-1] + 1, int(nodes[-1] * _RATIO))))
    return np.array(nodes, dtype=np.int64)


def _check_lengths(at_steps: ArrayLike) -> IntArray:
    """Return legal numbers of steps, or raise."""
    lengths = np.asarray(at_steps)
    if lengths.size == 0:
        return lengths.astype(np.int64)
    if not np.issubdtype(lengths.dtype, np.integer) or not np.all(lengths >= 0):
        raise ValueError(f"at_steps must be integers of at least 0, got {at_steps!r}.")
    return lengths.astype(np.int64)


@dataclass(frozen=True)
class _Run:
    """What ran: distinct ``(z, q)``, and items ``(pair, count)`` in the order of time.

    ``ends[k]`` items belong to the k-th length; ``pairs[i]`` is the number of the pair of item i.
    """

    noise_multipliers: FloatArray
    sample_rates: FloatArray
    pairs: IntArray
    counts: FloatArray
    ends: IntArray
    events: list[tuple[AbstractEvent, int]]

    @classmethod
    def of(cls, plan: EventPlan, lengths: IntArray, spent: History) -> "_Run":
        """The run of a plan, with the lengths in increasing order."""
        merge(spent)  # checks it
        items = [(event, count) for event, count in spent if count]
        ends = np.full(lengths.size, len(items))
        if isinstance(plan, AbstractEvent):
            previous = 0
            for k, n in enumerate(lengths.tolist()):
                if n > previous:
                    items.append((plan, n - previous))
                    previous = n
                ends[k] = len(items)
        elif lengths.size:
            items.extend((plan(step), 1) for step in range(int(lengths[-1])))
            ends = ends + lengths
        known: dict[tuple[float, float], int] = {}
        pairs = [known.setdefault(event.pair, len(known)) for event, _ in items]
        table = np.array(list(known), dtype=float).reshape(-1, 2)
        counts = np.array([float(count) for _, count in items])
        numbers = np.array(pairs, dtype=np.int64)
        return cls(table[:, 0].copy(), table[:, 1].copy(), numbers, counts, ends, items)

    @property
    def size(self) -> int:
        """Number of lengths."""
        return int(self.ends.size)

    def history(self, k: int) -> History:
        """The history of the k-th length."""
        return self.events[: int(self.ends[k])]

    def sums(self, values: FloatArray, members: IntArray | None = None) -> FloatArray:
        """Sum of ``values`` of the items (or of these ``members``, in order) for each length."""
        padded = np.concatenate(([0.0], np.cumsum(values)))
        ends = self.ends if members is None else np.searchsorted(members, self.ends)
        return np.asarray(padded[ends])

    def first(self, k: int) -> Steps:
        """Distinct steps of the k-th length."""
        end = int(self.ends[k])
        totals = np.bincount(
            self.pairs[:end], weights=self.counts[:end], minlength=self.noise_multipliers.size
        )
        used = totals > 0
        counts = np.asarray(totals[used], dtype=np.float64)
        return Steps(self.noise_multipliers[used], self.sample_rates[used], counts)

    def part(self, first: int, last: int) -> "_Run":
        """The run up to the last of some lengths, and these lengths only."""
        end = int(self.ends[last - 1])
        used, numbers = np.unique(self.pairs[:end], return_inverse=True)
        return _Run(
            self.noise_multipliers[used],
            self.sample_rates[used],
            np.asarray(numbers, dtype=np.int64),
            self.counts[:end],
            self.ends[first:last],
            self.events,
        )


class _Together:
    """The lengths of one run, in groups that share a grid."""

    def __init__(
        self, accountant: PLDAccountant, run: _Run, delta: float, relation: Relation
    ) -> None:
        self._accountant, self._run = accountant, run
        self._delta, self._relation = delta, relation
        self._target = Target(log_delta=math.log(delta))

    def values(self) -> FloatArray:
        """epsilon of every length."""
        run = self._run
        factor = check_relation(self._relation)
        squares = run.counts / run.noise_multipliers[run.pairs] ** 2
        cap = np.array([gdp_epsilon(factor * math.sqrt(s), self._delta) for s in run.sums(squares)])
        if np.all(run.sample_rates == 1.0):
            return cap
        values = np.zeros(run.size)
        steps = run.sums(run.counts)
        sides = (False,) if self._relation == "replace_one" else (False, True)
        for backward in sides:
            last = run.size
            while last > 0 and steps[last - 1] > 0:
                near = steps[:last] * _MAX_RATIO >= steps[last - 1]
                first = max(int(np.argmax(near)), last - _MAX_TOGETHER)
                found = self._group(run.part(first, last), backward, values[first:last])
                accepted = last - found.size
                values[accepted:last] = np.maximum(values[accepted:last], found)
                last = accepted
        return np.asarray(np.minimum(values, cap))

    def _group(self, run: _Run, backward: bool, least: FloatArray) -> FloatArray:
        """epsilon of the last length and of those just before it for which its grid is good."""
        steps, accountant = run.first(run.size - 1), self._accountant
        if run.size == 1:
            value = accountant._one_direction(
                steps, self._target, self._relation, backward, float(least[-1])
            )
            return np.array([value])
        rough = as_mixture(steps, self._relation, _ROUGH_SPACING, _EXACT)
        plan, value = accountant._settle(
            rough, self._target, self._relation, backward, float(least[-1])
        )
        if value <= least[-1]:  # this direction does not count
            plan = plan_grid(
                rough, self._target, accountant.rtol, self._relation, backward, 0.0, math.inf
            )
        low, high = plan.grid.ends
        plan = replace(plan, grid=replace(plan.grid, ends=(low - (high - low) / 2, high)))
        mixture = self._mixture(run, plan)
        snapshots = _Snapshots(
            run, mixture, plan, pmf_maker(mixture, plan, self._relation, backward)
        )
        found: list[float] = []
        longest, allowed = 0.0, 0.0
        for k in range(run.size - 1, -1, -1):
            near = 0.7 * found[-1] if found else -math.inf
            composed = snapshots.composed(k, above=near)
            value = composed.epsilon(self._delta)
            if value <= near + 2 * composed.h:
                composed = snapshots.composed(k, above=-math.inf)
                value = composed.epsilon(self._delta)
            good = _has_small_error(composed, value, self._delta)
            if not found:
                if not good:
                    least_useful = float(least[-1])
                    own = accountant._one_direction(
                        steps, self._target, self._relation, backward, least_useful
                    )
                    value = min(value, own)
                longest = value
            if value > 0:
                # What connecting the dots costs, see the module grid; tilts go as 1 / epsilon.
                tilt = composed.tilt * longest / value
                cost = snapshots.steps[k] * (tilt + 1) * composed.h**2 / value
                allowed = allowed or 2 * cost
                good = good and cost <= allowed
            if found and not good:
                break
            found.append(value)
        return np.array(found[::-1])

    def _mixture(self, run: _Run, plan: Plan) -> Mixture:
        """Cells whose ``counts`` are the numbers of the pairs, from 1: they find their members."""
        numbers = np.asarray(np.arange(run.noise_multipliers.size) + 1.0, dtype=np.float64)
        steps = Steps(run.noise_multipliers, run.sample_rates, numbers)
        spacing = self._accountant.spacing
        while True:
            mixture = as_mixture(steps, self._relation, spacing, _EXACT)
            few = grid_points(mixture, plan, self._relation) <= _MAX_POINTS
            if mixture.is_exact or few or spacing >= _ROUGH_SPACING:
                return mixture
            spacing *= 1.2


def _has_small_error(composed: Composed, epsilon: float, delta: float) -> bool:
    """Whether the errors that are added to delta are at most a thousandth of it."""
    if not math.isfinite(epsilon):
        return False
    exponent = composed.log_norm - composed.tilt * epsilon
    exponent += float(log_largest_weight(composed.tilt))
    return composed.error * math.exp(min(exponent, 700.0)) <= 1e-3 * delta


class _Snapshots:
    """The composed loss after each length, on one grid."""

    def __init__(
        self, run: _Run, mixture: Mixture, plan: Plan, make: Callable[[int], LossPmf]
    ) -> None:
        self._run, self._grid = run, plan.grid
        self.steps = run.sums(run.counts)
        grid = plan.grid
        self._start = math.floor(grid.ends[0] / grid.h)
        points = max(math.ceil(grid.ends[1] / grid.h) - self._start + 1, 16)
        self._n = int(fft.next_fast_len(points, real=True))
        self._active = np.arange(self._n // 2 + 1)
        self._logs = np.zeros((self._active.size, run.size), dtype=complex)  # a row per frequency
        self._least = np.ones(self._active.size)
        self._truncation = 0.0
        tilts = np.append(grid.tilts, grid.tilt)
        self._bounds = np.zeros((run.size, tilts.size))
        self._log_norm = np.zeros(run.size)
        self._infinity = np.zeros(run.size)
        table = MomentTable(grid.h, tilts)
        by_pair = np.argsort(run.pairs, kind="stable")
        offsets = np.concatenate(
            ([0], np.cumsum(np.bincount(run.pairs, minlength=run.noise_multipliers.size)))
        )
        last_use = {c: i for i, cell in enumerate(mixture.cells) for c in cell.corners}
        kept: dict[int, tuple[FloatArray, ComplexArray, float]] = {}
        for number, cell in enumerate(mixture.cells):
            for corner in cell.corners:
                if corner not in kept:
                    kept[corner] = self._node(make(corner), table)
            self._multiply(cell, [kept[c] for c in cell.corners], by_pair, offsets)
            for corner in set(cell.corners):
                if last_use[corner] == number:
                    del kept[corner]

    def _node(self, pmf: LossPmf, table: MomentTable) -> tuple[FloatArray, ComplexArray, float]:
        """Log moments, transform of the tilted pmf, mass at infinity."""
        moments = table.of(pmf)
        x = (pmf.start + np.arange(pmf.probabilities.size)) * self._grid.h
        tilted = pmf.probabilities * np.exp(np.minimum(self._grid.tilt * x - moments[-1], 700.0))
        shift = pmf.start % self._n
        rows = -(-(shift + tilted.size) // self._n)
        wrapped = np.zeros(rows * self._n)
        wrapped[shift : shift + tilted.size] = tilted
        transform = fft.rfft(wrapped.reshape(rows, self._n).sum(axis=0))
        return moments, np.asarray(transform), pmf.infinity

    def _multiply(
        self,
        cell: Cell,
        corners: list[tuple[FloatArray, ComplexArray, float]],
        by_pair: IntArray,
        offsets: IntArray,
    ) -> None:
        """Multiply every length by its steps inside a cell."""
        run = self._run
        numbers = cell.counts.astype(int) - 1
        parts = [by_pair[offsets[p] : offsets[p + 1]] for p in numbers]
        place = np.repeat(np.arange(numbers.size), [part.size for part in parts])
        members = np.concatenate(parts)
        order = np.argsort(members, kind="stable")
        members, place = members[order], place[order]
        counts = run.counts[members]
        total = run.sums(counts, members)
        moments = np.stack([m for m, _, _ in corners])
        self._infinity += total * max(infinity for _, _, infinity in corners)
        for _, phi, _ in corners:
            self._least = np.minimum(self._least, np.abs(phi[self._active]))
        if cell.is_single:
            self._bounds += total[:, None] * moments[0]
            self._log_norm += total * moments[0, -1]
            base = corners[0][1][self._active]
            # The least number instead of 0: a length without such steps is multiplied by 1.
            log_base = np.log(np.maximum(np.abs(base), _TINY)) + 1j * np.angle(base)
            self._logs += log_base[:, None] * total
        else:
            self._mixtures(cell, corners, moments, (members, place, counts, total))
        # No factor exceeds 1: what is negligible after the shortest length stays so.
        keep = self._logs[:, 0].real > _NEGLIGIBLE
        if not keep.all():
            self._active, self._least = self._active[keep], self._least[keep]
            self._logs = self._logs[keep]

    def _mixtures(
        self,
        cell: Cell,
        corners: list[tuple[FloatArray, ComplexArray, float]],
        moments: FloatArray,
        items: tuple[IntArray, IntArray, FloatArray, FloatArray],
    ) -> None:
        """The steps of a cell that are mixtures of its corners, by the series of the logarithm."""
        run = self._run
        members, place, counts, total = items
        weights = cell.weights()
        top = moments.max(axis=0)
        sums = np.stack([run.sums(counts * w[place], members) for w in weights.T], axis=1)
        some = total > 0
        share = sums[some] / total[some, None]
        self._bounds[some] += total[some, None] * (top + np.log(share @ np.exp(moments - top)))
        own = moments[:, -1]
        log_norm = own[0] + np.log(weights @ np.exp(own - own[0]))
        norm = run.sums(counts * log_norm[place], members)
        self._log_norm += norm
        values = [
            math.exp(own[c] - own[0]) * phi[self._active] for c, (_, phi, _) in enumerate(corners)
        ]
        self._logs -= norm - total * own[0]
        self._add_logs(cell, (members, place, counts), values, np.arange(self._active.size))

    def _add_logs(
        self,
        cell: Cell,
        items: tuple[IntArray, IntArray, FloatArray],
        values: list[ComplexArray],
        rows: IntArray,
    ) -> None:
        """Add ``sum_t n_t log(sum_c w_tc values_c)`` over the steps of each length.

        As in :func:`lightning_dp.accounting.product.sum_of_logs`: a series around the mean of the
        cell; where that is too far, the cell is halved.
        """
        members, place, counts = items
        total = self._run.sums(counts, members)
        if cell.u.size <= _FEW:
            sums = cell.weights() @ np.stack(values)
            logs = np.log(np.where(sums == 0, _TINY, sums))
            each = [self._run.sums(counts * (place == i), members) for i in range(cell.u.size)]
            self._logs[rows] += logs.T @ np.stack(each).astype(complex)
            return
        mean_u, mean_v = float(cell.u.mean()), float(cell.v.mean())
        du, dv = cell.u - mean_u, cell.v - mean_v
        v00, v01, v10, v11 = values
        both = v11 - v10 - v01 + v00
        along_u, along_v = v10 - v00 + mean_v * both, v01 - v00 + mean_u * both
        base = v00 + mean_u * (v10 - v00) + mean_v * (v01 - v00) + mean_u * mean_v * both
        ratios: dict[tuple[int, int], ComplexArray] = {}
        radius = np.zeros(base.size)
        with np.errstate(divide="ignore", invalid="ignore"):
            for key, term, size in (
                ((1, 0), along_u, np.abs(du).max()),
                ((0, 1), along_v, np.abs(dv).max()),
                ((1, 1), both, np.abs(du * dv).max()),
            ):
                if size > 0 and np.any(term):
                    ratios[key] = term / base
                    radius += size * np.abs(ratios[key])
        steps = float(total[-1])
        small = radius <= min(
            (_TRUNCATION * (_MAX_ORDER + 1) / steps) ** (1 / (_MAX_ORDER + 1)), 0.5
        )
        reach = float(radius[small].max(initial=0.0))
        order, remainder = 1, 0.0
        for order in range(1, _MAX_ORDER + 1):
            remainder = steps * reach ** (order + 1) / ((order + 1) * (1 - reach))
            if remainder <= _TRUNCATION / 100:
                break
        self._truncation += remainder
        terms = _log_series({key: ratio[small] for key, ratio in ratios.items()}, order)
        keys = list(terms)
        powers = [self._run.sums(counts * (du**i * dv**j)[place], members) for i, j in keys]
        left = np.stack([total, *powers]).astype(complex)
        right = np.stack([np.log(base[small]), *(terms[key] for key in keys)], axis=1)
        if small.all() and rows.size == self._active.size:
            self._logs += right @ left
            return
        self._logs[rows[small]] += right @ left
        if small.all():
            return
        wide = du if np.ptp(du) >= np.ptp(dv) else dv
        upper = wide > (wide.max() + wide.min()) / 2
        for half in (upper, ~upper):
            inside = half[place]
            part = Cell(cell.corners, cell.u[half], cell.v[half], cell.counts[half])
            numbers = np.cumsum(half) - 1
            self._add_logs(
                part,
                (members[inside], numbers[place[inside]], counts[inside]),
                [value[~small] for value in values],
                rows[~small],
            )

    def composed(self, k: int, above: float) -> Composed:
        """The composed loss of the k-th length, without the losses that are not above a number."""
        grid, n, steps = self._grid, self._n, float(self.steps[k])
        values = np.exp(self._logs[:, k])
        values[~np.isfinite(values)] = 0.0
        spectrum = np.zeros(n // 2 + 1, dtype=complex)
        spectrum[self._active] = values
        size = np.abs(values)
        eta = _UNIT * (8 + math.log2(n))
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = np.minimum(np.nan_to_num(size / self._least, nan=1.0), 1.0)
        relative = steps * eta * rest + (self._truncation + steps * _UNIT * 64 + eta) * size
        error = math.sqrt(2 * float(relative @ relative)) + n * math.exp(_NEGLIGIBLE)
        ends = (self._start * grid.h, (self._start + n - 1) * grid.h)
        bounds, log_norm = self._bounds[k, :-1], float(self._log_norm[k])
        error += outside(grid.tilts, bounds, grid.tilt, log_norm, ends)
        error += 1e-14 * (steps + math.log2(n))
        tilted = np.roll(np.maximum(fft.irfft(spectrum, n), 0.0), -(self._start % n))
        log_norm += 1e-13 * steps
        infinity = min(float(self._infinity[k]), 1.0)
        cut = min(max(math.floor((above - ends[0]) / grid.h), 0), n - 2) if above > ends[0] else 0
        start, tilted = self._start + cut, tilted[cut:]
        return Composed(start, grid.h, tilted, grid.tilt, log_norm, infinity, error)


def _log_series(
    linear: dict[tuple[int, int], ComplexArray], order: int
) -> dict[tuple[int, int], ComplexArray]:
    """Coefficients of ``log(1 + y)``, ``y = sum_(i,j) u^i v^j linear[i, j]``, to the given order."""
    power = dict(linear)
    result: dict[tuple[int, int], ComplexArray] = {}
    for k in range(1, order + 1):
        for key, term in power.items():
            result[key] = result.get(key, 0j) + (-1) ** (k + 1) / k * term
        if k < order:
            product: dict[tuple[int, int], ComplexArray] = {}
            for (i, j), x in power.items():
                for (a, b), y in linear.items():
                    product[i + a, j + b] = product.get((i + a, j + b), 0j) + x * y
            power = product
    return result
