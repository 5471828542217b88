"""Exponential moments of one and of many steps, and what Chernoff's bound makes of them.

``K(t) = log E[e^(tX); X finite]`` is the cumulant function of the composed loss X, the sum over steps
of the logarithms of their moments.
"""

import math

import numpy as np

from lightning_dp.accounting.base import FloatArray
from lightning_dp.accounting.grouping import Mixture
from lightning_dp.accounting.pmf import LossPmf

_BLOCK = 256


def log_largest_weight(tilt: FloatArray | float) -> FloatArray:
    """``log max_y e^(-tilt y) (1 - e^-y) = -tilt log(1 + 1/tilt) - log(1 + tilt)``, tilt > 0."""
    return np.asarray(-tilt * np.log1p(1 / np.asarray(tilt)) - np.log1p(tilt))


class MomentTable:
    """Computes ``log sum_x p(x) e^(t x)`` at fixed tilts for many pmfs on one grid, without overflow."""

    def __init__(self, h: float, tilts: FloatArray) -> None:
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


def outside(
    tilts: FloatArray, bounds: FloatArray, tilt: float, log_norm: float, ends: tuple[float, float]
) -> float:
    """Chernoff's bound of the mass of the tilted distribution outside the losses ``ends``."""
    gap = tilts - tilt
    right, left = gap > 0, gap < 0
    above = float(np.min((bounds - log_norm - gap * ends[1])[right]))
    below = float(np.min((bounds - log_norm - gap * ends[0])[left]))
    return math.exp(min(above, 0.0)) + math.exp(min(below, 0.0))


def window(
    tilts: FloatArray, bounds: FloatArray, tilt: float, log_outside: float
) -> tuple[float, float]:
    """Losses outside which the tilted distribution has about twice ``e^log_outside``, by Chernoff.

    ``bounds[i]`` is K at ``tilts[i]``; ``tilt`` is one of them.
    """
    gap = tilts - tilt
    reach = bounds - float(bounds[int(np.argmin(np.abs(gap)))]) - log_outside
    right = gap > 1e-3 * tilt
    left = gap < -1e-3 * tilt
    return float(np.max(reach[left] / gap[left])), float(np.min(reach[right] / gap[right]))
