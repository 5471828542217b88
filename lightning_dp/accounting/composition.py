"""Composition of many steps on one grid: tilt, transform, multiply, transform back.

Let X be the composed loss, ``K(t) = log E[e^(tX); X finite]`` and
``p~(x) = p(x) e^(lam x - K(lam))`` the tilted distribution. Then
``delta(e) = P(X = inf) + e^(K(lam) - lam e) S(e)`` with ``S(e) = sum_(x > e) p~(x) g(x - e)``,
``g(y) = e^(-lam y) (1 - e^-y) <= g_max``. With lam near the Chernoff optimum of the wanted point,
S / g_max is of the order of 0.1: the rounding errors of the transform and the mass outside the
window are relative to delta itself and not to 1. (The tilt is the saddle point of Alghamdi et al.,
arXiv 2208.09595v1; here the sum is exact and all errors are added.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import fft

from lightning_dp.accounting.base import FloatArray
from lightning_dp.accounting.grouping import Mixture
from lightning_dp.accounting.pmf import LossPmf
from lightning_dp.accounting.product import CharacteristicProduct, Corner
from lightning_dp.accounting.tilting import (
    MomentTable,
    cumulant,
    cumulant_bound,
    log_largest_weight,
    outside,
)

_MOST_OUTSIDE = 1e-6


@dataclass(frozen=True)
class Composed:
    """The composed loss around the point of interest, tilted by ``tilt``."""

    start: int
    h: float
    tilted: FloatArray
    tilt: float
    log_norm: float
    infinity: float
    error: float

    def epsilon(self, delta: float) -> float:
        """The least epsilon inside the window whose delta, errors included, is at most ``delta``."""
        room = delta * (1 - 1e-9) - self.infinity
        if not room > 0:
            return math.inf
        x = (self.start + np.arange(self.tilted.size, dtype=float)) * self.h
        center = float(x[int(np.argmax(np.cumsum(self.tilted) >= 0.5 * self.tilted.sum()))])
        above, weighted, error = self._suffix_sums(x, center)
        target = room * math.exp(min(self.tilt * center - self.log_norm, 700.0))
        values = above - np.exp(np.minimum(x - center, 300.0)) * weighted + error
        met = np.flatnonzero(values <= target)
        if met.size == 0:
            return math.inf
        k = int(met[0])
        if k == 0:
            return max(float(x[0]), 0.0)
        # Inside (x[k-1], x[k]] the sums do not change: above - e^(e - center) weighted = target.
        left = above[k - 1] - (target - error[k - 1])
        if not (weighted[k - 1] > 0 and left > 0):
            return max(float(x[k]), 0.0)
        root = center + math.log(left / weighted[k - 1])
        return max(min(max(root, float(x[k - 1])), float(x[k])), 0.0)

    def delta(self, epsilon: float) -> float:
        """delta at ``epsilon``, errors included."""
        if epsilon < self.start * self.h:
            return 1.0
        x = (self.start + np.arange(self.tilted.size)) * self.h
        beyond = x > epsilon
        y = x[beyond] - epsilon
        total = float(self.tilted[beyond] @ (np.exp(-self.tilt * y) * -np.expm1(-y)))
        total += self.error * math.exp(float(log_largest_weight(self.tilt)))
        exponent = self.log_norm - self.tilt * epsilon
        finite = math.exp(exponent + math.log(total)) if total > 0 and exponent < 700 else 0.0
        return min(1.0, finite * (1 + 1e-9) + self.infinity) if exponent < 700 else 1.0

    def _suffix_sums(self, x: FloatArray, center: float) -> tuple[FloatArray, ...]:
        """Sums over the losses above each grid point, both times ``e^(tilt center)``."""
        exponent = -self.tilt * (x - center)
        weights = self.tilted * np.exp(np.minimum(exponent, 600.0))
        above = np.append(np.cumsum(weights[::-1])[::-1][1:], 0.0)
        shrunk = weights * np.exp(-np.maximum(x - center, -100.0))
        weighted = np.append(np.cumsum(shrunk[::-1])[::-1][1:], 0.0)
        largest = math.exp(float(log_largest_weight(self.tilt)))
        error = self.error * largest * np.exp(np.minimum(exponent, 600.0))
        error[exponent > 600.0] = np.inf
        error[x - center < -100.0] = np.inf
        return above, weighted, error


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
    start = math.floor(grid.ends[0] / grid.h)
    points = max(math.ceil(grid.ends[1] / grid.h) - start + 1, 16)
    n = int(fft.next_fast_len(points, real=True))
    nodes = _Nodes(mixture, make, grid, n)
    product = CharacteristicProduct(n)
    for number, cell in enumerate(mixture.cells):
        product.multiply(cell, nodes.corners(number))
    bounds = cumulant_bound(mixture, nodes.moments)
    log_norm = cumulant(mixture, nodes.moments[:, -1])
    ends = (start * grid.h, (start + n - 1) * grid.h)
    missed = outside(grid.tilts, bounds[:-1], grid.tilt, log_norm, ends)
    if missed > _MOST_OUTSIDE and n < 2**23:
        return compose(mixture, make, grid.widened())
    spectrum, spectrum_error = product.result()
    tilted = np.roll(np.maximum(fft.irfft(spectrum, n), 0.0), -(start % n))
    infinity = sum(c.total * max(nodes.infinity[k] for k in c.corners) for c in mixture.cells)
    error = missed + spectrum_error + 1e-14 * (mixture.total + math.log2(n))
    log_norm += 1e-14 * mixture.total  # rounding of the log moments
    return Composed(start, grid.h, tilted, grid.tilt, log_norm, min(float(infinity), 1.0), error)


class _Nodes:
    """Moments and transforms of the nodes, made when first needed, dropped after the last use."""

    def __init__(
        self, mixture: Mixture, make: Callable[[int], LossPmf], grid: Grid, n: int
    ) -> None:
        self._make, self._grid, self._n = make, grid, n
        self._cells = mixture.cells
        self._last_use = {c: i for i, cell in enumerate(mixture.cells) for c in cell.corners}
        self._kept: dict[int, Corner] = {}
        self._table = MomentTable(grid.h, np.append(grid.tilts, grid.tilt))
        self.moments = np.zeros((len(mixture.nodes), grid.tilts.size + 1))
        self.infinity = np.zeros(len(mixture.nodes))

    def corners(self, number: int) -> list[Corner]:
        """``(log moment, transform of the tilted pmf)`` of each corner of a cell."""
        wanted = self._cells[number].corners
        for corner in wanted:
            if corner not in self._kept:
                self._kept[corner] = self._transform(corner)
        found = [self._kept[corner] for corner in wanted]
        for corner in set(wanted):
            if self._last_use[corner] == number:
                del self._kept[corner]
        return found

    def _transform(self, node: int) -> Corner:
        pmf = self._make(node)
        self.moments[node] = self._table.of(pmf)
        self.infinity[node] = pmf.infinity
        moment = float(self.moments[node, -1])
        x = (pmf.start + np.arange(pmf.probabilities.size)) * self._grid.h
        tilted = pmf.probabilities * np.exp(np.minimum(self._grid.tilt * x - moment, 700.0))
        shift = pmf.start % self._n
        rows = -(-(shift + tilted.size) // self._n)
        wrapped = np.zeros(rows * self._n)
        wrapped[shift : shift + tilted.size] = tilted
        return moment, np.asarray(fft.rfft(wrapped.reshape(rows, self._n).sum(axis=0)))
