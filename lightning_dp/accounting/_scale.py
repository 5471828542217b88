"""The scale of the noise at which a cost meets its target, approached by quick estimates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.optimize import brentq

from lightning_dp.accounting._composition import ComposedLengths
from lightning_dp.accounting._grid import GridSearch, Target, merge_full_batch, pmf_maker
from lightning_dp.accounting._grouping import Mixture, as_mixture, few_alike
from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.accounting.external import NOTHING, Declared
from lightning_dp.accounting.gdp import mu_of_budget
from lightning_dp.accounting.steps import Steps, joined

__all__ = ["ENDLESS", "Goal", "solve"]

_RTOL = 4e-3
_SPACING = 0.2
_EXACT = 32
_NEAR = 0.1  # how near the budget the grid of the estimates is made
_OVER = 5e-4  # by which the accountants are above an estimate, for many steps
_SETTLED = 0.03  # change of an estimate by a finer grid that can be extrapolated
_MOST_POINTS = 2**21
_MOST_GRIDS = 5
_FARTHEST = 0.3  # of the logarithm of the scale, from one grid to the next
_SAME = 1e-9  # of it: a cost that jumps over the target
ENDLESS = 1e17  # times the scale where a search began: more noise changes nothing

_Estimate = Callable[[float], float]


@dataclass(frozen=True)
class Goal:
    """The scale that is looked for, at which an accountant's epsilon meets a budget.

    The accountant is slow, so the scale is approached by quick estimates of its epsilon.

    Args:
        spent: what ran before.
        shapes: the steps at scale 1.
        budget: epsilon and delta.
        relation: the neighbouring relation.
        tolerance: relative.
        declared: what else was spent, pure or zCDP.
    """

    spent: Steps
    shapes: Steps
    budget: tuple[float, float]
    relation: Relation
    tolerance: float
    declared: Declared = NOTHING

    def near(self, cost: _Estimate, estimate: _Estimate, scale: float) -> tuple[float, float]:
        """Return a scale whose cost is likely to be within the tolerance, and the slope there.

        Args:
            cost: the accountant's epsilon at a scale.
            estimate: of it.
            scale: a guess.
        """
        epsilon, tolerance = self.budget[0], self.tolerance
        slope = _slope(estimate, scale)
        aim = epsilon * (1 - tolerance / 2)
        wanted = aim * (1 - _OVER)
        # Solve for the estimate, ask once what the cost is there, and correct the estimate by the
        # ratio: it varies so slowly with the scale that the second answer is nearly always right.
        for _ in range(2):
            found = solve(estimate, scale, wanted * (1 + tolerance / 16), tolerance / 8, slope)
            if found == math.inf:
                break
            scale, value = found, cost(found)
            if not 0 < value < math.inf or epsilon * (1 - tolerance) <= value <= epsilon:
                break
            wanted = aim * estimate(scale) / value
            if not wanted > 0:  # of next to nothing, an estimate may be 0
                break
        return scale, slope

    def asking(self, epsilon_of: Callable[[Steps, Declared, float, Relation], float]) -> _Estimate:
        """Return an estimate from few steps that cost nearly the same together."""
        steps_of, delta = self._few(), self.budget[1]
        return lru_cache(maxsize=None)(
            lambda scale: epsilon_of(steps_of(scale), self.declared, delta, self.relation)
        )

    def rough(self, estimate: _Estimate, target: float, least: float = 0.0) -> float:
        """Return a scale at which an estimate, which never falls below ``least``, is near a target."""
        start = self._normal()
        if not least < target:
            return start
        found = solve(estimate, start, target, _NEAR)
        return found if found < math.inf else start  # some bounds do not fall to 0

    def on_grids(
        self, search: GridSearch, bound: _Estimate, least: float
    ) -> tuple[_Estimate, float]:
        """Return an estimate that is smooth in the scale, and a scale where it is near the budget.

        Args:
            search: what the accountant does for each scale.
            bound: a quick upper bound, to begin with.
            least: a number below which it never falls.
        """
        epsilon, delta = self.budget
        steps_of = self._few()
        scale = self.rough(bound, 1.1 * epsilon, least)
        coarser = replace(search, rtol=max(_RTOL, search.rtol))
        for _ in range(_MOST_GRIDS):  # a grid is good near the scale that it was made for
            grid = _Grid(coarser, Target(math.log(delta)), self.relation, steps_of(scale))
            if grid.is_too_long:
                return bound, scale
            estimate = lru_cache(maxsize=None)(grid.reader(steps_of))
            value = estimate(scale)
            if not 0 < value < math.inf or abs(value / epsilon - 1) < _NEAR:
                break
            move = math.log(epsilon / value) / _slope(estimate, scale)
            scale *= math.exp(min(max(move, -_FARTHEST), _FARTHEST))
        return estimate, scale

    def _few(self) -> Callable[[float], Steps]:
        """Return a function from a scale to few steps that cost nearly what all do."""
        spent, shapes = few_alike(self.spent), few_alike(self.shapes)
        return lambda scale: joined(spent, shapes.scaled(scale))

    def _normal(self) -> float:
        """Return the scale by the central limit theorem: sum_t q_t^2 (e^(1/z_t^2) - 1) = mu^2."""
        epsilon, delta = self.budget
        mu = math.log(mu_of_budget(epsilon, delta) / check_relation(self.relation))
        shapes = self.shapes
        log_rates = 2 * np.log(shapes.sample_rates)

        def excess(log_scale: float) -> float:
            x = np.exp(-2 * log_scale) / shapes.noise_multipliers**2
            log_terms = log_rates + x + np.log(-np.expm1(-x)) + np.log(shapes.counts)
            return 0.5 * float(np.logaddexp.reduce(log_terms)) - mu

        low = float(np.log(1e-2 / shapes.noise_multipliers.min()))
        high = low + math.log(1e10)
        if not excess(low) > 0 > excess(high):
            return shapes.mu
        return math.exp(float(brentq(excess, low, high, xtol=1e-3)))


def _slope(estimate: _Estimate, scale: float) -> float:
    """That of the logarithm of an estimate in that of the scale."""
    step = 1e-3
    values = estimate(scale), estimate(scale * (1 + step))
    if not all(0 < value < math.inf for value in values):
        return -1.0
    return min(math.log(values[1] / values[0]) / math.log1p(step), -0.05)


class _Grid:
    """Epsilon for removing a record on one grid, of which the error is known and varies smoothly."""

    def __init__(
        self, search: GridSearch, target: Target, relation: Relation, steps: Steps
    ) -> None:
        self._target, self._relation, self._others = target, relation, search.others
        plan, _ = search.settle(self._mixture(steps), target, relation, False, 0.0)
        low, high = plan.grid.ends
        # At a scale with less noise, losses of one step may be far beyond the window.
        self._plan = replace(plan, limit=min(plan.limit, 2 * high - low))
        while self._plan.points < _MOST_POINTS:
            here = self._at(steps, 1.0)
            if not 0 < here < math.inf or abs(self._at(steps, 2.0) - here) < _SETTLED * here:
                break  # it settled, or is not seen on this grid: a finer one sums up more rounding
            self._plan = replace(self._plan, grid=replace(self._plan.grid, h=self._plan.grid.h / 4))

    @property
    def is_too_long(self) -> bool:
        """True if nothing can be composed on it."""
        return self._plan.is_too_long

    def reader(self, steps_of: Callable[[float], Steps]) -> _Estimate:
        """The estimate at a scale. The error of a grid goes as the square of its spacing."""

        def read(scale: float) -> float:
            steps = steps_of(scale)
            fine, coarse = self._at(steps, 1.0), self._at(steps, 2.0)
            return fine - (coarse - fine) / 3 if math.isfinite(coarse) else fine

        return read

    def _at(self, steps: Steps, wider: float) -> float:
        """Epsilon on the grid, or one that is wider."""
        grid = replace(self._plan.grid, h=self._plan.grid.h * wider)
        plan, mixture = replace(self._plan, grid=grid), self._mixture(steps)
        make = pmf_maker(mixture, plan, self._relation, False)
        # No window is widened: far from the steps of the grid there is no estimate.
        lengths = ComposedLengths(mixture, make, grid, lambda cell: cell.counts[None, :])
        return self._target.read(lengths.composed(0))

    def _mixture(self, steps: Steps) -> Mixture:
        mixture = as_mixture(merge_full_batch(steps), self._relation, _SPACING, _EXACT)
        return mixture.beside(self._others)


def solve(
    cost: Callable[[float], float],
    start: float,
    target: float,
    tolerance: float,
    slope: float = -1.0,
) -> float:
    """A scale with ``(1 - tolerance) target <= cost(scale) <= target``; cost falls with the scale.

    ``slope`` is a guess of that of the logarithm of the cost in that of the scale. Infinite, if the cost
    stays above the target however large the scale is.
    """
    aim = math.log(target * (1 - tolerance / 2))
    low, high = 0.0, math.inf  # cost(low) > target >= cost(high)
    x = math.log(start)
    points: list[tuple[float, float]] = []
    low, high = -math.inf, math.inf
    for turn in range(200):
        value = cost(math.exp(x))
        if target * (1 - tolerance) <= value <= target:
            return math.exp(x)
        low, high = (max(low, x), high) if value > target else (low, min(high, x))
        if high - low < _SAME:
            return math.exp(high)
        if low > math.log(start * ENDLESS):
            return math.inf
        if 0 < value < math.inf:
            points = [*points[-1:], (x, math.log(value))]
        guess = math.nan if turn % 6 == 5 else _secant(points, slope, aim)
        x = _inside(guess, low, high)
    return math.exp(high)


def _secant(points: list[tuple[float, float]], slope: float, aim: float) -> float:
    """The place where log cost is ``aim`` by the latest two points, or one and a slope; else NaN."""
    if not points:
        return math.nan
    x, y = points[-1]
    if len(points) == 2 and points[0][0] != x:
        slope = min((y - points[0][1]) / (x - points[0][0]), -0.05)
    return min(max(x + (aim - y) / slope, x - 3.0), x + 3.0)


def _inside(guess: float, low: float, high: float) -> float:
    """The guess if it is inside the bracket, else some number that is."""
    if low < guess < high:
        return guess
    if math.isinf(low):
        return high - 1.0
    if math.isinf(high):
        return low + 1.0
    return (low + high) / 2
