r"""One private training before it is run: its noise and its learning rate, from public numbers.

The learning rate follows from one principle: over the whole run, the noise moves each weight about as
far as a typical weight of its layer. Every step adds noise to the weights, which walk at random: T steps
take them :math:`\sqrt{T}` times as far as one, and the gradients' common direction takes them T times
as far. The ratio of both is the same at any learning rate. Too small a rate ends near the first weights,
with most of the budget unused; too large a rate leaves noise in the weights.

The typical weight of a layer with n inputs is :math:`s = \sqrt{2/n}` (He et al., arXiv 1502.01852,
equation 10).

- Adam and its kin divide by the root mean square of what they see, which is mostly noise. A step has
  about the norm of the learning rate η per weight, so :math:`\eta = s/\sqrt{T}`.
- SGD walks by :math:`\eta z C/B` in a step: :math:`\eta = s B/(z C \sqrt{T})`, times 1 − momentum.

It is a scale, not an optimum: a third of it and three times as much are worth a try, on public data or
with the trials charged. For pre-trained weights, which noise can overwrite, take a third. Where a step
has little noise, a rate that is stable without privacy is the limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

from lightning_dp._validate import (
    above_0,
    between,
    instance,
    normalise,
    not_negative,
    one_of,
    positive,
    probability,
    whole,
)
from lightning_dp.accounting.base import Relation, check_relation
from lightning_dp.accounting.calibration import alike, calibrate_steps
from lightning_dp.accounting.events import sampled_gaussian
from lightning_dp.accounting.gdp import mu_of_budget
from lightning_dp.accounting.pld import PLDAccountant

Optimizer = Literal["adam", "sgd"]


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    r"""A training with DP-SGD, described by public numbers alone.

    Of T steps, each releases the mean gradient of a batch of B records on average, which are sampled
    with rate q = min(1, B / N), clipped to C, with noise of standard deviation z·C/B in every weight.

    Args:
        num_records: N, of the training set.
        batch_size: B, of a whole step: the loader's times ``accumulate_grad_batches`` and processes.
        steps: T, all of them noised.
        noise_multiplier: z, of each step.
        target_epsilon, target_delta, relation: the budget that the steps spend.

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
        """The expected batch size qN, which a private mean divides by (B, at most N)."""
        return self.sample_rate * self.num_records

    @property
    def epochs(self) -> float:
        """Passes over the data, T divided by the steps of a pass."""
        return self.steps / steps_per_epoch(self.num_records, self.batch_size)

    @property
    def record_gradients(self) -> float:
        """The number of gradients of a record, q·N·T, which determines the time of a training."""
        return self.records_per_step * self.steps

    @property
    def noise_batch_ratio(self) -> float:
        """z/B, the noise in one weight of a mean gradient, in units of C."""
        return self.noise_multiplier / self.records_per_step

    def noise_length(self, num_parameters: int, max_grad_norm: float = 1.0) -> float:
        """Return the norm of a step's noise vector, z·C·√d / B, to compare with C.

        It is the root mean square; for large d the norm hardly varies. No mean gradient has a larger
        norm than C. Training works with a noise norm above the gradient's in each step, because
        noise averages out over the steps and the gradients' common direction does not.

        Args:
            num_parameters: d, trained weights.
            max_grad_norm: C, the clip norm.
        """
        d = whole("num_parameters", num_parameters)
        clip_norm = positive("max_grad_norm", max_grad_norm)
        return self.noise_batch_ratio * clip_norm * math.sqrt(d)

    @property
    def noise_of_the_run(self) -> float:
        r"""Noise in one weight of the mean of all T released gradients, :math:`z / (B \sqrt{T})`, in C.

        A direction that is in the gradients of all steps is seen through this noise.
        """
        return self.noise_batch_ratio / math.sqrt(self.steps)

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
) -> TrainingPlan:
    """Calibrate the noise of one training, as ``DifferentialPrivacy(target_epsilon)`` does.

    Args:
        num_records: N, of the training set.
        batch_size: B of a whole step; from N on, every step takes all records.
        epochs, steps: how long, one of the two.
        target_epsilon, target_delta, relation: the budget.

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
    )
    z = calibrated_noise(
        plan.sample_rate, plan.steps, plan.target_epsilon, plan.target_delta, relation
    )
    return replace(plan, noise_multiplier=z)


@lru_cache(maxsize=1024)  # advice looks at the same plans at each checkpoint
def calibrated_noise(
    sample_rate: float, steps: int, epsilon: float, delta: float, relation: Relation
) -> float:
    """Return the noise multiplier z with which Poisson steps keep the budget."""
    if sample_rate == 1:  # exactly, and at once
        return full_batch_noise(epsilon, delta, relation) * math.sqrt(steps)
    return calibrate_steps(alike(sample_rate, steps), epsilon, delta, relation)


def allows(plan: TrainingPlan, excess: float) -> bool:
    """Return whether the budget allows so small an excess, by one ε that is up to 1 % too large."""
    noise = plan.noise_multiplier * excess / plan.excess
    events = [(sampled_gaussian(noise, plan.sample_rate), plan.steps)]
    judge = PLDAccountant(rtol=0.01)
    return judge.epsilon(events, plan.target_delta, plan.relation) <= 0.999 * plan.target_epsilon


def full_batch_noise(epsilon: float, delta: float, relation: Relation) -> float:
    """Return the exact noise multiplier of one release about all records: Δ/μ, Δ = 1 or 2 (replace-one).

    T such releases have √T times as much each, so that their mean has the noise of one.
    """
    return (2.0 if relation == "replace_one" else 1.0) / mu_of_budget(epsilon, delta)


def steps_per_epoch(num_records: int, batch_size: int) -> int:
    """Return the steps of one pass of a loader that keeps its last, smaller batch."""
    return math.ceil(num_records / batch_size)


def weight_size(shapes: Iterable[Sequence[int]]) -> float:
    r"""Return the root mean square of :math:`\sqrt{2/n}` over all weights of these shapes.

    Args:
        shapes: of the trained parameters, ``(outputs, inputs, ...)`` as in torch; n is the product of
            all but the first. Vectors (biases, scales of norms) do not count.

    Raises:
        ValueError: if there is nothing but vectors.

    Example:
        >>> round(weight_size([(16, 8, 3, 3), (16,), (10, 200)]), 3)
        0.128
    """
    weights = [tuple(shape) for shape in shapes if len(shape) > 1]
    number = sum(math.prod(shape) for shape in weights)
    if not number > 0:
        raise ValueError(
            "shapes holds no weight matrix, so there is no size to compare the noise with: give the "
            "shapes of all trained parameters."
        )
    return math.sqrt(sum(2 * shape[0] for shape in weights) / number)  # 2/n, n weights per output


def learning_rate(
    plan: TrainingPlan,
    size: float,
    *,
    optimizer: Optimizer = "adam",
    max_grad_norm: float = 1.0,
    momentum: float = 0.0,
) -> float:
    """Return the constant learning rate at which the noise moves a weight by its size.

    Args:
        plan: the training.
        size: s, of a weight; see :func:`weight_size`.
        optimizer: ``"adam"`` stands for all that divide by a running mean square.
        max_grad_norm: C; Adam does not see it.
        momentum: of SGD, in [0, 1).

    Example:
        >>> from lightning_dp.plan import plan_training
        >>> plan = plan_training(22_000, 1024, epochs=6, target_epsilon=3.0, target_delta=1e-5)
        >>> round(learning_rate(plan, 0.095), 4), round(learning_rate(plan, 0.095, optimizer="sgd"), 1)
        (0.0083, 7.7)
    """
    instance("plan", plan, TrainingPlan)
    size = positive("size", size)
    one_of(get_args(Optimizer))("optimizer", optimizer)
    if optimizer == "adam":
        return size / math.sqrt(plan.steps)
    step = plan.noise_batch_ratio * above_0("max_grad_norm", max_grad_norm)
    if not 0 < step < math.inf:
        raise ValueError(
            f"noise_multiplier={plan.noise_multiplier} and max_grad_norm={max_grad_norm} must give noise "
            "above 0 and finite: the learning rate follows from it."
        )
    free: float = 1 - between("[0, 1)")("momentum", momentum)
    return free * size / (step * math.sqrt(plan.steps))


def rounded(rate: float) -> float:
    """Return one significant digit of a learning rate: more would promise more than is known."""
    return float(f"{rate:.0e}")
