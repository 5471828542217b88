"""Composition of many steps on one grid: tilt, transform, multiply, transform back.

Let X be the composed loss, ``K(t) = log E[e^(tX); X finite]`` and
``p~(x) = p(x) e^(lam x - K(lam))`` the tilted distribution. Then
``delta(e) = P(X = inf) + e^(K(lam) - lam e) S(e)`` with ``S(e) = sum_(x > e) p~(x) g(x - e)``,
``g(y) = e^(-lam y) (1 - e^-y) <= g_max``. With lam near the Chernoff optimum of the wanted point,
S / g_max is of the order of 0.1: the rounding errors of the transform and the mass outside the
window are relative to delta itself and not to 1. (The tilt is the saddle point of Alghamdi et al.,
arXiv 2208.09595v1; here the sum is exact and all errors are added.)

Several lengths of one run share the transforms: their products differ in the counts only.

The sections, from the inside out: exponential moments with Chernoff's bounds, the product of
characteristic functions, the composition on a grid, and what is read from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from lightning_dp.accounting._grouping import Cell, Mixture
from lightning_dp.accounting._pmf import LossPmf
from lightning_dp.accounting.steps import FloatArray

ComplexArray = NDArray[np.complex128]
IntArray = NDArray[np.intp]
CountsOf = Callable[[Cell], FloatArray]  # a row for each length, growing; a column for each member
_Polynomial = dict[tuple[int, int], ComplexArray]  # by the powers of (du, dv)

_BLOCK = 256  # grid points that share their powers
_UNIT = 2.0**-52  # the rounding of one operation, relative
_TINY = 1e-300
_MAX_ORDER = 6  # of the series of a logarithm
_TRUNCATION = 1e-10  # of that series, over all steps
_FEW = 64  # members of a cell for which the series does not pay
_MOST_OUTSIDE = 1e-6  # of the tilted mass; more is worth a wider window
_MOST_POINTS = 2**23
_NEGLIGIBLE = -46.0  # log of 1e-20: of the modulus of a frequency that is left out

# -- exponential moments -----------------------------------------------------------------------


def log_largest_weight(tilt: FloatArray | float) -> FloatArray:
    """``log max_y e^(-tilt y) (1 - e^-y) = -tilt log(1 + 1/tilt) - log(1 + tilt)``, tilt > 0."""
    # The derivative vanishes at e^-y = tilt / (1 + tilt).
    return np.asarray(-tilt * np.log1p(1 / np.asarray(tilt)) - np.log1p(tilt))


class MomentTable:
    """Computes ``log sum_x p(x) e^(t x)`` at fixed tilts for many pmfs on one grid, without overflow."""

    def __init__(self, h: float, tilts: FloatArray) -> None:
        # A pmf is read from the end at which e^(t x) is largest, so that powers only shrink.
        self._down = tilts <= 0
        self._sides = [_block(h * tilts[self._down]), _block(-h * tilts[~self._down])]

    def of(self, pmf: LossPmf) -> FloatArray:
        """The log moments of one pmf, one for each tilt."""
        p = pmf.probabilities
        result = np.empty(self._down.size)
        result[self._down] = _from_start(p, pmf.start, *self._sides[0])
        result[~self._down] = _from_start(p[::-1], 1 - pmf.start - p.size, *self._sides[1])
        return result


def _block(rates: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Rates <= 0, and their exponentials over one block of the grid."""
    return rates, np.exp(np.arange(_BLOCK)[:, None] * rates)


def _from_start(p: FloatArray, start: int, rates: FloatArray, powers: FloatArray) -> FloatArray:
    """``log sum_i p_i e^(r (start + i))`` for every rate r <= 0: sums of blocks, then log-sum-exp."""
    blocks = -(-p.size // _BLOCK)
    table = np.zeros(blocks * _BLOCK)
    table[: p.size] = p
    inner = table.reshape(blocks, _BLOCK) @ powers
    with np.errstate(divide="ignore"):
        exponent = (start + _BLOCK * np.arange(blocks)[:, None]) * rates + np.log(inner)
    top = exponent.max(axis=0)
    return np.asarray(top + np.log(np.exp(exponent - top).sum(axis=0)))


def cumulant_bound(cell: Cell, counts: FloatArray, moments: FloatArray) -> FloatArray:
    """Bound K of the steps of a cell for each length (row) and tilt (column), moments given."""
    # By Jensen's inequality sum_t log(w_t . m) <= T log(mean_t w_t . m): a sum over all steps for
    # each of many tilts would take longer than the composition.
    total = counts.sum(axis=1, keepdims=True)
    if cell.is_single:
        return np.asarray(total * moments[0])
    top = moments.max(axis=0)
    share = counts @ cell.weights() / np.maximum(total, 1.0)
    share[total[:, 0] == 0] = 0.25  # any weights: they are multiplied by 0 steps
    return np.asarray(total * (top + np.log(share @ np.exp(moments - top))))


def cumulant(cell: Cell, counts: FloatArray, moments: FloatArray) -> FloatArray:
    """K of the steps of a cell at one tilt, exactly, for each length of a run."""
    if cell.is_single:
        return np.asarray(counts[:, 0] * moments[0])
    top = float(moments.max())
    return np.asarray(counts @ (top + np.log(cell.weights() @ np.exp(moments - top))))


def mixture_bound(mixture: Mixture, moments: FloatArray) -> FloatArray:
    """:func:`cumulant_bound` of all steps, for each tilt; ``moments`` has a row for each node."""
    parts = [
        cumulant_bound(cell, cell.counts[None, :], moments[list(cell.corners)])
        for cell in mixture.cells
    ]
    return np.asarray(np.sum(parts, axis=0)[0])


def outside(
    tilts: FloatArray, bounds: FloatArray, tilt: float, log_norm: float, ends: tuple[float, float]
) -> float:
    """Chernoff's bound of the mass of the tilted distribution outside the losses ``ends``."""
    # The tilted loss has the cumulants K(tilt + gap) - K(tilt), so that
    # P(X > x) <= e^(K(t) - K(tilt) - gap x) for t above the tilt, and P(X < x) likewise below.
    gap = tilts - tilt
    right, left = gap > 0, gap < 0
    above = float(np.min((bounds - log_norm - gap * ends[1])[right]))
    below = float(np.min((bounds - log_norm - gap * ends[0])[left]))
    return math.exp(min(above, 0.0)) + math.exp(min(below, 0.0))


def window(
    tilts: FloatArray, bounds: FloatArray, tilt: float, log_outside: float
) -> tuple[float, float]:
    """Losses outside which the tilted distribution has about twice ``e^log_outside``."""
    gap = tilts - tilt
    reach = bounds - float(bounds[int(np.argmin(np.abs(gap)))]) - log_outside
    right = gap > 1e-3 * tilt
    left = gap < -1e-3 * tilt
    return float(np.max(reach[left] / gap[left])), float(np.min(reach[right] / gap[right]))


def useful_tilts(
    tilts: FloatArray, bounds: FloatArray, tilt: float, ends: tuple[float, float]
) -> NDArray[np.intp]:
    """Places of the tilts that bound what is outside a window, also of a wider one or fewer steps."""
    gap = tilts - tilt
    places = np.arange(tilts.size)
    # Few tilts are enough, and moments at all of them, for every node, would cost much: of each
    # side the one that is best at the end of the window, and its neighbours.
    kept: set[int] = set()
    for side, end in ((places[gap > 0], ends[1]), (places[gap < 0], ends[0])):
        for wider in (0.0, 0.5, 1.5):
            for share in (1.0, 0.5, 0.25):
                edge = end + (end - sum(ends) / 2) * wider
                best = side[int(np.argmin(share * bounds[side] - gap[side] * edge))]
                kept.update(p for p in (best - 1, best, best + 1) if 0 <= p < tilts.size)
    return np.array(sorted(kept))


# -- products of characteristic functions -------------------------------------------------------


def sum_of_logs(
    cell: Cell, counts: FloatArray, values: list[ComplexArray]
) -> tuple[ComplexArray, FloatArray, float]:
    """``sum_t n_kt log(sum_c w_tc values_c)`` for every frequency (row) and length k (column).

    With the weights written as the mean of the cell plus (du, dv), the sum over c is
    ``x (1 + y_t)``, ``y_t = du A + dv B + du dv C``: the sum over steps of the series of
    ``log(1 + y_t)`` needs moments of (du, dv) only. Where y is too large the cell is halved.

    Returns the sums, the least modulus of a factor at each frequency, a bound of the truncation.
    """
    if cell.u.size <= _FEW:
        return _direct(cell, counts, values)
    du, dv, base, linear = _expand(cell, values)
    sizes = {key: np.abs(du ** key[0] * dv ** key[1]).max() for key in linear}
    radius = sum((sizes[key] * np.abs(term) for key, term in linear.items()), np.zeros(base.size))
    total = float(counts[-1].sum())
    # Where the remainder of the series to _MAX_ORDER, over all steps, is negligible.
    small = radius <= min((_TRUNCATION * (_MAX_ORDER + 1) / total) ** (1 / (_MAX_ORDER + 1)), 0.5)
    order, truncation = _series_order(float(radius[small].max(initial=0.0)), total)
    near = {key: term[small] for key, term in linear.items()}
    result = np.empty((base.size, counts.shape[0]), dtype=complex)
    least = np.abs(base) * (1 - radius)  # |x (1 + y)| >= |x| (1 - |y|)
    result[small] = _series(np.log(base[small]), near, (du, dv), counts, order)
    if not small.all():
        rest = [value[~small] for value in values]
        result[~small], least[~small], more = _halved(cell, counts, rest)
        truncation += more
    return result, least, truncation


def _direct(
    cell: Cell, counts: FloatArray, values: list[ComplexArray]
) -> tuple[ComplexArray, FloatArray, float]:
    """:func:`sum_of_logs` step by step."""
    factors = values[0][None, :] if cell.is_single else cell.weights() @ np.stack(values)
    size = np.abs(factors)
    # A least number instead of 0: a length without such a step is multiplied by 1.
    logs = np.log(np.maximum(size, _TINY)) + 1j * np.angle(factors)
    return logs.T @ counts.T.astype(complex), size.min(axis=0), 0.0


def _expand(
    cell: Cell, values: list[ComplexArray]
) -> tuple[FloatArray, FloatArray, ComplexArray, _Polynomial]:
    """``du, dv, x`` and the coefficients of y that are not 0."""
    u, v = float(cell.u.mean()), float(cell.v.mean())
    v00, v01, v10, v11 = values
    both = v11 - v10 - v01 + v00
    along_u, along_v = v10 - v00 + v * both, v01 - v00 + u * both
    base = v00 + u * (v10 - v00) + v * (v01 - v00) + u * v * both
    base = np.where(base == 0, _TINY, base)
    terms = {(1, 0): along_u, (0, 1): along_v, (1, 1): both}
    linear = {key: term / base for key, term in terms.items() if np.any(term)}
    return cell.u - u, cell.v - v, base, linear


def _halved(
    cell: Cell, counts: FloatArray, values: list[ComplexArray]
) -> tuple[ComplexArray, FloatArray, float]:
    """:func:`sum_of_logs` of the two halves of a cell."""
    wide = cell.u if np.ptp(cell.u) >= np.ptp(cell.v) else cell.v
    upper = wide > (wide.max() + wide.min()) / 2
    if upper.all() or not upper.any():  # all members are equal, up to rounding
        upper = np.arange(wide.size) < wide.size // 2
    parts = [sum_of_logs(cell.part(half), counts[:, half], values) for half in (upper, ~upper)]
    (logs, least, cut), (more, least_too, cut_too) = parts
    return logs + more, np.minimum(least, least_too), cut + cut_too


def _series_order(radius: float, steps: float) -> tuple[int, float]:
    """Terms of ``log(1 + y)``, |y| <= radius, and the remainder over all steps."""
    remainder = 0.0
    for order in range(1, _MAX_ORDER + 1):
        # |log(1 + y) - its series| <= sum_(k > order) |y|^k / k.
        remainder = steps * radius ** (order + 1) / ((order + 1) * (1 - radius))
        if remainder <= _TRUNCATION:
            break
    return order, remainder


def _series(
    log_base: ComplexArray,
    linear: _Polynomial,
    distances: tuple[FloatArray, FloatArray],
    counts: FloatArray,
    order: int,
) -> ComplexArray:
    """``sum_t n_kt (log x + log(1 + y_t))``, ``y_t = sum_ij du_t^i dv_t^j linear[i, j]``, to an order."""
    du, dv = distances
    if set(linear) == {(1, 0)} and counts.shape[0] == 1:
        return _series_in_one(log_base, linear[1, 0], du, counts[0], order)[:, None]
    terms, moments = [log_base], [counts.sum(axis=1)]
    power = dict(linear)
    for k in range(1, order + 1):
        for (i, j), term in power.items():
            terms.append((-1) ** (k + 1) / k * term)
            moments.append(counts @ (du**i * dv**j))
        if k < order:
            power = _times(power, linear)
    return np.asarray(np.stack(terms, axis=1) @ np.stack(moments).astype(complex))


def _series_in_one(
    log_base: ComplexArray, linear: ComplexArray, du: FloatArray, counts: FloatArray, order: int
) -> ComplexArray:
    """:func:`_series` of one length whose sample rates are equal, by Horner's rule."""
    power, moments = counts, [float(counts.sum())]
    for _ in range(order):
        power = power * du
        moments.append(float(power.sum()))
    result = np.zeros_like(linear)
    for k in range(order, 0, -1):
        result += (-1) ** (k + 1) / k * moments[k]
        result *= linear
    return result + moments[0] * log_base


def _times(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    """Product of two polynomials in (du, dv)."""
    product: _Polynomial = {}
    for (i, j), x in left.items():
        for (k, m), y in right.items():
            term = x * y
            known = product.get((i + k, j + m))
            product[i + k, j + m] = term if known is None else known + term
    return product


# -- the composition on a grid -----------------------------------------------------------------


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
        self, mixture: Mixture, make: Callable[[int], LossPmf], grid: Grid, counts_of: CountsOf
    ) -> None:
        self._grid = grid
        self._start = math.floor(grid.ends[0] / grid.h)
        points = max(math.ceil(grid.ends[1] / grid.h) - self._start + 1, 16)
        self.points = int(fft.next_fast_len(points, real=True))
        nodes = _Nodes(mixture, make, grid, self.points)
        self._active = nodes.transform_all(counts_of)
        size = counts_of(mixture.cells[0]).shape[0]
        self._logs = np.zeros((self._active.size, size), dtype=complex)  # of the products
        self._least = np.ones(self._active.size)  # of their factors
        self._truncation = 0.0  # of the series of the logarithms
        self._bounds = np.zeros((size, grid.tilts.size))
        self._log_norm, self._infinity, self.steps = np.zeros((3, size))
        for cell in mixture.cells:
            corners, counts = list(cell.corners), counts_of(cell)
            self._add(cell, counts, nodes.moments[corners], [nodes.kept[c] for c in corners])
            self._infinity += counts.sum(axis=1) * nodes.infinity[corners].max()

    def _add(
        self, cell: Cell, counts: FloatArray, moments: FloatArray, phi: list[ComplexArray]
    ) -> None:
        """Multiply by the steps of a cell, each ``sum_c w_c e^(m_c) phi_c / sum_c w_c e^(m_c)``."""
        scales = np.exp(moments[:, -1] - moments[0, -1])
        values = [scale * corner for scale, corner in zip(scales, phi, strict=True)]
        logs, least, truncation = sum_of_logs(cell, counts, values)
        self._logs += logs - counts @ np.log(cell.weights() @ scales)
        self._least = np.minimum(self._least, least / scales.max())
        self._truncation += truncation
        self._bounds += cumulant_bound(cell, counts, moments[:, :-1])
        self._log_norm += cumulant(cell, counts, moments[:, -1])
        self.steps += counts.sum(axis=1)

    def _product(self, k: int) -> tuple[ComplexArray, float]:
        """The product of a length, and a bound of the sum of the errors of its transform."""
        values = np.asarray(np.exp(self._logs[:, k]), dtype=np.complex128)
        size = np.abs(values)
        # One factor is off by at most eta: the product by steps * eta * |product / factor|, where the
        # product of the others is at most 1, as each factor is a characteristic function.
        eta = _UNIT * (8 + math.log2(self.points))
        rest = np.minimum(size / np.maximum(self._least, _TINY), 1.0)
        relative = self.steps[k] * eta * rest + (self._truncation + eta) * size
        # The l1 norm of the error is at most sqrt(n) times its l2 norm, which is by Parseval that of
        # the spectrum over sqrt(n); half of a real function's spectrum is given, so it counts twice.
        return values, math.sqrt(2 * float(relative @ relative))

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
        values, error = self._product(k)
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


# -- what is read from it ----------------------------------------------------------------------


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
