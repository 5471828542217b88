"""Composition of many steps on one grid: tilt, transform, multiply, transform back.

Let X be the composed loss, ``K(t) = log E[e^(tX); X finite]`` and
``p~(x) = p(x) e^(lam x - K(lam))`` the tilted distribution. Then
``delta(e) = P(X = inf) + e^(K(lam) - lam e) S(e)`` with ``S(e) = sum_(x > e) p~(x) g(x - e)``,
``g(y) = e^(-lam y) (1 - e^-y) <= g_max``. With lam near the Chernoff optimum of the wanted point,
S / g_max is of the order of 0.1: the rounding errors of the transform and the mass outside the
window are relative to delta itself and not to 1. (The tilt is the saddle point of Alghamdi et al.,
arXiv 2208.09595v1; here the sum is exact and all errors are added.)

Several lengths of one run share the transforms: their products differ in the counts only.

The parts, from the outside in: the composition on a grid (:class:`ComposedLengths`), what is read
from it (:class:`Composed`), the product of characteristic functions (``_characteristic.py``), and the
exponential moments K(t) with Chernoff's bounds (``_moments.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from lightning_dp.accounting._characteristic import CharacteristicProduct, ComplexArray
from lightning_dp.accounting._grouping import Cell, Mixture
from lightning_dp.accounting._moments import (
    MomentTable,
    cumulant,
    cumulant_bound,
    log_largest_weight,
    outside,
)
from lightning_dp.accounting._pmf import LossPmf
from lightning_dp.accounting.steps import FloatArray

__all__ = ["Composed", "ComposedLengths", "CountsOf", "Grid", "compose"]

IntArray = NDArray[np.intp]
CountsOf = Callable[[Cell], FloatArray]  # a row for each length, growing; a column for each member

_MOST_OUTSIDE = 1e-6  # of the tilted mass; more is worth a wider window
_MOST_POINTS = 2**23
_NEGLIGIBLE = -46.0  # log of 1e-20: of the modulus of a frequency that is left out
_TINY = 1e-300


@dataclass(frozen=True)
class Grid:
    """The place of a composition: spacing, tilt, window of losses, the tilts that bound the rest."""

    h: float
    tilt: float
    ends: tuple[float, float]
    tilts: FloatArray

    def widened(self) -> Grid:
        """The same grid with a window twice as wide."""
        low, high = self.ends
        half = (high - low) / 2
        return Grid(self.h, self.tilt, (low - half, high + half), self.tilts)


def compose(mixture: Mixture, make: Callable[[int], LossPmf], grid: Grid) -> Composed:
    """Compose all steps; ``make(k)`` gives the pmf of node k and is called once for each node."""
    lengths = ComposedLengths(mixture, make, grid, lambda cell: cell.counts[None, :])
    if lengths.outside(0) > _MOST_OUTSIDE and lengths.points < _MOST_POINTS:
        return compose(mixture, make, grid.widened())
    return lengths.composed(0)


class ComposedLengths:
    """The composed loss of several lengths of one run, on one grid.

    Args:
        mixture: the steps of the longest.
        make: gives the pmf of a node.
        grid: where to compose.
        counts_of: the numbers of the members of a cell in each length, shortest length first.
    """

    def __init__(
        self,
        mixture: Mixture,
        make: Callable[[int], LossPmf],
        grid: Grid,
        counts_of: CountsOf,
    ) -> None:
        self._grid = grid
        self._start = math.floor(grid.ends[0] / grid.h)
        points = max(math.ceil(grid.ends[1] / grid.h) - self._start + 1, 16)
        self.points = int(fft.next_fast_len(points, real=True))
        nodes = _Nodes(mixture, make, grid, self.points)
        self._active = nodes.transform_all(counts_of)
        size = counts_of(mixture.cells[0]).shape[0]
        self._product = CharacteristicProduct(self._active.size, size)
        self._bounds = np.zeros((size, grid.tilts.size))
        self._log_norm, self._infinity, self.steps = np.zeros((3, size))
        for cell in mixture.cells:
            self._add(cell, counts_of(cell), nodes)

    def _add(self, cell: Cell, counts: FloatArray, nodes: _Nodes) -> None:
        """Add the steps of a cell to every length."""
        corners = list(cell.corners)
        moments, total = nodes.moments[corners], counts.sum(axis=1)
        self._product.multiply(cell, counts, moments[:, -1], [nodes.kept[c] for c in corners])
        self._bounds += cumulant_bound(cell, counts, moments[:, :-1])
        self._log_norm += cumulant(cell, counts, moments[:, -1])
        self._infinity += total * nodes.infinity[corners].max()
        self.steps += total

    @property
    def _ends(self) -> tuple[float, float]:
        return self._start * self._grid.h, (self._start + self.points - 1) * self._grid.h

    def outside(self, k: int) -> float:
        """A bound of the tilted mass of the k-th length outside the window."""
        grid = self._grid
        return outside(grid.tilts, self._bounds[k], grid.tilt, float(self._log_norm[k]), self._ends)

    def composed(self, k: int, above: float = -math.inf) -> Composed:
        """The k-th length; losses that are not above a number may be left out, to save time."""
        grid, n, steps = self._grid, self.points, float(self.steps[k])
        values, error = self._product.result(k, n)
        # Frequencies that were left out are below e^_NEGLIGIBLE.
        spectrum = np.zeros(n // 2 + 1, dtype=complex)
        spectrum[self._active] = values
        # A mass below 0 is an error of rounding; 0 in its place can only raise delta, as g >= 0.
        tilted = np.roll(np.maximum(fft.irfft(spectrum, n), 0.0), -(self._start % n))
        # In turn: what was left out, of n points; the mass that the finite transform has wrapped
        # around, at its true place or at a wrong one; rounding of the masses and of the transform.
        error += n * math.exp(_NEGLIGIBLE) + self.outside(k) + 1e-14 * (steps + math.log2(n))
        log_norm = float(self._log_norm[k]) + 1e-13 * steps  # their rounding, upwards as delta is
        cut = min(max(math.floor(max(above, self._ends[0]) / grid.h) - self._start, 0), n - 2)
        start, infinity = self._start + cut, min(float(self._infinity[k]), 1.0)
        return Composed(start, grid.h, tilted[cut:], grid.tilt, log_norm, infinity, error)


class _Nodes:
    """Log moments, masses at infinity and transforms of the nodes of a mixture."""

    def __init__(
        self, mixture: Mixture, make: Callable[[int], LossPmf], grid: Grid, n: int
    ) -> None:
        self._cells, self._make, self._grid, self._n = mixture.cells, make, grid, n
        self._table = MomentTable(grid.h, np.append(grid.tilts, grid.tilt))
        self.moments = np.zeros((len(mixture.nodes), grid.tilts.size + 1))
        self.infinity = np.zeros(len(mixture.nodes))
        self.kept: dict[int, ComplexArray] = {}

    def transform_all(self, counts_of: CountsOf) -> IntArray:
        """Fill ``kept``; return the frequencies kept, at which some length is not negligible.

        Under the tilt a step is a mixture of corners, so ``|factor| <= max_c |phi_c| <= 1``. What is
        negligible for the shortest length, is so for all.
        """
        active = np.arange(self._n // 2 + 1)
        bound = np.zeros(active.size)
        for number, cell in enumerate(self._cells, 1):
            corners = set(cell.corners)
            for node in corners - self.kept.keys():
                self.kept[node] = self._transform(node)[active]
            squares = [phi.real**2 + phi.imag**2 for phi in (self.kept[c] for c in corners)]
            shortest = 0.5 * float(counts_of(cell)[0].sum())  # half, of the logarithm of a square
            bound += shortest * np.log(np.maximum(np.max(squares, axis=0), _TINY))
            matter = bound > _NEGLIGIBLE
            if np.mean(matter) < (0.8 if number < len(self._cells) else 1.0):
                active, bound = active[matter], bound[matter]
                self.kept = {node: phi[matter] for node, phi in self.kept.items()}
        return active

    def _transform(self, node: int) -> ComplexArray:
        """The transform of the tilted pmf of a node."""
        pmf = self._make(node)
        self.moments[node] = self._table.of(pmf)
        self.infinity[node] = pmf.infinity
        x = (pmf.start + np.arange(pmf.probabilities.size)) * self._grid.h
        exponent = self._grid.tilt * x - self.moments[node, -1]
        # The tilted masses sum to 1, so an exponent above 700 meets a mass of 0.
        tilted = pmf.probabilities * np.exp(np.minimum(exponent, 700.0))
        # A transform of n points sees losses modulo n h: the pmf is wrapped before, not cut.
        shift = pmf.start % self._n
        rows = -(-(shift + tilted.size) // self._n)
        wrapped = np.zeros(rows * self._n)
        wrapped[shift : shift + tilted.size] = tilted
        return np.asarray(fft.rfft(wrapped.reshape(rows, self._n).sum(axis=0)))


@dataclass(frozen=True)
class Composed:
    """The composed loss around the point of interest, tilted by ``tilt``.

    ``error`` bounds what is missing from, or wrong in, the sum of ``tilted``.
    """

    start: int
    h: float
    tilted: FloatArray
    tilt: float
    log_norm: float
    infinity: float
    error: float

    def epsilon(self, delta: float) -> float:
        """The least epsilon inside the window whose delta, errors included, is at most ``delta``."""
        # Infinite losses count in full at every epsilon; 1e-9 is for the rounding of the sums here.
        room = delta * (1 - 1e-9) - self.infinity
        if not room > 0:
            return math.inf
        # All is relative to the median of the tilted loss, so that nothing overflows near it.
        x = (self.start + np.arange(self.tilted.size, dtype=float)) * self.h
        center = float(x[int(np.argmax(np.cumsum(self.tilted) >= 0.5 * self.tilted.sum()))])
        above, weighted, error = self._suffix_sums(x, center)
        target = room * math.exp(min(self.tilt * center - self.log_norm, 700.0))
        # delta(x) = sum_(y > x) p(y) (1 - e^(x - y)) at every grid point. It falls with x, so the
        # first point that meets the target is the right one.
        values = above - np.exp(np.minimum(x - center, 300.0)) * weighted + error
        met = np.flatnonzero(values <= target)
        if met.size == 0:
            return math.inf
        k = int(met[0])
        if k == 0:  # no smaller epsilon is claimed: the window knows no loss below it
            return max(float(x[0]), 0.0)
        # Inside (x[k-1], x[k]] the sums do not change: above - e^(e - center) weighted = target,
        # with the error at the left end, where it is larger.
        left = above[k - 1] - (target - error[k - 1])
        if not (weighted[k - 1] > 0 and left > 0):
            return max(float(x[k]), 0.0)
        root = center + math.log(left / weighted[k - 1])
        return max(min(max(root, float(x[k - 1])), float(x[k])), 0.0)

    def delta(self, epsilon: float) -> float:
        """delta at ``epsilon``, errors included."""
        if epsilon < self.start * self.h:  # the window knows no loss below it
            return 1.0
        x = (self.start + np.arange(self.tilted.size)) * self.h
        beyond = x > epsilon
        y = x[beyond] - epsilon
        total = float(self.tilted[beyond] @ (np.exp(-self.tilt * y) * -np.expm1(-y)))
        total += self.error * math.exp(float(log_largest_weight(self.tilt)))
        exponent = self.log_norm - self.tilt * epsilon
        finite = math.exp(exponent + math.log(total)) if total > 0 and exponent < 700 else 0.0
        return min(1.0, finite * (1 + 1e-9) + self.infinity) if exponent < 700 else 1.0

    def has_small_error(self, epsilon: float, delta: float) -> bool:
        """True if the errors that are added to delta are at most a thousandth of it."""
        if not math.isfinite(epsilon):
            return False
        exponent = self.log_norm - self.tilt * epsilon + float(log_largest_weight(self.tilt))
        return self.error * math.exp(min(exponent, 700.0)) <= 1e-3 * delta

    def _suffix_sums(self, x: FloatArray, center: float) -> tuple[FloatArray, ...]:
        """Sums over the losses above each grid point, both times ``e^(tilt center)``."""
        exponent = -self.tilt * (x - center)
        weights = self.tilted * np.exp(np.minimum(exponent, 600.0))
        above = np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0)
        shrunk = weights * np.exp(-np.maximum(x - center, -100.0))
        weighted = np.append(np.cumsum(shrunk[::-1])[::-1][1:], 0.0)
        largest = math.exp(float(log_largest_weight(self.tilt)))
        error = self.error * largest * np.exp(np.minimum(exponent, 600.0))
        # Where an exponent was cut off, the sums are no bound: such a point never meets a target.
        error[exponent > 600.0] = np.inf
        error[x - center < -100.0] = np.inf
        return above, weighted, error
