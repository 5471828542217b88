"""Privacy loss of one subsampled Gaussian as a pessimistic distribution on a grid.

For a pair of distributions (P, Q) the privacy profile is
``delta(epsilon) = sup_S P(S) - e^epsilon Q(S)``. Joining the points of the profile at the grid
``epsilon = j h`` by straight lines in ``gamma = e^epsilon`` gives the profile of a discrete pair that
dominates (P, Q): Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots", arXiv
2207.04380v1, Theorem 5 and section 4. Dominating pairs compose: Zhu, Dong and Wang, arXiv
2106.08567v4, Theorem 10.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import ndtri_exp

from lightning_dp.accounting.base import FloatArray
from lightning_dp.accounting.gdp import gaussian_profile

_UNIT = 2.0**-52


@dataclass(frozen=True)
class LossPmf:
    """Mass ``probabilities[i]`` at the loss ``(start + i) * h``, and ``infinity`` at plus infinity.

    Every mass is rounded up by a bound of its floating-point error, so that they may sum to
    slightly more than 1.
    """

    start: int
    probabilities: FloatArray
    infinity: float


def forward_profile(
    epsilon: FloatArray, z: float, q: float, relation: str
) -> tuple[FloatArray, FloatArray]:
    """``(delta, error)`` of P from Q at each ``epsilon >= 0``; ``error`` bounds the rounding of delta.

    add/remove: P = (1-q) N(0, z^2) + q N(1, z^2), Q = N(0, z^2), the record is removed. With
    ``e^s = 1 + (e^epsilon - 1)/q`` this is ``q * G(s; 1/z)``, G the Gaussian profile (Balle, Barthe
    and Gaboardi, arXiv 1807.01647v2, Theorem 2 with equal components; the worst case pair is
    Theorem 11 of arXiv 2106.08567v4).

    replace-one: R = N(0), A = N(v), B = N(v') without and with the old and the new record,
    ``|v|, |v'| <= 1``; P = (1-q)R + qA, Q = (1-q)R + qB. By advanced joint convexity (arXiv
    1807.01647v2, Theorem 2), with ``a = e^s`` and ``b = e^epsilon / a``,
    ``H(P, Q) = q H_a(A, (1-b)R + bB) <= q ((1-b) H_a(A, R) + b H_a(A, B))
    <= q ((1-b) G(s; 1/z) + b G(s; 2/z))``: the first inequality is convexity in the second
    argument, the second holds as ``|v| <= 1`` and ``|v - v'| <= 2``. The pair (Q, P) has the same
    bound, so that the relation is symmetric.
    """
    shifted = epsilon + np.log1p(-(1 - q) * np.expm1(-epsilon) / q)
    delta, tail = gaussian_profile(shifted, 1 / z)
    error = _rounding(shifted, z) * tail
    if relation == "replace_one":
        double, double_tail = gaussian_profile(shifted, 2 / z)
        share = np.exp(epsilon - shifted)
        rest = -np.expm1(epsilon - shifted)
        delta = rest * delta + share * double
        error = error + share * _rounding(shifted, z / 2) * double_tail
    return q * delta, q * error


def backward_profile(
    epsilon: FloatArray, z: float, q: float, relation: str
) -> tuple[FloatArray, FloatArray]:
    """``(delta, error)`` of Q from P at each ``epsilon >= 0``; see :func:`forward_profile`.

    add/remove: ``int (R - g(1-q)R - g q A)+ = c G(s; 1/z)`` with ``g = e^epsilon``,
    ``c = 1 - g(1-q)`` and ``e^s = g q / c``; it is 0 where ``c <= 0``.
    """
    if relation == "replace_one":
        return forward_profile(epsilon, z, q, relation)
    c = q - (1 - q) * np.expm1(epsilon)
    inside = c > 0
    delta, error = np.zeros_like(epsilon), np.zeros_like(epsilon)
    scale = c[inside]
    gamma_q = q * np.exp(epsilon[inside])
    shifted = np.maximum(np.log(gamma_q / scale), 0.0)
    profile, tail = gaussian_profile(shifted, 1 / z)
    delta[inside] = scale * profile
    error[inside] = gamma_q * _rounding(shifted, z) * tail
    return delta, error


def _rounding(shifted: FloatArray, z: float) -> FloatArray:
    """Relative error of the terms of the Gaussian profile: of the arguments, of exp and of erfcx."""
    a = shifted * z - 0.5 / z
    return _UNIT * (4.0 + shifted + np.square(np.maximum(a, 0.0)))


def support(z: float, q: float, log_tail: float, relation: str) -> tuple[float, float]:
    """Losses beyond which the backward and the forward profile are below ``e^log_tail``."""
    mu = (2.0 if relation == "replace_one" else 1.0) / z
    # G(s; mu) <= Phi(mu/2 - s/mu), so s = mu (mu/2 + u) with Phi(-u) = tail is enough.
    top = mu * (mu / 2 - float(ndtri_exp(log_tail)))
    # The inverse of `shifted`: e^epsilon = 1 + q (e^s - 1), without overflow.
    up = top + math.log(q + (1 - q) * math.exp(-top))
    if relation == "replace_one":
        return up, up
    return -math.log(1 - q + q * math.exp(-top)), up


def length(z: float, q: float, h: float, log_tail: float, relation: str) -> float:
    """Number of grid points that :func:`discretise` will use."""
    down, up = support(z, q, log_tail, relation)
    return (down + up) / h + 3


def discretise(
    z: float, q: float, h: float, log_tail: float, relation: str, backward: bool
) -> LossPmf:
    """Connect the dots: a pmf of the loss on ``h * integers`` that dominates the subsampled Gaussian.

    Args:
        z: noise multiplier, > 0.
        q: sample rate, in (0, 1].
        h: grid spacing.
        log_tail: logarithm of the mass that may be moved to infinity.
        relation: ``"add_remove"`` or ``"replace_one"``.
        backward: the pair (Q, P) instead of (P, Q).
    """
    down, up = support(z, q, log_tail, relation)
    sides = [(forward_profile, up), (backward_profile, down)]
    (profile, reach), (other, other_reach) = sides[::-1] if backward else sides
    grid = np.arange(max(1, math.ceil(reach / h)) + 1) * h
    delta, error = profile(grid, z, q, relation)
    other_grid = np.arange(max(1, math.ceil(other_reach / h)) + 1) * h
    other_delta, other_error = other(other_grid, z, q, relation)
    high = _second_differences(delta, error, h)
    low = _second_differences(other_delta, other_error, h)
    # At loss 0: the slope on the right minus the slope on the left, where the left part of the
    # profile follows from the reversed pair, delta(-e) = 1 - e^-e + e^-e delta_reversed(e).
    drop = (delta[0] - delta[1]) + (math.exp(h) * other_delta[0] - other_delta[1])
    middle = 1 - drop / math.expm1(h) + 8 * (error[0] + other_error[0]) / math.expm1(h) + _UNIT
    weights = np.exp(-other_grid[1:])
    probabilities = np.concatenate(((low * weights)[::-1], [max(middle, 0.0)], high))
    probabilities.flags.writeable = False
    return LossPmf(-low.size, probabilities, float(delta[-1] + error[-1]))


cached_discretise = lru_cache(maxsize=16)(discretise)


def _second_differences(delta: FloatArray, error: FloatArray, h: float) -> FloatArray:
    """Masses at ``h, 2h, ...`` from the profile at ``0, h, 2h, ...``, constant after the last point.

    The mass at e is e^e times the change of the slope of delta as a function of e^e.
    """
    slope = np.diff(delta, append=delta[-1]) / math.expm1(h)  # times e^-(left end)
    masses = slope[1:] - slope[:-1] * math.exp(h)
    # Each difference of delta carries two rounding errors; those on the left are the largest.
    return np.asarray(np.maximum(masses, 0.0) + 4 * math.exp(h) * error[:-1] / math.expm1(h))
