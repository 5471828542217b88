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
_TRUNCATION = 1e-10
_FEW = 8


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
            self._log += self._mixtures(cell, corners)
        self._steps += cell.total
        self._keep(self._log.real > _NEGLIGIBLE)

    def _keep(self, which: NDArray[np.bool_]) -> None:
        """Forget the frequencies at which the product is negligible for good: no factor exceeds 1."""
        if not which.all():
            self._active, self._log = self._active[which], self._log[which]
            self._least = self._least[which]

    def _mixtures(self, cell: Cell, corners: list[Corner]) -> ComplexArray:
        """``sum_t n_t log(sum_c w_tc m_c phi_c / sum_c w_tc m_c)``, m_c the moments of the corners."""
        scales = np.exp([moment - corners[0][0] for moment, _ in corners])
        norm = float(cell.counts @ np.log(cell.weights() @ scales))
        values = [
            scale * phi[self._active] for scale, (_, phi) in zip(scales, corners, strict=True)
        ]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs, truncation = sum_of_logs(cell, values)
        self._truncation += truncation
        return logs - norm

    def result(self) -> tuple[ComplexArray, float]:
        """The product at all frequencies, and a bound of the sum of the errors of its transform."""
        spectrum = np.zeros(self._n // 2 + 1, dtype=complex)
        values = np.asarray(np.exp(self._log), dtype=complex)
        spectrum[self._active] = values
        size = np.abs(values)
        # One factor is off by at most eta: the product by steps * eta * |product / factor|.
        eta = _UNIT * (8 + math.log2(self._n))
        with np.errstate(divide="ignore", invalid="ignore"):
            rest = np.minimum(np.nan_to_num(size / self._least, nan=1.0), 1.0)
        relative = self._steps * eta * rest + (self._truncation + eta) * size
        # The l1 norm of the error is at most sqrt(n) times its l2 norm: the l2 norm of the spectrum.
        error = math.sqrt(2 * float(relative @ relative)) + self._n * math.exp(_NEGLIGIBLE)
        return np.asarray(spectrum, dtype=np.complex128), error


def sum_of_logs(cell: Cell, values: list[ComplexArray]) -> tuple[ComplexArray, float]:
    """``sum_t n_t log(sum_c w_tc values_c)`` at every frequency, and a bound of the truncation.

    With the weights written as the mean of the cell plus (du, dv), the sum over c is
    ``x (1 + y_t)``, ``y_t = du A + dv B + du dv C``: the sum over steps of the series of
    ``log(1 + y_t)`` needs moments of (du, dv) only. Where y is too large the cell is halved.
    """
    mean_u, du = _centered(cell.u, cell.counts)
    mean_v, dv = _centered(cell.v, cell.counts)
    v00, v01, v10, v11 = values
    along_u = (v10 - v00) * (1 - mean_v) + (v11 - v01) * mean_v
    along_v = (v01 - v00) * (1 - mean_u) + (v11 - v10) * mean_u
    both = v11 - v10 - v01 + v00
    base = v00 + mean_u * (v10 - v00) + mean_v * (v01 - v00) + mean_u * mean_v * both
    linear: _Polynomial = {}
    radius = np.zeros(base.size)
    for key, term, size in (
        ((1, 0), along_u, np.abs(du).max()),
        ((0, 1), along_v, np.abs(dv).max()),
        ((1, 1), both, np.abs(du * dv).max()),
    ):
        if size > 0 and np.any(term):
            linear[key] = term / base
            radius += size * np.abs(linear[key])
    if cell.u.size <= _FEW:
        small = radius < 0
    else:
        small = radius <= (_TRUNCATION * (_MAX_ORDER + 1) / cell.total) ** (1 / (_MAX_ORDER + 1))
    result = np.empty(base.size, dtype=complex)
    order, truncation = _series_order(float(radius[small].max(initial=0.0)), cell.total)
    series = _log_series({k: x[small] for k, x in linear.items()}, cell.counts, du, dv, order)
    result[small] = cell.total * np.log(base[small]) + series
    if not small.all():
        rest = [value[~small] for value in values]
        result[~small], more = _halved(cell, du, dv, rest)
        truncation += more
    return result, truncation


def _centered(x: FloatArray, counts: FloatArray) -> tuple[float, FloatArray]:
    """The mean, and the distances from it."""
    mean = float(counts @ x / counts.sum())
    return mean, x - mean


def _halved(
    cell: Cell, du: FloatArray, dv: FloatArray, values: list[ComplexArray]
) -> tuple[ComplexArray, float]:
    """:func:`sum_of_logs` of the two halves of a cell, or of its steps if they are few."""
    if cell.u.size <= _FEW:
        logs = np.log(cell.weights() @ np.stack(values))
        return np.asarray(cell.counts @ logs, dtype=complex), 0.0
    wide = du if np.ptp(du) >= np.ptp(dv) else dv
    upper = wide > (wide.max() + wide.min()) / 2
    result = np.zeros(values[0].size, dtype=complex)
    truncation = 0.0
    for half in (upper, ~upper):
        part = Cell(cell.corners, cell.u[half], cell.v[half], cell.counts[half])
        logs, more = sum_of_logs(part, values)
        result += logs
        truncation += more
    return result, truncation


def _series_order(radius: float, steps: float) -> tuple[int, float]:
    """Terms of ``log(1 + y)``, |y| <= radius, and the remainder over all steps."""
    remainder = 0.0
    for order in range(1, _MAX_ORDER + 1):
        remainder = steps * radius ** (order + 1) / ((order + 1) * (1 - radius))
        if remainder <= _TRUNCATION:
            break
    return order, remainder


def _log_series(
    linear: _Polynomial, counts: FloatArray, du: FloatArray, dv: FloatArray, order: int
) -> ComplexArray | complex:
    """``sum_t n_t log(1 + y_t)``, ``y_t = sum_(i,j) du_t^i dv_t^j linear[i, j]``, to the given order."""
    power = dict(linear)
    result: ComplexArray | complex = 0j
    for k in range(1, order + 1):
        for (i, j), term in power.items():
            moment = float(counts @ (du**i * dv**j))
            result = result + (moment * (-1) ** (k + 1) / k) * term
        if k < order:
            power = _times(power, linear)
    return result


def _times(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    """Product of two polynomials in (du, dv)."""
    product: _Polynomial = {}
    for (i, j), x in left.items():
        for (k, m), y in right.items():
            term = x * y
            known = product.get((i + k, j + m))
            product[i + k, j + m] = term if known is None else known + term
    return product
