"""The reporting accountant: numerical privacy loss distributions with an automatic grid."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_dp.accounting.base import (
    AbstractAccountant,
    FloatArray,
    History,
    Relation,
    Steps,
    check_delta,
    check_epsilon,
    check_relation,
    merge,
)
from lightning_dp.accounting.composition import (
    Composed,
    log_largest_weight,
    compose,
    cumulant,
    cumulant_bound,
    log_moments,
    window,
)
from lightning_dp.accounting.gdp import gdp_delta, gdp_epsilon, mu_of
from lightning_dp.accounting.grouping import Mixture, as_mixture
from lightning_dp.accounting.pmf import LossPmf, cached_discretise, discretise, support

_POSITIVE = np.geomspace(1e-3, 1e7, 45)
_TILTS = np.concatenate((-_POSITIVE[::-1], [0.0], _POSITIVE))
_NEAR = np.geomspace(0.25, 4.0, 41)
_MAX_POINTS = 2**21


@dataclass(frozen=True)
class PLDAccountant(AbstractAccountant):
    """Exact numerical accounting of any heterogeneous sequence of (subsampled) Gaussians."""

    rtol: float = 2.5e-4
    spacing: float = 0.06
    exact_steps: int = 32

    @property
    def name(self) -> str:
        """What a report prints."""
        return "PLD"

    def epsilon(
        self, history: History, delta: float, relation: Relation = "add_remove"
    ) -> float:
        delta = check_delta(delta)
        check_relation(relation)
        steps = merge(history)
        if steps.counts.size == 0:
            return 0.0
        bound = gdp_epsilon(mu_of(steps, relation), delta)
        if bound == 0.0 or math.isinf(bound) or np.all(steps.sample_rates == 1.0):
            return bound
        mixture = self._mixture(steps, relation)
        sides = (False,) if relation == "replace_one" else (False, True)
        values = []
        for backward in sides:
            composed = self._compose(mixture, relation, backward, math.log(delta), None)
            values.append(composed.epsilon(delta))
        return min(bound, max(values))

    def delta(
        self, history: History, epsilon: float, relation: Relation = "add_remove"
    ) -> float:
        epsilon = check_epsilon(epsilon)
        check_relation(relation)
        steps = merge(history)
        if steps.counts.size == 0:
            return 0.0
        bound = gdp_delta(mu_of(steps, relation), epsilon)
        if steps.has_noiseless or bound == 0.0 or np.all(steps.sample_rates == 1.0):
            return bound
        mixture = self._mixture(steps, relation)
        sides = (False,) if relation == "replace_one" else (False, True)
        values = []
        for backward in sides:
            composed = self._compose(mixture, relation, backward, None, epsilon)
            values.append(composed.delta(epsilon))
        return min(bound, max(values))

    def _mixture(self, steps: Steps, relation: Relation) -> Mixture:
        return as_mixture(_merge_full_batch(steps), relation, self.spacing, exact=self.exact_steps)

    def _compose(
        self,
        mixture: Mixture,
        relation: Relation,
        backward: bool,
        log_delta: float | None,
        epsilon: float | None,
    ) -> Composed:
        log_tail = -32.0 - (0 if log_delta is None else -log_delta) - math.log(mixture.total)
        if log_delta is None:
            log_tail = -100.0
        log_tail = -16.0 * math.ceil(-log_tail / 16.0)
        reach = max(sum(support(z, q, log_tail, relation)) for z, q in mixture.nodes)
        h = _snap(reach / 512)
        make = cached_discretise if len(mixture.nodes) <= 4 else discretise
        while True:
            pmfs = [make(z, q, h, log_tail, relation, backward) for z, q in mixture.nodes]
            moments = np.stack([log_moments(p, h, _TILTS) for p in pmfs])
            bounds = cumulant_bound(mixture, moments)
            best, estimate = _chernoff(_TILTS, bounds, log_delta, epsilon, 4 / h)
            tilt = float(_TILTS[best])
            scale = max(estimate, 0.1 * _deviation(bounds, best), 1e-9)
            spread = _spread(mixture, pmfs, moments[:, best])
            wanted = math.sqrt(8 * self.rtol * scale / ((tilt + 1) * spread))
            floor = reach / _MAX_POINTS
            if h <= max(wanted, floor):
                break
            h = max(_snap(max(wanted, floor)), h / 32)
        near = np.concatenate((tilt * _NEAR, -tilt * _NEAR))
        near_moments = np.stack([log_moments(p, h, near) for p in pmfs])
        tilts, moments = np.append(_TILTS, near), np.hstack((moments, near_moments))
        bounds = np.append(bounds, cumulant_bound(mixture, near_moments))
        best, _ = _chernoff(tilts, bounds, log_delta, epsilon, 4 / h)
        tilt = float(tilts[best])
        log_norm = cumulant(mixture, moments[:, best])
        ends = window(tilts, bounds, tilt, log_norm)
        print('DBG',backward,'h',h,'tilt',tilt,'spread',spread,'scale',scale,'nodes',len(mixture.nodes),'cells',len(mixture.cells),'len',max(p.probabilities.size for p in pmfs),'win',ends,'n',(ends[1]-ends[0])/h)
        return compose(mixture, pmfs, h, tilt, ends, log_norm)


def _merge_full_batch(steps: Steps) -> Steps:
    """Full-batch Gaussians are together one Gaussian, exactly."""
    full = steps.sample_rates == 1.0
    if np.count_nonzero(full) == 0:
        return steps
    z = 1 / math.sqrt(math.fsum(steps.counts[full] / steps.noise_multipliers[full] ** 2))
    return Steps(
        np.append(steps.noise_multipliers[~full], z),
        np.append(steps.sample_rates[~full], 1.0),
        np.append(steps.counts[~full], 1.0),
    )


def _snap(h: float) -> float:
    """The power of the square root of 2 below h, so that nearby calls share their grid."""
    return float(2.0 ** (math.floor(2 * math.log2(h)) / 2))


def _chernoff(
    tilts: FloatArray,
    bounds: FloatArray,
    log_delta: float | None,
    epsilon: float | None,
    largest_tilt: float,
) -> tuple[int, float]:
    """Index of the best tilt in (0, largest_tilt] and the epsilon that it shows."""
    usable = np.flatnonzero((tilts > 0) & (tilts <= largest_tilt))
    t = tilts[usable]
    reach = bounds[usable] + log_largest_weight(t)
    if log_delta is not None:
        values = (reach - log_delta) / t
        best = int(np.argmin(values))
        return int(usable[best]), float(values[best])
    assert epsilon is not None
    return int(usable[int(np.argmin(reach - t * epsilon))]), epsilon


def _deviation(bounds: FloatArray, best: int) -> float:
    """Standard deviation of the tilted loss, from the second difference of K on the table."""
    middle = min(best, _TILTS.size - 2)
    t, k = _TILTS[middle - 1 : middle + 2], bounds[middle - 1 : middle + 2]
    slopes = np.diff(k) / np.diff(t)
    return math.sqrt(max(2 * float(slopes[1] - slopes[0]) / float(t[2] - t[0]), 0.0))


def _spread(mixture: Mixture, pmfs: list[LossPmf], moments: FloatArray) -> float:
    """Expected number of steps, under the tilt, whose loss is not at the grid point 0."""
    total = 0.0
    center = np.array([p.probabilities[-p.start] for p in pmfs])
    for cell in mixture.cells:
        corners = list(cell.corners)
        weights = cell.mean_weights() * np.exp(moments[corners] - moments[corners].max())
        at_zero = center[corners] * np.exp(-moments[corners])
        total += cell.total * max(1 - float(weights @ at_zero / weights.sum()), 0.0)
    return max(total, 1.0)
