"""One private training before it is run: from records, batch and budget to its noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from lightning_dp._validate import (
    instance,
    normalise,
    not_negative,
    positive,
    probability,
    whole,
)
from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.plan.noise import AbstractNoise, IndependentNoise, full_batch_noise

__all__ = ["TrainingPlan", "plan_training"]


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    r"""A training with DP-SGD, described by public numbers alone.

    Of T steps, each releases the mean gradient of a batch of B records on average, which are drawn
    with rate q = min(1, B / N), clipped to C, with noise of standard deviation z·C/B in every weight.

    Args:
        num_records: N, of the training set.
        batch_size: B, of a whole step: the loader's times ``accumulate_grad_batches`` and processes.
        steps: T, all of them noised.
        noise_multiplier: z, of each step.
        target_epsilon, target_delta, relation: the budget that the steps spend.
        noise: the mechanism; fresh noise at each step by default.

    Raises:
        ValueError: naming the argument.

    Example:
        >>> plan = plan_training(22_000, 128, epochs=2, target_epsilon=3.0, target_delta=1e-5)
        >>> plan.steps, round(plan.noise_multiplier, 2), round(plan.excess, 1)
        (344, 0.63, 4.2)
        >>> larger = plan.changed(batch_size=1024, epochs=6)
        >>> larger.steps, round(larger.noise_multiplier, 2), round(larger.excess, 1)
        (132, 1.11, 1.5)
    """

    num_records: int
    batch_size: int
    steps: int
    noise_multiplier: float
    target_epsilon: float
    target_delta: float
    relation: Relation = "add_remove"
    noise: AbstractNoise = field(default_factory=IndependentNoise)

    def __post_init__(self) -> None:
        normalise(self, whole, "num_records", "batch_size", "steps", of="TrainingPlan")
        normalise(self, not_negative, "noise_multiplier", of="TrainingPlan")
        normalise(self, positive, "target_epsilon", of="TrainingPlan")
        normalise(self, probability, "target_delta", of="TrainingPlan")
        check_relation(self.relation)

    @property
    def sample_rate(self) -> float:
        """q, the probability of a record to be in a step's batch."""
        return min(1.0, self.batch_size / self.num_records)

    @property
    def records_per_step(self) -> float:
        """The expected batch size qN, which a private mean divides by; it is B, or N if that is less."""
        return self.sample_rate * self.num_records

    @property
    def epochs(self) -> float:
        """Passes over the data, T divided by the steps of a pass."""
        return self.steps / steps_per_epoch(self.num_records, self.batch_size)

    @property
    def record_gradients(self) -> float:
        """The number of gradients of a record, q·N·T, which is what a training costs in time."""
        return self.records_per_step * self.steps

    @property
    def noise_batch_ratio(self) -> float:
        """z/B, the noise in one weight of a mean gradient, in units of C."""
        return self.noise_multiplier / self.records_per_step

    def noise_length(self, num_parameters: int, max_grad_norm: float = 1.0) -> float:
        """Return the length of a step's noise vector, z·C·√d / B, to compare with C.

        It is the root of the mean square; for large d the length hardly varies. No mean gradient is
        longer than C. Training works with noise that is longer than the gradient in each step,
        because noise averages out over the steps and the gradients' common direction does not.

        Args:
            num_parameters: d, trained weights.
            max_grad_norm: C, the clip norm.
        """
        d = whole("num_parameters", num_parameters)
        clip_norm = positive("max_grad_norm", max_grad_norm)
        return self.noise_batch_ratio * clip_norm * math.sqrt(d)

    @property
    def noise_of_the_run(self) -> float:
        r"""Noise in one weight of the mean of all T released gradients, in units of C.

        :math:`z / (B \sqrt{T})` for independent noise. A direction that is in the gradients of all
        steps is seen through this noise.
        """
        total = self.noise.of_the_sum(self.noise_multiplier, self.steps)
        return total / (self.records_per_step * self.steps)

    @property
    def excess(self) -> float:
        r""":attr:`noise_of_the_run` over that of full batches with the same budget.

        Full batches have :math:`z_1 / N` whatever their number, :math:`z_1` the noise multiplier of
        one release about all records. So 1 is what the budget allows, and 4 is the noise of a
        quarter of the records. For many small steps it tends to :math:`z \sqrt{e^{1/z^2} - 1}`
        (from the central limit theorem of Bu et al., arXiv 1911.11607, for Poisson batches), which
        is large for z below 1: a small batch wastes the budget.
        """
        full = full_batch_noise(self.target_epsilon, self.target_delta, self.relation)
        return self.noise_of_the_run * self.num_records / full

    def seconds(self, records_per_second: float) -> float:
        """Return how long the steps take, by a speed in gradients of records per second."""
        return self.record_gradients / positive("records_per_second", records_per_second)

    def changed(
        self,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        target_epsilon: float | None = None,
    ) -> TrainingPlan:
        """Return another plan for the same records, with its noise calibrated again.

        What is left out stays as it is; with another batch size the epochs stay, not the steps.

        Raises:
            ValueError: as :func:`plan_training`.
        """
        batch = self.batch_size if batch_size is None else batch_size
        if epochs is None and steps is None:
            per_epoch = steps_per_epoch(self.num_records, whole("batch_size", batch))
            steps = max(1, round(self.epochs * per_epoch))
        return plan_training(
            self.num_records,
            batch,
            epochs=epochs,
            steps=steps,
            target_epsilon=self.target_epsilon if target_epsilon is None else target_epsilon,
            target_delta=self.target_delta,
            relation=self.relation,
            noise=self.noise,
        )


def plan_training(
    num_records: int,
    batch_size: int,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    target_epsilon: float,
    target_delta: float,
    relation: Relation = "add_remove",
    noise: AbstractNoise | None = None,
) -> TrainingPlan:
    """Calibrate the noise of one training: what ``DifferentialPrivacy(target_epsilon)`` would use.

    Args:
        num_records: N, of the training set.
        batch_size: B of a whole step; from N on, every step takes all records.
        epochs, steps: how long, one of the two.
        target_epsilon, target_delta, relation: the budget.
        noise: the mechanism; fresh noise at each step by default.

    Raises:
        ValueError: naming the argument; if both or neither of epochs and steps are given; if delta
            is so large that the budget asks for no noise.

    Warns:
        PrivacyWarning: if delta is at least q.

    Example:
        >>> plan = plan_training(1000, 1000, steps=4, target_epsilon=3.0, target_delta=1e-5)
        >>> plan.sample_rate, round(plan.noise_multiplier, 3), round(plan.excess, 3)
        (1.0, 2.781, 1.0)
    """
    num_records = whole("num_records", num_records)
    batch_size = whole("batch_size", batch_size)
    if noise is not None:
        instance("noise", noise, AbstractNoise)  # type: ignore[type-abstract]
    if (epochs is None) == (steps is None):
        raise ValueError(f"epochs={epochs}, steps={steps}: give one of the two.")
    if epochs is not None:
        steps = whole("epochs", epochs) * steps_per_epoch(num_records, batch_size)
    plan = TrainingPlan(
        num_records=num_records,
        batch_size=batch_size,
        steps=whole("steps", steps),
        noise_multiplier=0.0,  # until it is known
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        relation=relation,
        noise=IndependentNoise() if noise is None else noise,
    )
    z = plan.noise.calibrated(
        plan.sample_rate, plan.steps, plan.target_epsilon, plan.target_delta, relation
    )
    return replace(plan, noise_multiplier=z)


def steps_per_epoch(num_records: int, batch_size: int) -> int:
    """Return the steps of one pass of a loader that keeps its last, smaller batch."""
    return math.ceil(num_records / batch_size)
