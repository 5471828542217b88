"""Products of the characteristic functions of many steps, as sums of logarithms."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lightning_dp.accounting._grouping import Cell
from lightning_dp.accounting.steps import FloatArray

__all__ = ["CharacteristicProduct", "ComplexArray", "sum_of_logs"]

ComplexArray = NDArray[np.complex128]
_Polynomial = dict[tuple[int, int], ComplexArray]  # by the powers of (du, dv)

_UNIT = 2.0**-52  # the rounding of one operation, relative
_MAX_ORDER = 6  # of the series of a logarithm
_TRUNCATION = 1e-10  # of that series, over all steps
_FEW = 64  # members of a cell for which the series does not pay
_TINY = 1e-300


class CharacteristicProduct:
    """Running products of characteristic functions: a row for each frequency, a column for each length.

    Args:
        frequencies: number of frequencies.
        lengths: number of lengths; each contains the one before.
    """

    def __init__(self, frequencies: int, lengths: int) -> None:
        self._logs = np.zeros((frequencies, lengths), dtype=complex)
        self._least = np.ones(frequencies)  # of the factors, for the error bound
        self._steps = np.zeros(lengths)
        self._truncation = 0.0

    def multiply(
        self, cell: Cell, counts: FloatArray, moments: FloatArray, phi: list[ComplexArray]
    ) -> None:
        """Multiply by the steps of a cell.

        Args:
            cell: whose steps.
            counts: a row for each length, a column for each member of the cell.
            moments: the log moments m of the corners.
            phi: the characteristic functions of the corners. A step is
                ``sum_c w_c e^(m_c) phi_c / sum_c w_c e^(m_c)``.
        """
        self._steps += counts.sum(axis=1)
        scales = np.exp(moments - moments[0])
        values = [scale * corner for scale, corner in zip(scales, phi, strict=True)]
        logs, least, truncation = sum_of_logs(cell, counts, values)
        norm = counts @ np.log(cell.weights() @ scales)
        self._logs += logs - norm
        self._least = np.minimum(self._least, least / scales.max())
        self._truncation += truncation

    def result(self, k: int, n: int) -> tuple[ComplexArray, float]:
        """The product of a length, and a bound of the sum of the errors of its transform of size n."""
        values = np.asarray(np.exp(self._logs[:, k]), dtype=np.complex128)
        size = np.abs(values)
        # One factor is off by at most eta: the product by steps * eta * |product / factor|, where the
        # product of the others is at most 1, as each factor is a characteristic function.
        eta = _UNIT * (8 + math.log2(n))
        rest = np.minimum(size / np.maximum(self._least, _TINY), 1.0)
        relative = self._steps[k] * eta * rest + (self._truncation + eta) * size
        # The l1 norm of the error is at most sqrt(n) times its l2 norm, which is by Parseval that of
        # the spectrum over sqrt(n); half of a real function's spectrum is given, so it counts twice.
        return values, math.sqrt(2 * float(relative @ relative))


def sum_of_logs(
    cell: Cell, counts: FloatArray, values: list[ComplexArray]
) -> tuple[ComplexArray, FloatArray, float]:
    """``sum_t n_kt log(sum_c w_tc values_c)`` for every frequency (row) and length k (column).

    With the weights written as the mean of the cell plus (du, dv), the sum over c is
    ``x (1 + y_t)``, ``y_t = du A + dv B + du dv C``: the sum over steps of the series of
    ``log(1 + y_t)`` needs moments of (du, dv) only. Where y is too large the cell is halved.

    Returns:
        The sums, the least modulus of a factor at each frequency, a bound of the truncation.
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
