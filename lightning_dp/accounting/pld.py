"""The reporting accountant: numerical privacy loss distributions with an automatic grid."""

import math
from dataclasses import dataclass

import numpy as np

from lightning_dp._validate import normalise, number
from lightning_dp.accounting._composition import compose
from lightning_dp.accounting._grid import Plan, Target, grid_points, plan_grid, pmf_maker
from lightning_dp.accounting._grouping import Mixture, as_mixture, rounded
from lightning_dp.accounting.base import (
    AbstractStepsAccountant,
    Relation,
    check_delta,
    check_epsilon,
    check_relation,
)
from lightning_dp.accounting.events import History
from lightning_dp.accounting.gdp import gdp_delta, gdp_epsilon, mu_of
from lightning_dp.accounting.steps import Steps, merge

_EXACT = 32  # so few distinct steps are never grouped
_ROUGH_SPACING = 0.8
_ROUGH_ROUNDING = 0.05
_MAX_ROUNDS = 8
_RARE = 0.3  # of Chernoff's bound: a few rare losses make all of the cost
_LEAST_NOISE = 1e-3  # below it amplification is not worth the grid
_MAX_POINTS = 5e7  # of all nodes together: about a second, for each direction


@dataclass(frozen=True)
class PLDAccountant(AbstractStepsAccountant):
    """Numerical accounting of any sequence of (subsampled) Gaussian releases: tight, never below.

    The privacy loss of every distinct ``(z, q)`` is put on a grid pessimistically, the steps are
    composed by fast Fourier transform, for adding and for removing a record (the larger counts);
    full-batch steps alone use the exact mu-GDP formula. What is promised:

    - the result is an upper bound: tails, the window and floating-point errors are added to delta;
    - it is at most about ``rtol`` (relative) above the exact composition, for up to 32 distinct
      steps; for more, interpolation in ``(z, q)`` adds up to about ``spacing^2``, and memory bounds
      may coarsen the grid or the interpolation, always upwards.

    Assumes Poisson sampling, independent for every event, and noise multipliers that were fixed in
    advance, or for full batches a budget on ``sum z_t^-2`` fixed in advance.

    Args:
        rtol: relative accuracy of epsilon with respect to the grid, in (0, 0.1].
        spacing: relative distance of the noise multipliers between which is interpolated, in (0, 1].

    Raises:
        ValueError: by the constructor and the methods, if an argument is out of range or NaN.

    Sources: Connect-the-Dots discretisation, arXiv 2207.04380v1; see the modules ``_pmf``, ``_grid``,
    ``_grouping`` and ``_composition`` for the statements used.

    Example:
        >>> from lightning_dp.accounting import PoissonGaussian
        >>> history = [(PoissonGaussian(1.2, 0.01), 300), (PoissonGaussian(0.9, 0.01), 700)]
        >>> round(PLDAccountant().epsilon(history, delta=1e-5), 2)
        2.09
        >>> round(PLDAccountant().epsilon(history, delta=1e-5, relation="replace_one"), 2)
        3.07
    """

    rtol: float = 2.5e-4
    spacing: float = 0.04

    def __post_init__(self) -> None:
        normalise(self, number, "rtol", "spacing")
        if not 0 < self.rtol <= 0.1:
            raise ValueError(f"rtol must be in (0, 0.1], got {self.rtol}.")
        if not 0 < self.spacing <= 1:
            raise ValueError(f"spacing must be in (0, 1], got {self.spacing}.")

    @property
    def name(self) -> str:
        """The name in reports."""
        return "PLD"

    def epsilon(self, history: History, delta: float, relation: Relation = "add_remove") -> float:
        """Return the least epsilon at ``delta``; see the class."""
        return self.epsilon_of(merge(history), delta, relation)

    def epsilon_of(self, steps: Steps, delta: float, relation: Relation) -> float:
        """Return the least epsilon at ``delta`` of merged steps."""
        target = Target(log_delta=math.log(check_delta(delta)))
        check_relation(relation)
        if steps.counts.size == 0:
            return 0.0
        # No amplification: an upper bound for any sample rate, exact for full batches.
        without = gdp_epsilon(mu_of(steps, relation), delta)
        if without == 0.0 or math.isinf(without) or np.all(steps.sample_rates == 1.0):
            return without
        return min(without, self._worst_direction(steps, target, relation, without))

    def removal_epsilon(self, steps: Steps, delta: float, relation: Relation) -> float:
        """:meth:`epsilon_of` for removing a record, which is the larger one for usual runs."""
        target = Target(log_delta=math.log(delta))
        without = gdp_epsilon(mu_of(steps, relation), delta)
        merged = merge_full_batch(steps)
        if steps.has_noiseless or merged.noise_multipliers.min() < _LEAST_NOISE:
            return without
        return min(without, self.one_direction(merged, target, relation, False, least=0.0))

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
        return min(without, self._worst_direction(steps, target, relation, without))

    def _worst_direction(
        self, steps: Steps, target: Target, relation: Relation, without: float
    ) -> float:
        """The larger value of removing a record and of adding one; exchanging one is symmetric."""
        merged = merge_full_batch(steps)
        if merged.noise_multipliers.min() < _LEAST_NOISE:
            return without
        value = self.one_direction(merged, target, relation, False, least=0.0)
        if relation == "add_remove":
            value = max(value, self.one_direction(merged, target, relation, True, least=value))
        return value

    def one_direction(
        self, steps: Steps, target: Target, relation: Relation, backward: bool, least: float
    ) -> float:
        """The value of one direction, or a lower one if it is at most ``least``."""
        rough = self.rough(steps, relation)
        plan, value = self.settle(rough, target, relation, backward, least)
        if steps.counts.size <= _EXACT or value <= least:
            return value
        mixture = self.fine(steps, plan, relation, _MAX_POINTS)
        composed = compose(mixture, pmf_maker(mixture, plan, relation, backward), plan.grid)
        return float(min(value, target.read(composed)))

    def rough(self, steps: Steps, relation: Relation) -> Mixture:
        """Few nodes, to find the grid with; the steps themselves if they are few."""
        if steps.counts.size <= _EXACT:
            return as_mixture(steps, relation, _ROUGH_SPACING, _EXACT)
        return as_mixture(rounded(steps, _ROUGH_ROUNDING), relation, _ROUGH_SPACING, 1)

    def fine(self, steps: Steps, plan: Plan, relation: Relation, most_points: float) -> Mixture:
        """Nodes at the wanted distance, or as near as the number of grid points allows."""
        spacing = self.spacing
        while True:
            mixture = as_mixture(steps, relation, spacing, _EXACT)
            few = grid_points(mixture, plan, relation) <= most_points
            if mixture.is_exact or few or spacing >= _ROUGH_SPACING:
                return mixture
            spacing *= 1.2

    def settle(
        self, mixture: Mixture, target: Target, relation: Relation, backward: bool, least: float
    ) -> tuple[Plan, float]:
        """A grid that is fine enough, and the value on it or on a finer one.

        The first grid has the accuracy wanted for Chernoff's bound. Where that is far above the
        value, the grid is refined until the value settles.
        """
        value = math.inf
        plan = plan_grid(mixture, target, self.rtol, relation, backward, least, math.inf)
        finer = plan
        for _ in range(_MAX_ROUNDS):
            bound = target.value_of_bound(finer.bound)
            if bound <= least:
                return finer, bound
            composed = compose(mixture, pmf_maker(mixture, finer, relation, backward), finer.grid)
            last, value = value, min(value, target.read(composed), bound)
            if last - value <= target.tolerance(value, self.rtol):
                return plan, value
            plan = finer
            is_rare = len(mixture.nodes) == 1 and value < _RARE * bound
            if value <= least or finer.is_long(is_rare) or target.trusts(bound, value):
                break
            coarsest = plan.grid.h / 4
            finer = plan_grid(mixture, target, self.rtol, relation, backward, least, coarsest)
        return plan, value


def merge_full_batch(steps: Steps) -> Steps:
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
