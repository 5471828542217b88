"""Privacy loss of one subsampled Gaussian as a pessimistic distribution on a grid.

For a pair of distributions (P, Q) the privacy profile is
``delta(epsilon) = sup_S P(S) - e^epsilon Q(S)``. Joining the points of the profile at the grid
``epsilon = j h`` by straight lines in ``gamma = e^epsilon`` gives the profile of a discrete pair that
dominates (P, Q): Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, "Connect the Dots", arXiv
2207.04380v1, Theorem 5 and section 4. Dominating pairs compose: Zhu, Dong and Wang, arXiv
2106.08567v4, Theorem 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from scipy.special import erfcx, ndtr, ndtri_exp

from lightning_dp.accounting.gdp import gaussian_profile
from lightning_dp.accounting.steps import FloatArray

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
    moments: dict[tuple[float, bytes], FloatArray] = field(default_factory=dict, repr=False)
    """Log moments that were asked for, by the grid and the tilts."""


def forward_profile(
    epsilon: FloatArray, z: float, q: float, relation: str
) -> tuple[FloatArray, FloatArray]:
    """``(delta, error)`` of P from Q at each ``epsilon >= 0``; ``error`` bounds the rounding of delta.

    add/remove: P = (1-q) N(0, z^2) + q N(1, z^2), Q = N(0, z^2), the record is removed. With
    ``e^s = 1 + (e^epsilon - 1)/q`` this is ``q * G(s; 1/z)``, G the Gaussian profile (Balle, Barthe
    and Gaboardi, arXiv 1807.01647v2, Theorem 2 with equal components; the worst case pair is
    Theorem 11 of arXiv 2106.08567v4). replace-one: :func:`replacement_profile`.
    """
    if relation == "replace_one":
        return replacement_profile(epsilon, z, q)
    shifted = epsilon + np.log1p(-(1 - q) * np.expm1(-epsilon) / q)
    delta, tail = gaussian_profile(shifted, 1 / z)
    return q * delta, q * _rounding(shifted, shifted * z - 0.5 / z) * tail


def replacement_profile(epsilon: FloatArray, z: float, q: float) -> tuple[FloatArray, FloatArray]:
    """``(delta, error)`` of P = (1-q) N(0) + q N(1) from Q = (1-q) N(0) + q N(-1), sd z, epsilon >= 0.

    The worst case of replace-one. With v, v' the clipped old and new record, ``|v|, |v'| <= 1``, and
    ``g = e^epsilon >= 1``, delta is the expectation over N(0) of ``(a_1 Z_1 + a_2 Z_2 + a_3)+``,
    ``Z_1, Z_2`` the likelihood ratios of N(v), N(v') to N(0), ``a = (q, -g q, -(g-1)(1-q))``. By
    Kahane's interpolation formula (C. R. Acad. Sci. Paris 303, 1986), moving the points (v, v', 0)
    changes it by ``-1/2 sum_(i<j) a_i a_j W_ij d(D_ij)``, D the squared distances, ``W_ij >= 0`` the
    integral of ``Z_i Z_j`` over the surface ``a . Z = 0``. As ``a_1 a_2, a_1 a_3 <= 0``: turning v' to
    the direction of -v, then growing ``|v|`` to 1, does not lower delta. Growing ``s = |v'|`` of
    v' = -s v to 1 does not either: it changes ``D_12 = (1+s)^2`` and ``D_23 = s^2``, and
    ``q Z_1 >= (g-1)(1-q)`` on the surface gives ``q W_12 >= (g-1)(1-q) W_23``. For g < 1 exchange the
    roles of P and Q: the same pair, mirrored.

    ``loss(x) = epsilon`` at ``x = z^2 (epsilon/2 + asinh((1-q)/q e^(1/2z^2) sinh(epsilon/2)))``.
    """
    half = 0.5 / z**2
    with np.errstate(divide="ignore"):
        # log(e^t sinh(epsilon/2)) and asinh(e^y), without overflow.
        y = half + epsilon / 2 + np.log(-np.expm1(-epsilon) / 2)
        y = y + (math.log1p(-q) - math.log(q) if q < 1 else -math.inf)
    asinh = np.where(y > 20, y + math.log(2), np.arcsinh(np.exp(np.minimum(y, 20.0))))
    x = z * z * (epsilon / 2 + asinh)
    a0, a1, a2 = x / z, (x - 1) / z, (x + 1) / z
    # q phi(a1) = new + rest: the likelihoods at the threshold.
    new = q * np.exp(epsilon - 0.5 * a2 * a2) / math.sqrt(2 * math.pi)
    # For q = 1 the exponent is without bound, and its factor 0.
    rest = (1 - q) * -np.expm1(-epsilon) * np.exp(np.minimum(epsilon - 0.5 * a0 * a0, 700.0))
    rest /= math.sqrt(2 * math.pi)
    mills = _mills(np.maximum(a1, 0.0))
    tail = np.where(a1 > 0, (new + rest) * mills, q * ndtr(-a1))
    delta = np.maximum(tail - new * _mills(a2) - rest * _mills(a0), 0.0)
    return delta, _rounding(epsilon + asinh, a2) * tail


def backward_profile(
    epsilon: FloatArray, z: float, q: float, relation: str
) -> tuple[FloatArray, FloatArray]:
    """``(delta, error)`` of Q from P at each ``epsilon >= 0``; see :func:`forward_profile`.

    add/remove: ``int (R - g(1-q)R - g q A)+ = c G(s; 1/z)`` with ``g = e^epsilon``,
    ``c = 1 - g(1-q)`` and ``e^s = g q / c``; it is 0 where ``c <= 0``.
    """
    if relation == "replace_one":
        return forward_profile(epsilon, z, q, relation)
    c = q - (1 - q) * np.expm1(np.minimum(epsilon, 700.0))
    inside = c > 0
    delta, error = np.zeros_like(epsilon), np.zeros_like(epsilon)
    scale = c[inside]
    shifted = np.maximum(epsilon[inside] + math.log(q) - np.log(scale), 0.0)
    profile, tail = gaussian_profile(shifted, 1 / z)
    delta[inside] = scale * profile
    # c is off by a unit of q, and c G(s) by that times G - dG/ds <= 2 * tail.
    error[inside] = (scale + 4 * q) * _rounding(shifted, shifted * z - 0.5 / z) * tail
    return delta, error


def _mills(x: FloatArray) -> FloatArray:
    """``Phi(-x) / phi(x)``."""
    return np.asarray(math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2)))


def _rounding(shifted: FloatArray, a: FloatArray) -> FloatArray:
    """Relative error of the terms of a profile: of the arguments, of exp and of erfcx."""
    return np.asarray(_UNIT * (4.0 + shifted + np.square(np.maximum(a, 0.0))))


def support(z: float, q: float, log_tail: float, relation: str) -> tuple[float, float]:
    """Losses beyond which the backward and the forward profile are below ``e^log_tail``."""
    # delta(loss(x)) <= P(X > x) <= Phi(-u) at x = 1 + u z.
    x = 1 - float(ndtri_exp(log_tail)) * z
    top, bottom = (x - 0.5) / z**2, -(x + 0.5) / z**2
    up = _log_mixture(q, top)
    if relation == "replace_one":
        up -= _log_mixture(q, bottom)
        return up, up
    return -_log_mixture(q, -top), up


def _log_mixture(q: float, t: float) -> float:
    """``log(1 - q + q e^t)`` without overflow."""
    if q == 1:
        return t
    if t > 0:
        return t + math.log(q + (1 - q) * math.exp(-t))
    return math.log1p(q * math.expm1(t))


def discretise(
    z: float,
    q: float,
    h: float,
    log_tail: float,
    relation: str,
    backward: bool = False,
    limit: float = math.inf,
) -> LossPmf:
    """Connect the dots: a pmf of the loss on ``h * integers`` that dominates the subsampled Gaussian.

    Args:
        z: noise multiplier, > 0.
        q: sample rate, in (0, 1].
        h: grid spacing.
        log_tail: logarithm of the mass that may be moved to infinity.
        relation: ``"add_remove"`` or ``"replace_one"``.
        backward: the pair (Q, P) instead of (P, Q).
        limit: losses above it are moved to infinity, losses below its negative up to there.
    """
    down, up = support(z, q, log_tail, relation)
    sides = [(forward_profile, up), (backward_profile, down)]
    (profile, reach), (other, other_reach) = sides[::-1] if backward else sides
    grid = np.arange(max(1, math.ceil(min(reach, limit) / h)) + 1, dtype=float) * h
    delta, error = profile(grid, z, q, relation)
    other_grid = np.arange(max(1, math.ceil(min(other_reach, limit) / h)) + 1, dtype=float) * h
    other_delta, other_error = other(other_grid, z, q, relation)
    # Straight lines between points of a convex function lie above it, and so does a constant
    # after the last point, since it falls: the profile of the pmf is nowhere below the true one.
    high = _second_differences(delta, error, h)
    low = _second_differences(other_delta, other_error, h)
    # At loss 0: the slope on the right minus the slope on the left, where the left part of the
    # profile follows from the reversed pair, delta(-e) = 1 - e^-e + e^-e delta_reversed(e).
    drop = (delta[0] - delta[1]) + (math.exp(h) * other_delta[0] - other_delta[1])
    middle = 1 - drop / math.expm1(h) + 8 * (error[0] + other_error[0]) / math.expm1(h) + _UNIT
    # The reversed pair has its mass under Q; under P it is e^-loss of that.
    weights = np.exp(-other_grid[1:])
    probabilities = np.concatenate(((low * weights)[::-1], [max(middle, 0.0)], high))
    probabilities.flags.writeable = False
    return LossPmf(-low.size, probabilities, float(delta[-1] + error[-1]))


class Node(Protocol):
    """One release, as a pair of distributions of which the privacy loss can be put on a grid."""

    def support(self, log_tail: float, relation: str) -> tuple[float, float]:
        """Losses beyond which the backward and the forward profile are below ``e^log_tail``."""
        ...

    def pmf(
        self, h: float, log_tail: float, relation: str, backward: bool, limit: float
    ) -> LossPmf:
        """Return a pmf that dominates it; the arguments are those of :func:`discretise`."""
        ...

    def __hash__(self) -> int: ...


class GaussianNode(NamedTuple):
    """One subsampled Gaussian release."""

    noise_multiplier: float
    sample_rate: float

    def support(self, log_tail: float, relation: str) -> tuple[float, float]:
        return support(*self, log_tail, relation)

    def pmf(
        self, h: float, log_tail: float, relation: str, backward: bool, limit: float
    ) -> LossPmf:
        return discretise(*self, h, log_tail, relation, backward, limit)


@lru_cache(maxsize=16)
def cached_pmf(
    node: Node, h: float, log_tail: float, relation: str, backward: bool, limit: float
) -> LossPmf:
    """Return the pmf of a node; the latest few are kept."""
    return node.pmf(h, log_tail, relation, backward, limit)


def _second_differences(delta: FloatArray, error: FloatArray, h: float) -> FloatArray:
    """Masses at ``h, 2h, ...`` from the profile at ``0, h, 2h, ...``, constant after the last point.

    The mass at e is e^e times the change of the slope of delta as a function of e^e.
    """
    # delta(gamma) = sum_x p(x) (1 - gamma e^-x)+ has the slope -sum_(e^x > gamma) p(x) e^-x.
    slope = np.diff(delta, append=delta[-1]) / math.expm1(h)  # times e^(left end)
    masses = slope[1:] - slope[:-1] * math.exp(h)
    # Each difference of delta carries two rounding errors; those on the left are the largest.
    return np.asarray(np.maximum(masses, 0.0) + 4 * math.exp(h) * error[:-1] / math.expm1(h))
