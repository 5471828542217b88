"""Products of characteristic functions of many steps, at the frequencies that still matter."""

import math

import numpy as np
from numpy.typing import NDArray

from lightning_dp.accounting.base import FloatArray
from lightning_dp.accounting.grouping import Cell

ComplexArray = NDArray[np.complex128]
Corner = tuple[float, ComplexArray]
_Polynomial = dict[tuple[int, int], ComplexArray]
_UNIT = 2.0**-52
_NEGLIGIBLE = -46.0  # log of 1e-20
_MAX_ORDER = 6


class CharacteristicProduct:
    """The running product of characteristic functions, at the frequencies that still matter."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._active = np.arange(n // 2 + 1)
        self._log = np.zeros(n // 2 + 1, dtype=complex)
        self._least = np.ones(n // 2 + 1)  # of the factors, for the error bound
        self._steps, self._truncation = 0.0, 0.0

    def multiply(self, cell: Cell, corners: list[Corner]) -> None:
        """Multiply by all steps of a cell."""
        if not cell.is_single:
            # Under the tilt a step is a mixture of the corners: |factor| <= max_c |phi_c|.
            largest = np.max([np.abs(phi[self._active]) for _, phi in corners], axis=0)
            with np.errstate(divide="ignore"):
                self._keep(self._log.real + cell.total * np.log(largest) > _NEGLIGIBLE)
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
        self._keep(self._log.real > _NEGLIGIBLE)

    def _keep(self, which: NDArray[np.bool_]) -> None:
        """Forget the frequencies at which the product is negligible for good: no factor exceeds 1."""
        if not which.all():
            self._active, self._log = self._active[which], self._log[which]
            self._least = self._least[which]

    def _cell(
        self,
        cell: Cell,
        corners: list[Corner],
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
    linear: _Polynomial, cell: Cell, order: int
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
    left: _Polynomial, right: _Polynomial
) -> _Polynomial:
    """Product of two polynomials in (u, v)."""
    product: _Polynomial = {}
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
