"""Privacy loss of one release as a pessimistic distribution on a grid.

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

from lightning_dp.accounting.events import (
    AbstractEvent,
    RandomAllocationEpoch,
    TruncatedGaussian,
)
from lightning_dp.accounting.gdp import gaussian_profile
from lightning_dp.accounting.steps import FloatArray

_UNIT = 2.0**-52
_POINTS = 1000  # of a distribution of ratios
_SMALLEST = -600.0  # logarithm of a mass under Q at the largest ratio: products of two are numbers


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


@lru_cache(maxsize=16, typed=True)  # as tuples, nodes of two kinds may be equal
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


# -- batches that are no Poisson sample: with a limit, and of an allocated epoch -----------------


def node_of(event: AbstractEvent) -> SampledNode:
    """Return the pair of distributions of an event that costs less than its pair of numbers."""
    if isinstance(event, TruncatedGaussian):
        return TruncatedNode(*event.pair, event.chance_of_limit)
    assert isinstance(event, RandomAllocationEpoch)
    return AllocationNode(event.noise_multiplier, event.batches)


class TruncatedNode(NamedTuple):
    """With a public chance a subsampled Gaussian of half the noise, else one of all of it.

    Args:
        half, sample_rate: z/2 and q.
        chance: of the former.
    """

    half: float
    sample_rate: float
    chance: float

    def support(self, log_tail: float, relation: str) -> tuple[float, float]:
        return support(self.half, self.sample_rate, log_tail, relation)

    def pmf(
        self, h: float, log_tail: float, relation: str, backward: bool, limit: float
    ) -> LossPmf:
        """Return the mixture of the two, which the hockey-stick divergence is convex in."""
        noises = (2 * self.half, 1 - self.chance), (self.half, self.chance)
        parts = [
            (discretise(z, self.sample_rate, h, log_tail, relation, backward, limit), weight)
            for z, weight in noises
        ]
        start = min(pmf.start for pmf, _ in parts)
        masses = np.zeros(max(pmf.start + pmf.probabilities.size for pmf, _ in parts) - start)
        for pmf, weight in parts:
            place = pmf.start - start
            masses[place : place + pmf.probabilities.size] += weight * pmf.probabilities
        infinity = math.fsum(weight * pmf.infinity for pmf, weight in parts)
        return _trimmed(start, masses * (1 + 4 * _UNIT), infinity * (1 + 4 * _UNIT))


class AllocationNode(NamedTuple):
    """An epoch of which each record takes part in one of t steps, drawn uniformly and secretly.

    With x_i ~ N(0, z^2) under Q and one of them, chosen uniformly, from N(1, z^2) under P, the ratio of
    the densities is the mean of t independent ``E_i = exp((x_i - 1/2) / z^2)``, of mean 1 under Q.

    Any pair that the Gaussian one, of one step, is a post-processing of, may take its place: the same
    post-processing of each of the t coordinates gives the pair above. Connecting the dots makes such a
    pair, with finitely many ratios (arXiv 2207.04380v1, Theorem 5, and Blackwell's theorem). Then sums
    of k ratios are kept on a grid of :data:`_POINTS`: a ratio between two points is shared out between
    them so that its mean stays, which is again such a pair (the larger experiment also tells which
    point was drawn, and the mean over both is the ratio). One above the last point keeps its mass
    there, and the rest of its mean goes to infinity; one below the first is shared with the ratio 0.
    So the result dominates in both orders, and sums of 2k come from those of k: about 2 log2(t) sums.

    Where masses under Q would be too small for floats (little noise at a tiny δ), a full batch is the
    bound: the pair above is a mixture of its pairs.

    Args:
        noise_multiplier: of each step.
        batches: t, the steps of the epoch.
    """

    noise_multiplier: float
    batches: int

    def support(self, log_tail: float, relation: str) -> tuple[float, float]:
        if (full := self._full_batch(log_tail)) is not None:
            return full.support(log_tail, relation)
        logs = _mean_of(*self, log_tail).logs
        return max(-float(logs[0]), 0.0), max(float(logs[-1]), 0.0)

    def pmf(
        self, h: float, log_tail: float, relation: str, backward: bool, limit: float
    ) -> LossPmf:
        """Return the loss on a grid, its ratios shared out once more."""
        if (full := self._full_batch(log_tail)) is not None:
            return full.pmf(h, log_tail, relation, backward, limit)
        ratios = _mean_of(*self, log_tail)
        reach = max(1, math.ceil(min(limit / h, 2.0**40)))
        low = math.floor(float(ratios.logs[0]) / h)
        points = math.ceil(float(ratios.logs[-1]) / h) - low + 2
        masses = _shared(ratios.logs, ratios.masses, low * h, h, points)
        places = low + np.arange(points)
        if backward:  # the loss is the logarithm of 1 / ratio, under Q
            places, masses, infinity = -places[::-1], masses[::-1], ratios.zero
        else:
            masses = masses * np.exp(places * h) * (1 + 8 * _UNIT)
            infinity = ratios.infinite
        beyond = places > reach
        infinity += float(masses[beyond].sum()) * (1 + 1e-9)
        places, masses = np.maximum(places[~beyond], -reach), masses[~beyond]
        start = int(places[0])
        sums = np.bincount(places.astype(np.intp) - start, masses).astype(np.float64)
        return _trimmed(start, sums, infinity)

    def _full_batch(self, log_tail: float) -> GaussianNode | None:
        """Return the release of a full batch where the ratios' masses are no numbers."""
        full = GaussianNode(self.noise_multiplier, 1.0)
        largest = full.support(log_tail - 4, "add_remove")[1]
        return full if log_tail - largest < _SMALLEST else None


SampledNode = TruncatedNode | AllocationNode


def _trimmed(start: int, masses: FloatArray, infinity: float) -> LossPmf:
    """Return a pmf whose ends have mass: moments are taken from there."""
    first, last = np.flatnonzero(masses)[[0, -1]]
    masses = masses[first : last + 1]
    masses.flags.writeable = False
    return LossPmf(int(start + first), masses, infinity)


@dataclass(frozen=True)
class _Ratios:
    """A distribution of the mean of k ratios: masses under Q at ``exp(low + i step)`` and at 0.

    ``infinite`` is the mass under P at infinity. Masses are rounded up.
    """

    low: float
    step: float
    masses: FloatArray
    zero: float
    infinite: float

    @property
    def logs(self) -> FloatArray:
        return np.asarray(self.low + self.step * np.arange(self.masses.size), dtype=np.float64)


@lru_cache(maxsize=64)
def _mean_of(noise_multiplier: float, k: int, log_tail: float) -> _Ratios:
    """Return the distribution of the mean of k ratios, about ``e^log_tail`` of it at 0 and infinity."""
    if k == 1:
        down, up = support(noise_multiplier, 1.0, log_tail - 4, "add_remove")
        h = (down + up) / _POINTS
        where = (noise_multiplier, 1.0, h, log_tail - 4, "add_remove")
        pmf = discretise(*where)
        logs = (pmf.start + np.arange(pmf.probabilities.size)) * h
        masses = pmf.probabilities * np.exp(-logs) * (1 + 8 * _UNIT)
        return _Ratios(pmf.start * h, h, masses, discretise(*where, True).infinity, pmf.infinity)
    half = _mean_of(noise_multiplier, k // 2, log_tail)
    tail = math.exp(log_tail - 4)
    found = _joined(half, half, 0.5, tail)
    if k % 2:
        found = _joined(found, _mean_of(noise_multiplier, 1, log_tail), (k - 1) / k, tail)
    return found


def _joined(first: _Ratios, second: _Ratios, share: float, tail: float) -> _Ratios:
    """Return the distribution of ``share X + (1 - share) Y``, X and Y independent."""
    # Where all ratios are above a half, the difference from 1 counts.
    near = min(first.low, second.low) > -0.7
    there, back = (np.expm1, np.log1p) if near else (np.exp, np.log)
    logs = back(share * there(first.logs)[:, None] + (1 - share) * there(second.logs))
    low, high = float(logs[0, 0]), float(logs[-1, -1])
    step = (high - low) / (_POINTS - 1)
    products = first.masses[:, None] * second.masses
    masses = _shared(logs.ravel(), products.ravel(), low, step, _POINTS)
    zero = first.zero * second.zero
    grid = low + step * np.arange(_POINTS)
    alone = (
        (first.logs + math.log(share), first.masses * second.zero),
        (second.logs + math.log1p(-share), second.masses * first.zero),
    )
    for at, mass in alone:
        inside = at >= low
        masses += _shared(at[inside], mass[inside], low, step, _POINTS)
        zero += _shared_with_zero(at[~inside] - low, mass[~inside], masses[:1])
    infinite = share * first.infinite + (1 - share) * second.infinite
    # The ends are cut where next to nothing is beyond them, which makes the next grid finer.
    beyond = np.cumsum((masses * np.exp(grid))[::-1])[::-1]
    last = max(int(np.flatnonzero(beyond > tail)[-1]), 1)
    above = masses[last + 1 :]
    infinite += float(above @ (np.exp(grid[last + 1 :]) - math.exp(grid[last])))
    masses[last] += above.sum()
    least = min(int(np.flatnonzero(np.cumsum(masses) > tail)[0]), last - 1)
    zero += _shared_with_zero(grid[:least] - grid[least], masses[:least], masses[least : least + 1])
    rounding = 1 + 1e-12
    masses = masses[least : last + 1] * rounding
    return _Ratios(float(grid[least]), step, masses, zero * rounding, infinite * rounding)


def _shared(
    logs: FloatArray, masses: FloatArray, low: float, step: float, points: int
) -> FloatArray:
    """Share masses out between their neighbours on a grid, so that the mean of the ratio stays."""
    place = (logs - low) / step
    left = np.clip(np.floor(place).astype(np.intp), 0, points - 2)
    upper = np.expm1(np.clip(place - left, 0.0, 1.0) * step) / math.expm1(step)
    # The place is off by some units of the largest logarithm over the step: to both neighbours.
    error = 16 * _UNIT * (points + float(np.abs(logs).max(initial=0.0)) / step)
    found = np.bincount(left, masses * (1 - upper + error), points)
    found = found + np.bincount(left + 1, masses * (upper + error), points)
    return np.asarray(found, dtype=np.float64)


def _shared_with_zero(logs: FloatArray, masses: FloatArray, point: FloatArray) -> float:
    """Share masses out between the ratio 0 and a point, relative to which ``logs`` are; add to it."""
    point += masses @ np.exp(logs)
    return float(masses @ -np.expm1(logs))
