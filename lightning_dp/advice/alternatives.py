r"""Other batches and epochs for the same budget, in no time: from the central limit theorem.

A training asks for advice when it begins, and an exact calibration takes a tenth of a second for each
alternative. For T Poisson batches of rate q the central limit theorem (Bu et al., arXiv 1911.11607,
Theorem 5) gives the noise for a budget in closed form:

.. math:: q\sqrt{T (e^{1/z^2} - 1)} = μ(ε, δ), \qquad z = 1/\sqrt{\ln(1 + μ^2/(q^2 T))}.

That is up to 20 % too little noise where z is small, so nothing is ever calibrated or claimed by it. It
compares trainings, and its error at the training at hand, which is known exactly, is taken into account.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp.accounting.gdp import mu_of_budget
from lightning_dp.advice.setting import Setting
from lightning_dp.plan.suggestion import ENOUGH, LEAST_STEPS
from lightning_dp.plan.training_plan import steps_per_epoch

__all__ = ["Alternative", "Alternatives"]

_MOST_DOUBLINGS = 16


@dataclass(frozen=True)
class Alternative:
    """A training with the same data and budget.

    Args:
        batch_size: B, the expected size.
        epochs: passes over the data.
        steps: T, in all.
        excess: noise over the run, in that of full batches with the same budget; an estimate.
        noise_multiplier: z; an estimate.
    """

    batch_size: int
    epochs: int
    steps: int
    excess: float
    noise_multiplier: float


@dataclass(frozen=True)
class Alternatives:
    """The choices instead of a setting that has a budget.

    Args:
        setting: the training at hand.
        mu: μ of Gaussian differential privacy that the budget allows, halved for replace-one.
    """

    setting: Setting
    mu: float

    @classmethod
    def of(cls, setting: Setting) -> Alternatives | None:
        """Return what could be chosen instead; None if the setting has no budget, steps or noise."""
        if setting.target_epsilon is None or not setting.is_constant:
            return None
        if not (1 <= setting.steps < math.inf and setting.noise_multiplier > 0):
            return None
        sensitivity = 2.0 if setting.relation == "replace_one" else 1.0
        return cls(
            setting, mu_of_budget(setting.target_epsilon, setting.target_delta) / sensitivity
        )

    @property
    def excess(self) -> float:
        """The exact noise over the run at hand, z N μ / (B √T), in that of full batches."""
        each = self.setting.noise_multiplier / (
            self.setting.batch_size * math.sqrt(self.setting.steps)
        )
        return each * self.setting.num_records * self.mu

    def at(self, batch_size: int, epochs: int) -> Alternative:
        """Return the training with this batch size and so many epochs."""
        records = self.setting.num_records
        batch_size = min(batch_size, records)
        steps = epochs * steps_per_epoch(records, batch_size)
        z = self._noise(batch_size / records, steps)
        excess = z * self.mu * records / (batch_size * math.sqrt(steps))
        return Alternative(batch_size, epochs, steps, max(1.0, excess), z)

    def _noise(self, rate: float, steps: float) -> float:
        # Half of the known error (on the scale of logarithms) is a fair guess of the unknown one:
        # it is smaller where batches are larger, as they are in what is advised.
        setting = self.setting
        known = setting.noise_multiplier / self._limit(setting.sample_rate, setting.steps)
        return self._limit(rate, steps) * math.sqrt(min(1.5, max(1.0, known)))

    def _limit(self, rate: float, steps: float) -> float:
        """Return z of the central limit theorem; that of full batches is exact."""
        if rate >= 1:
            return math.sqrt(steps) / self.mu
        return 1 / math.sqrt(math.log1p((self.mu / rate) ** 2 / steps))

    def better(self) -> Alternative | None:
        """Return what to try: the planner's principle, with no fewer epochs than there are now.

        The fewest epochs, doubled from those at hand, with which a batch size (the present one, doubled
        or halved) has at least 100 steps and at most 1.5 times the noise of full batches; of these,
        the nearest to the present one.
        Full batches stay full.
        None if the training at hand is as good.
        """
        if self.excess <= ENOUGH and self.setting.steps >= LEAST_STEPS:
            return None
        epochs = max(1, math.ceil(self.setting.epochs - 1e-9))
        if self.setting.sample_rate >= 1:  # all batches are full ones, by choice
            return self.at(self.setting.num_records, max(epochs, LEAST_STEPS))
        for _ in range(_MOST_DOUBLINGS):
            found = [self.at(size, epochs) for size in self._sizes(epochs)]
            if good := [each for each in found if each.excess <= ENOUGH]:
                return min(good, key=self._distance)
            epochs *= 2
        return None

    def _distance(self, other: Alternative) -> float:
        return abs(math.log(other.batch_size / self.setting.batch_size))

    def _sizes(self, epochs: int) -> list[int]:
        """Return the batch sizes with enough steps: the present one by powers of two, and all records."""
        records, present = self.setting.num_records, max(1, round(self.setting.batch_size))
        factors = (2.0**power for power in range(-_MOST_DOUBLINGS, _MOST_DOUBLINGS + 1))
        sizes = {max(1, round(present * factor)) for factor in factors} | {records}
        return [
            size
            for size in sorted(sizes)
            if size <= records and epochs * steps_per_epoch(records, size) >= LEAST_STEPS
        ]
