"""Exponential moments of losses, K(t) of their sums, and the bounds of Chernoff that follow."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lightning_dp.accounting._grouping import Cell, Mixture
from lightning_dp.accounting._pmf import LossPmf
from lightning_dp.accounting.steps import FloatArray

__all__ = [
    "MomentTable",
    "cumulant",
    "cumulant_bound",
    "log_largest_weight",
    "mixture_bound",
    "outside",
    "useful_tilts",
    "window",
]

_BLOCK = 256  # grid points that share their powers


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
    """Return an upper bound of the K(t) of the steps of a cell.

    By Jensen's inequality ``sum_t log(w_t . m) <= T log(mean_t w_t . m)``: the tilts are many, and
    a sum over all steps for each of them would take longer than the composition.

    Args:
        cell: whose steps.
        counts: their numbers, a row for each length of a run.
        moments: log moments of the corners, a column for each tilt.

    Returns:
        A row for each length, a column for each tilt.
    """
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
    """Losses outside which the tilted distribution has about twice ``e^log_outside``, by Chernoff.

    ``bounds[i]`` is K at ``tilts[i]``; ``tilt`` is one of them.
    """
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
