r"""Batch size and epochs: the principle of the planner, and a table to choose otherwise.

What a run can learn depends on its steps and on the noise of the whole run. Both have a price in time
alone: ε is fixed. For a given number of epochs, smaller batches mean more steps and more noise. So the
suggestion is the fewest epochs, doubled from 1, with which a batch size exists that has

- at least :data:`LEAST_STEPS` steps, and
- at most :data:`ENOUGH` times the noise of full batches over the run. From there on, doubling the time
  takes less than a third off it.

Of these sizes, it is the smallest: the most steps. Where the time is too short for that, it is the
largest batch with enough steps in the epochs that there are.

A training that takes thousands of steps without privacy takes them with privacy too: say so by
``least_steps``, and the suggestion has larger batches and more epochs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_dp._validate import optional, positive, whole
from lightning_dp.accounting.base import Relation
from lightning_dp.plan.noise import AbstractNoise
from lightning_dp.plan.training_plan import TrainingPlan, plan_training

__all__ = [
    "ENOUGH",
    "LEAST_STEPS",
    "Suggestion",
    "best_plan",
    "default_delta",
    "suggest",
]

ENOUGH = 1.5  # noise over the run, in that of full batches
LEAST_STEPS = 100
_OVER = 1.05  # more gradients than there is time for do not matter
_COLUMNS = 5  # numbers of epochs in a table
_SMALLEST = 128  # N over the smallest batch in a table, at most about


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A plan to choose, and the table of the others.

    Args:
        best: the plan to begin with.
        table: for each batch size, the plans with each number of epochs; the last row is full batches.
        seconds: the time that there is; None without a limit.
        records_per_second: the speed, in gradients of records; None if it is not known.

    Example:
        >>> found = suggest(1000, 3.0, records_per_second=100, seconds=20)
        >>> found.best.batch_size, found.best.epochs, found.best.steps, round(found.best.excess, 1)
        (16, 2.0, 126, 3.1)
        >>> found.is_short_of_time
        True
    """

    best: TrainingPlan
    table: tuple[tuple[TrainingPlan, ...], ...]
    seconds: float | None = None
    records_per_second: float | None = None

    @property
    def is_short_of_time(self) -> bool:
        """True if more epochs than the time affords would take much more of the noise away."""
        return not self.best.excess <= ENOUGH


def suggest(
    num_records: int,
    target_epsilon: float,
    *,
    target_delta: float | None = None,
    relation: Relation = "add_remove",
    records_per_second: float | None = None,
    seconds: float | None = None,
    least_steps: int = LEAST_STEPS,
    noise: AbstractNoise | None = None,
) -> Suggestion:
    """Suggest batch size and epochs for a private training, from public numbers.

    The budget is fixed; the question is how to use it. What is compared is
    :attr:`TrainingPlan.excess`, the noise over the whole run in units of that of full batches.

    Args:
        num_records: N, of the training set.
        target_epsilon: the budget.
        target_delta: by default the largest power of ten that is at most 1 / (10 N).
        relation: ``"add_remove"`` or ``"replace_one"``.
        records_per_second: gradients of records that your machine computes in a second.
        seconds: the time that there is; needs ``records_per_second``.
        least_steps: that the training must have.
        noise: the mechanism; fresh noise at each step by default.

    Raises:
        ValueError: naming the argument; if the time affords no step.
    """
    speed = optional(positive)("records_per_second", records_per_second)
    seconds = optional(positive)("seconds", seconds)
    if seconds is not None and speed is None:
        raise ValueError(
            f"seconds={seconds:g} needs records_per_second, the speed of your machine: time a private "
            "training on records that you make up, and give its gradients of records per second."
        )
    least_steps = whole("least_steps", least_steps)
    gradients = math.inf if seconds is None else seconds * speed
    best = best_plan(
        num_records,
        target_epsilon,
        target_delta=target_delta,
        relation=relation,
        gradients=gradients,
        least_steps=least_steps,
        noise=noise,
    )
    n = best.num_records
    epochs = _epochs_of_table(best.record_gradients / n, gradients / n, least_steps)
    table = tuple(
        tuple(best.changed(batch_size=batch, **_length(n, batch, each)) for each in epochs)
        for batch in _batches_of_table(n)
    )
    return Suggestion(best=best, table=table, seconds=seconds, records_per_second=speed)


def best_plan(
    num_records: int,
    target_epsilon: float,
    *,
    target_delta: float | None = None,
    relation: Relation = "add_remove",
    gradients: float = math.inf,
    least_steps: int = LEAST_STEPS,
    noise: AbstractNoise | None = None,
) -> TrainingPlan:
    """Return the plan that this file's principle finds; quicker than :func:`suggest`.

    Args:
        num_records, target_epsilon, target_delta, relation, least_steps, noise: as for
            :func:`suggest`.
        gradients: of records, that can be computed.

    Raises:
        ValueError: naming the argument; if the gradients are not enough for one.

    Example:
        An hour with 100 records a second affords 16 epochs, and 8 are enough:

        >>> best_plan(22_000, 3.0, target_delta=1e-5, gradients=360_000).epochs
        8.0
        >>> round(best_plan(22_000, 3.0, target_delta=1e-5, gradients=44_000).excess, 1)
        3.3
    """
    num_records = whole("num_records", num_records)
    least_steps = whole("least_steps", least_steps)
    delta = default_delta(num_records) if target_delta is None else target_delta
    if not gradients >= 1:
        raise ValueError(
            f"gradients={gradients} of records are less than one: allow more time, or raise the speed."
        )

    def plan(batch: int, epochs: float) -> TrainingPlan:
        return plan_training(
            num_records,
            batch,
            **_length(num_records, batch, epochs),
            target_epsilon=target_epsilon,
            target_delta=delta,
            relation=relation,
            noise=noise,
        )

    for epochs in _doubled(gradients / num_records, least_steps):
        sizes = _batches(num_records, epochs, least_steps, gradients)
        best = plan(sizes[0], epochs)
        if best.excess <= ENOUGH:
            break
    for batch in sizes[1:]:
        smaller = plan(batch, epochs)
        if not smaller.excess <= ENOUGH:
            break
        best = smaller
    return best


def default_delta(num_records: int) -> float:
    """Return the largest power of ten that is at most 1 / (10 N).

    Example:
        >>> default_delta(22_000), default_delta(1000)
        (1e-06, 0.0001)
    """
    return float(f"1e-{len(str(whole('num_records', num_records) - 1)) + 1}")


def _doubled(most: float, least_steps: int) -> list[float]:
    """Return 1, 2, 4, ... epochs, until full batches make enough steps; none above the most.

    The most itself is the last one, if it comes earlier; the only one if it is less than 1.
    """
    if not most >= 1:
        return [most]
    powers = (least_steps - 1).bit_length()
    last = math.floor(min(most, 2**powers))
    return [*(float(2**power) for power in range(powers + 1) if 2**power < last), float(last)]


def _length(num_records: int, batch_size: int, epochs: float) -> dict[str, int]:
    """Return the length of a training as an argument: whole epochs, or the steps of a part of one."""
    if epochs == int(epochs):
        return {"epochs": int(epochs)}
    return {"steps": max(1, math.floor(epochs * num_records / batch_size))}


def _batches(num_records: int, epochs: float, least_steps: int, gradients: float) -> list[int]:
    """Return N and powers of 2 with which there are enough steps, the largest first; or 1.

    Not those whose last batch of an epoch, as large as the others, takes many gradients more.
    """
    sizes = [num_records, *reversed(_powers_below(num_records))]

    def fits(batch: int) -> bool:
        per_epoch = math.ceil(num_records / batch) if epochs >= 1 else num_records / batch
        steps = epochs * per_epoch
        return steps >= least_steps and steps * batch <= _OVER * gradients

    return [size for size in sizes if fits(size)] or [1]


def _batches_of_table(num_records: int) -> list[int]:
    """Return powers of 2 and N."""
    smallest = num_records / _SMALLEST
    return [*(size for size in _powers_below(num_records) if size >= smallest), num_records]


def _powers_below(number: int) -> list[int]:
    return [2**power for power in range((number - 1).bit_length())]


def _epochs_of_table(best: float, most: float, least_steps: int) -> list[float]:
    """Return numbers of epochs around the best one, none above the most."""
    if not most >= 1:
        return [most]
    some = _doubled(most, least_steps)
    place = min(range(len(some)), key=lambda index: abs(some[index] - best))
    first = max(0, min(place - _COLUMNS + 3, len(some) - _COLUMNS))
    return some[first : first + _COLUMNS]
