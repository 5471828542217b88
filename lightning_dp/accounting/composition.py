"""Composition of many steps on one grid: tilt, transform, multiply, transform back.

Let X be the composed loss, ``K(t) = log E[e^(tX); X finite]`` and ``p~(x) = p(x) e^(lam x - K(lam))``
the tilted distribution. Then ``delta(e) = P(X = inf) + e^(K(lam) - lam e) S(e)`` with
``S(e) = sum_(x > e) p~(x) g(x - e)``, ``g(y) = e^(-lam y) (1 - e^-y) <= g_max``. With lam near the Chernoff
optimum of the wanted point, S / g_max is of the order of 0.1: the rounding errors of the transform
and the mass outside the window are relative to delta itself and not to 1. (The tilt is the saddle
point of Alghamdi et al., arXiv 2208.09595v1; here the sum is exact and all errors are added.)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from lightning_dp.accounting.base import FloatArray
from lightning_dp.accounting.grouping import Cell, Mixture
from lightning_dp.accounting.pmf import LossPmf

ComplexArray = NDArray[np.complex128]
_UNIT = 2.0**-52
_NEGLIGIBLE = -46.0  # log of 1e-20
_LOG_OUTSIDE = math.log(1e-10)
_MAX_ORDER = 6


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
        x = (self.start + np.arange(self.tilted.size)) * self.h
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


def log_largest_weight(tilt: FloatArray | float) -> FloatArray:
    """``log max_y e^(-tilt y) (1 - e^-y) = -tilt log(1 + 1/tilt) - log(1 + tilt)``, tilt > 0."""
    return np.asarray(-tilt * np.log1p(1 / np.asarray(tilt)) - np.log1p(tilt))


def log_moments(pmf: LossPmf, h: float, tilts: FloatArray) -> FloatArray:
    """``log sum_x p(x) e^(t x)`` for every t, without overflow."""
    result = np.empty(tilts.size)
    down = tilts <= 0
    p = pmf.probabilities
    result[down] = _log_moments_from_start(p, pmf.start, h * tilts[down])
    result[~down] = _log_moments_from_start(p[::-1], 1 - pmf.start - p.size, -h * tilts[~down])
    return result


def _log_moments_from_start(p: FloatArray, start: int, rates: FloatArray) -> FloatArray:
    """``log sum_i p_i e^(r (start + i))`` for every rate r <= 0: sums of blocks, then log-sum-exp."""
    block = 256
    blocks = -(-p.size // block)
    table = np.zeros(blocks * block)
    table[: p.size] = p
    inner = table.reshape(blocks, block) @ np.exp(np.arange(block)[:, None] * rates)
    with np.errstate(divide="ignore"):
        exponent = (start + block * np.arange(blocks)[:, None]) * rates + np.log(inner)
    top = exponent.max(axis=0)
    return np.asarray(top + np.log(np.exp(exponent - top).sum(axis=0)))


def cumulant_bound(mixture: Mixture, node_moments: FloatArray) -> FloatArray:
    """An upper bound of K(t): equality for single steps, Jensen's inequality inside cells."""
    total = np.zeros(node_moments.shape[1])
    for cell in mixture.cells:
        corners = node_moments[list(cell.corners)]
        if cell.is_single:
            total += cell.total * corners[0]
        else:
            top = corners.max(axis=0)
            total += cell.total * (top + np.log(cell.mean_weights() @ np.exp(corners - top)))
    return total


def cumulant(mixture: Mixture, node_moments: FloatArray) -> float:
    """K at one tilt, exactly."""
    total = []
    for cell in mixture.cells:
        corners = node_moments[list(cell.corners)]
        if cell.is_single:
            total.append(cell.total * float(corners[0]))
        else:
            top = float(corners.max())
            logs = top + np.log(cell.weights() @ np.exp(corners - top))
            total.append(float(cell.counts @ logs))
    return math.fsum(total)


def window(
    tilts: FloatArray, bounds: FloatArray, tilt: float, log_norm: float
) -> tuple[float, float]:
    """Losses outside which the tilted distribution has at most twice ``_LOG_OUTSIDE``, by Chernoff."""
    gap = tilts - tilt
    reach = bounds - log_norm - _LOG_OUTSIDE
    right = gap > 1e-3 * max(tilt, 1e-12)
    left = gap < -1e-3 * max(tilt, 1e-12)
    return float(np.max(reach[left] / gap[left])), float(np.min(reach[right] / gap[right]))


def compose(
    mixture: Mixture,
    pmfs: list[LossPmf],
    h: float,
    tilt: float,
    ends: tuple[float, float],
    log_norm: float,
) -> Composed:
    """Multiply the characteristic functions of all steps and transform back to the window."""
    start = math.floor(ends[0] / h)
    n = int(fft.next_fast_len(max(math.ceil(ends[1] / h) - start + 1, 16), real=True))
    product = _Product(n)
    transforms = _Transforms(mixture, pmfs, h, tilt, n)
    for number, cell in enumerate(mixture.cells):
        product.multiply(cell, transforms.of(number, cell))
    spectrum, spectrum_error = product.result()
    tilted = np.maximum(fft.irfft(spectrum, n), 0.0)
    tilted = np.roll(tilted, -(start % n))
    steps = mixture.total
    finite = math.fsum(c.total * max(pmfs[k].infinity for k in c.corners) for c in mixture.cells)
    error = 2 * math.exp(_LOG_OUTSIDE) + spectrum_error + 1e-14 * (steps + math.log2(n))
    return Composed(start, h, tilted, tilt, log_norm, min(finite, 1.0), error)


class _Transforms:
    """Transforms of the tilted nodes, made when first needed, dropped after the last use."""

    def __init__(
        self, mixture: Mixture, pmfs: list[LossPmf], h: float, tilt: float, n: int
    ) -> None:
        self._pmfs, self._h, self._tilt, self._n = pmfs, h, tilt, n
        self._last_use = {c: i for i, cell in enumerate(mixture.cells) for c in cell.corners}
        self._kept: dict[int, tuple[float, ComplexArray]] = {}

    def of(self, number: int, cell: Cell) -> list[tuple[float, ComplexArray]]:
        """``(log moment, transform of the tilted pmf)`` of each distinct corner of a cell."""
        for corner in cell.corners:
            if corner not in self._kept:
                self._kept[corner] = self._transform(self._pmfs[corner])
        found = [self._kept[c] for c in cell.corners]
        for corner in set(cell.corners):
            if self._last_use[corner] == number:
                del self._kept[corner]
        return found

    def _transform(self, pmf: LossPmf) -> tuple[float, ComplexArray]:
        x = (pmf.start + np.arange(pmf.probabilities.size)) * self._h
        moment = float(log_moments(pmf, self._h, np.array([self._tilt]))[0])
        tilted = pmf.probabilities * np.exp(np.minimum(self._tilt * x - moment, 700.0))
        shift = pmf.start % self._n
        rows = -(-(shift + tilted.size) // self._n)
        wrapped = np.zeros(rows * self._n)
        wrapped[shift : shift + tilted.size] = tilted
        return moment, np.asarray(fft.rfft(wrapped.reshape(rows, self._n).sum(axis=0)))


class _Product:
    """The running product of characteristic functions, at the frequencies that still matter."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._active = np.arange(n // 2 + 1)
        self._log = np.zeros(n // 2 + 1, dtype=complex)
        self._least = np.ones(n // 2 + 1)  # of the factors, for the error bound
        self._steps, self._truncation = 0.0, 0.0

    def multiply(self, cell: Cell, corners: list[tuple[float, ComplexArray]]) -> None:
        """Multiply by all steps of a cell."""
        base = corners[0][1][self._active]
        size = np.abs(base)
        self._least = np.minimum(self._least, size)
        with np.errstate(divide="ignore", invalid="ignore"):
            log_base = np.log(size) + 1j * np.angle(base)
        if cell.is_single:
            self._log += cell.total * log_base
        else:
            self._log += self._cell(cell, corners, base, log_base)
        self._steps += cell.total
        keep = self._log.real > _NEGLIGIBLE
        if not keep.all():
            self._active, self._log = self._active[keep], self._log[keep]
            self._least = self._least[keep]

    def _cell(
        self,
        cell: Cell,
        corners: list[tuple[float, ComplexArray]],
        base: ComplexArray,
        log_base: ComplexArray,
    ) -> ComplexArray:
        """``sum_t n_t log(sum_c w_tc m_c phi_c / sum_c w_tc m_c)``, m_c the moments of the corners."""
        scales = np.exp([moment - corners[0][0] for moment, _ in corners])
        weights = cell.weights()
        norm = float(cell.counts @ np.log(weights @ scales))
        values = [base] + [
            s * phi[self._active] for s, (_, phi) in zip(scales[1:], corners[1:], strict=True)
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            a, b, c = (value / base for value in values[1:])
        linear = {(0, 1): a - 1, (1, 0): b - 1, (1, 1): c - a - b + 1}
        linear = {key: term for key, term in linear.items() if np.any(term)}
        radius = sum((np.abs(term) for term in linear.values()), np.zeros(base.size))
        small = radius < 0.25
        largest = float(radius[small].max(initial=0.0))
        order, remainder = _series_order(largest, cell.total)
        if remainder > 1e-11:
            small &= radius < 1e-3
            order, remainder = _series_order(1e-3, cell.total)
        result = np.empty(base.size, dtype=complex)
        series = _log_series({k: term[small] for k, term in linear.items()}, cell, order)
        result[small] = cell.total * log_base[small] + series - norm
        self._truncation += remainder
        if not small.all():
            others = [value[~small] for value in values]
            result[~small] = _direct(cell, weights, others) - norm
        return result

    def result(self) -> tuple[ComplexArray, float]:
        """The product at all frequencies, and a bound of the sum of the errors of its transform."""
        spectrum = np.zeros(self._n // 2 + 1, dtype=complex)
        values = np.exp(self._log)
        spectrum[self._active] = values
        size = np.abs(values)
        # One factor is off by at most eta: the product by steps * eta * |product / factor|.
        eta = _UNIT * (8 + math.log2(self._n))
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = np.minimum(np.nan_to_num(size / self._least, nan=1.0), 1.0)
        relative = self._steps * eta * rest + (self._truncation + eta) * size
        # The l1 norm of the error is at most sqrt(n) times its l2 norm: the l2 norm of the spectrum.
        error = math.sqrt(2 * float(relative @ relative)) + self._n * math.exp(_NEGLIGIBLE)
        return spectrum, error


def _series_order(radius: float, steps: float) -> tuple[int, float]:
    """Terms of ``log(1 + y)``, |y| <= radius, and the remainder over all steps."""
    remainder = 0.0
    for order in range(1, _MAX_ORDER + 1):
        remainder = steps * radius ** (order + 1) / ((order + 1) * (1 - radius))
        if remainder <= 1e-13:
            break
    return order, remainder


def _log_series(
    linear: dict[tuple[int, int], ComplexArray], cell: Cell, order: int
) -> ComplexArray | complex:
    """``sum_t n_t log(1 + y_t)``, ``y_t = sum_(i,j) u_t^i v_t^j linear[i, j]``, to the given order."""
    power = dict(linear)
    result: ComplexArray | complex = 0j
    for k in range(1, order + 1):
        for (i, j), term in power.items():
            moment = float(cell.counts @ (cell.u**i * cell.v**j))
            result = result + (moment * (-1) ** (k + 1) / k) * term
        if k < order:
            power = _times(power, linear)
    return result


def _times(
    left: dict[tuple[int, int], ComplexArray], right: dict[tuple[int, int], ComplexArray]
) -> dict[tuple[int, int], ComplexArray]:
    """Product of two polynomials in (u, v)."""
    product: dict[tuple[int, int], ComplexArray] = {}
    for (i, j), x in left.items():
        for (k, m), y in right.items():
            term = x * y
            known = product.get((i + k, j + m))
            product[i + k, j + m] = term if known is None else known + term
    return product


def _direct(cell: Cell, weights: FloatArray, values: list[ComplexArray]) -> ComplexArray:
    """``sum_t n_t log(sum_c w_tc values_c)``, step by step."""
    stacked = np.stack(values)
    result = np.zeros(stacked.shape[1], dtype=complex)
    chunk = max(1, 2_000_000 // max(1, stacked.shape[1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        for first in range(0, weights.shape[0], chunk):
            rows = weights[first : first + chunk] @ stacked
            result += cell.counts[first : first + chunk] @ np.log(rows)
    return result
