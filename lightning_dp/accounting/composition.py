"""Composition of many steps on one grid: tilt, transform, multiply, transform back.

Let X be the composed loss, ``K(t) = log E[e^(tX); X finite]`` and
``p~(x) = p(x) e^(lam x - K(lam))`` the tilted distribution. Then
``delta(e) = P(X = inf) + e^(K(lam) - lam e) S(e)`` with ``S(e) = sum_(x > e) p~(x) g(x - e)``,
``g(y) = e^(-lam y) (1 - e^-y) <= g_max``. With lam near the Chernoff optimum of the wanted point,
S / g_max is of the order of 0.1: the rounding errors of the transform and the mass outside the
window are relative to delta itself and not to 1. (The tilt is the saddle point of Alghamdi et al.,
arXiv 2208.09595v1; here the sum is exact and all errors are added.)

Several lengths of one run share the transforms: their products differ in the counts only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import fft

from lightning_dp.accounting.base import FloatArray
from lightning_dp.accounting.composed import Composed
from lightning_dp.accounting.grouping import Cell, Mixture
from lightning_dp.accounting.pmf import LossPmf
from lightning_dp.accounting.product import CharacteristicProduct, ComplexArray, IntArray
from lightning_dp.accounting.tilting import MomentTable, cumulant, cumulant_bound, outside

CountsOf = Callable[[Cell], FloatArray]  # a row for each length, growing; a column for each member
_MOST_OUTSIDE = 1e-6
_MOST_POINTS = 2**23
_NEGLIGIBLE = -46.0  # log of 1e-20
_TINY = 1e-300


@dataclass(frozen=True)
class Grid:
    """Where to compose: spacing, tilt, window of losses, and the tilts that bound the rest."""

    h: float
    tilt: float
    ends: tuple[float, float]
    tilts: FloatArray

    def widened(self) -> "Grid":
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

    def _add(self, cell: Cell, counts: FloatArray, nodes: "_Nodes") -> None:
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
        spectrum = np.zeros(n // 2 + 1, dtype=complex)
        spectrum[self._active] = values
        tilted = np.roll(np.maximum(fft.irfft(spectrum, n), 0.0), -(self._start % n))
        error += n * math.exp(_NEGLIGIBLE) + self.outside(k) + 1e-14 * (steps + math.log2(n))
        log_norm = float(self._log_norm[k]) + 1e-13 * steps  # rounding of the log moments
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
            shortest = 0.5 * float(counts_of(cell)[0].sum())
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
        tilted = pmf.probabilities * np.exp(np.minimum(exponent, 700.0))
        shift = pmf.start % self._n
        rows = -(-(shift + tilted.size) // self._n)
        wrapped = np.zeros(rows * self._n)
        wrapped[shift : shift + tilted.size] = tilted
        return np.asarray(fft.rfft(wrapped.reshape(rows, self._n).sum(axis=0)))
