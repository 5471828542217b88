"""The reporting accountant: numerical privacy loss distributions with an automatic grid."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_dp.accounting.base import (
    AbstractAccountant,
    History,
    Relation,
    Steps,
    check_delta,
    check_epsilon,
    check_relation,
    merge,
)
from lightning_dp.accounting.composition import Composed, compose
from lightning_dp.accounting.gdp import gdp_delta, gdp_epsilon, mu_of
from lightning_dp.accounting.grid import Plan, Target, grid_points, make_pmf, plan_grid
from lightning_dp.accounting.grouping import Mixture, as_mixture

_EXACT = 32  # so few distinct steps are never grouped
_ROUGH_SPACING = 0.8
_MAX_ROUNDS = 8
_MAX_EXACT = 4000  # as long as the points allow
_MAX_POINTS = 5e7  # of all nodes together: about a second, for each direction


@dataclass(frozen=True)
class PLDAccountant(AbstractAccountant):
    """Numerical accounting of any sequence of (subsampled) Gaussian releases: tight, never below.

    The privacy loss of every distinct ``(z, q)`` is put on a grid pessimistically, the steps are
    composed by fast Fourier transform, for adding and for removing a record (the larger counts);
    full-batch steps alone use the exact mu-GDP formula. What is promised:

    - the result is an upper bound: tails, the window and floating-point errors are added to delta;
    - it is at most about ``rtol`` (relative) above the exact composition, for up to 32 distinct
      steps; for more, interpolation in ``(z, q)`` adds about ``spacing^2 / 10``, and memory bounds
      may coarsen the grid or the interpolation, always upwards.

    Assumes Poisson sampling, independent for every event, and noise multipliers that were fixed in
    advance, or for full batches a budget on ``sum z_t^-2`` fixed in advance.

    Args:
        rtol: relative accuracy of epsilon with respect to the grid, in (0, 0.1].
        spacing: relative distance of the noise multipliers between which is interpolated, in (0, 1].

    Raises:
        ValueError: by the constructor and the methods, if an argument is out of range or NaN.

    Sources: Connect-the-Dots discretisation, arXiv 2207.04380v1; see the modules ``pmf``, ``grid``,
    ``grouping`` and ``composition`` for the statements used.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> history = [(PoissonGaussian(1.2, 0.01), 300), (PoissonGaussian(0.9, 0.01), 700)]
        >>> round(PLDAccountant().epsilon(history, delta=1e-5), 2)
        2.09
        >>> round(PLDAccountant().epsilon(history, delta=1e-5, relation="replace_one"), 2)
        3.54
    """

    rtol: float = 2.5e-4
    spacing: float = 0.03

    def __post_init__(self) -> None:
        if not 0 < self.rtol <= 0.1:
            raise ValueError(f"rtol must be in (0, 0.1], got {self.rtol}.")
        if not 0 < self.spacing <= 1:
            raise ValueError(f"spacing must be in (0, 1], got {self.spacing}.")

    @property
    def name(self) -> str:
        """What a report prints."""
        return "PLD"

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return the least epsilon at ``delta``; see the class."""
        target = Target(log_delta=math.log(check_delta(delta)))
        check_relation(relation)
        steps = merge(history)
        if steps.counts.size == 0:
            return 0.0
        # No amplification: an upper bound for any sample rate, exact for full batches.
        without = gdp_epsilon(mu_of(steps, relation), delta)
        if without == 0.0 or math.isinf(without) or np.all(steps.sample_rates == 1.0):
            return without
        result = 0.0
        for backward in _directions(relation):
            result = max(result, self._epsilon(steps, target, relation, backward, least=result))
        return min(without, result)

    def delta(self, history: History, epsilon: float, relation: Relation = "add_remove") -> float:
        """Return the least delta at ``epsilon``; see the class."""
        target = Target(epsilon=check_epsilon(epsilon))
        check_relation(relation)
        steps = merge(history)
        if steps.counts.size == 0:
            return 0.0
        without = gdp_delta(mu_of(steps, relation), epsilon)
        if steps.has_noiseless or without == 0.0 or np.all(steps.sample_rates == 1.0):
            return without
        sides = _directions(relation)
        return min(without, max(self._delta(steps, target, relation, side) for side in sides))

    def _epsilon(
        self, steps: Steps, target: Target, relation: Relation, backward: bool, least: float
    ) -> float:
        """epsilon of one direction, or 0 if it is at most ``least``."""
        assert target.log_delta is not None
        delta, value, coarsest = math.exp(target.log_delta), math.inf, math.inf
        for _ in range(_MAX_ROUNDS):
            plan, mixture = self._plan(steps, target, relation, backward, least, coarsest)
            if plan.bound <= least:
                return 0.0
            composed = self._compose(steps, mixture, plan, relation, backward)
            last, value = value, min(value, composed.epsilon(delta), plan.bound)
            # The grid was made for the accuracy of Chernoff's bound. If that is far off, refine.
            usual = value >= 0.8 * plan.bound or value <= least
            if usual or last - value <= 2 * self.rtol * value + 1e-7 or composed.is_long:
                break
            coarsest = composed.h / 4
        return max(value, 0.0)

    def _delta(
        self, steps: Steps, target: Target, relation: Relation, backward: bool
    ) -> float:
        """delta of one direction."""
        assert target.epsilon is not None
        value, coarsest = math.inf, math.inf
        for _ in range(_MAX_ROUNDS):
            plan, mixture = self._plan(steps, target, relation, backward, 0.0, coarsest)
            composed = self._compose(steps, mixture, plan, relation, backward)
            bound = math.exp(min(plan.bound, 0.0))
            last, value = value, min(value, composed.delta(target.epsilon), bound)
            if last - value <= 1e-3 * value or composed.is_long:
                break
            coarsest = composed.h / 4
        return value

    def _plan(
        self,
        steps: Steps,
        target: Target,
        relation: Relation,
        backward: bool,
        least: float,
        coarsest: float,
    ) -> tuple[Plan, Mixture]:
        """A grid for the steps, from a rough reading of them."""
        rough = as_mixture(_merge_full_batch(steps), relation, _ROUGH_SPACING, _EXACT)
        return plan_grid(rough, target, self.rtol, relation, backward, least, coarsest), rough

    def _compose(
        self, steps: Steps, rough: Mixture, plan: Plan, relation: Relation, backward: bool
    ) -> Composed:
        """The composition on the grid of a plan, interpolated as finely as the work allows."""
        mixture, merged, spacing = rough, _merge_full_batch(steps), self.spacing
        if not rough.is_exact:
            mixture = as_mixture(merged, relation, spacing, exact=_MAX_EXACT)
        while grid_points(mixture, plan, relation) > _MAX_POINTS and spacing < _ROUGH_SPACING:
            spacing *= 1.2
            mixture = as_mixture(merged, relation, spacing, exact=_EXACT)
        return compose(
            mixture, lambda node: make_pmf(mixture, node, plan, relation, backward), plan.grid
        )


def _directions(relation: Relation) -> tuple[bool, ...]:
    """Removing a record, then adding one; exchanging one is symmetric."""
    return (False,) if relation == "replace_one" else (False, True)


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
