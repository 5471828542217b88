r"""Batch size and epochs: the principle of the planner, and a table of all choices.

What a run can learn depends on its steps and on the noise of the whole run. Both have a price in time
alone: ε is fixed. For a given number of epochs, smaller batches mean more steps and more noise. So the
suggestion is the fewest epochs, doubled from 1, with which a batch size exists that has

- at least :data:`LEAST_STEPS` steps, and
- at most :data:`ENOUGH` times the noise of full batches over the run. From there on, doubling the time
  takes less than a third off it.

Of these sizes, it is the smallest: the most steps. Where the time is too short for that, it is the
largest batch with enough steps in the epochs that there are.

A training that takes thousands of steps without privacy takes them with privacy too: with a larger
``least_steps`` the suggestion has larger batches and more epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_dp._validate import optional, positive, whole
from lightning_dp.accounting.base import Relation
from lightning_dp.plan.training_plan import (
    TrainingPlan,
    allows,
    learning_rate,
    rounded,
    steps_per_epoch,
)

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

    Raises:
        ValueError: naming the argument; if the time affords no step.
    """
    speed = optional(positive)("records_per_second", records_per_second)
    seconds = optional(positive)("seconds", seconds)
    if seconds is not None and speed is None:
        raise ValueError(
            f"seconds={seconds:g} needs records_per_second, the per-sample gradients of your machine "
            "per second. Time a private training on synthetic records."
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
    )
    n = best.num_records
    epochs = _epochs_of_table(best.record_gradients / n, gradients / n, least_steps)
    table = tuple(
        tuple(best.changed(batch_size=batch, steps=_steps(n, batch, each)) for each in epochs)
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
    least_epochs: int = 1,
) -> TrainingPlan:
    """Return the plan that this file's principle finds; quicker than :func:`suggest`.

    Args:
        num_records, target_epsilon, target_delta, relation, least_steps: as for :func:`suggest`.
        gradients: of records, that can be computed.
        least_epochs: from which epochs are doubled.
    """
    num_records = whole("num_records", num_records)
    least_steps = whole("least_steps", least_steps)
    delta = default_delta(num_records) if target_delta is None else target_delta
    if not gradients >= 1:
        raise ValueError(
            f"gradients={gradients} of records are less than one: allow more time, or raise the speed."
        )

    def plan(batch: int, epochs: float) -> TrainingPlan:
        return TrainingPlan(
            num_records=num_records,
            batch_size=batch,
            steps=_steps(num_records, batch, epochs),
            noise_multiplier=1.0,  # until one is chosen: a calibration asks for ε several times
            target_epsilon=target_epsilon,
            target_delta=delta,
            relation=relation,
        )

    for epochs in _doubled(gradients / num_records, least_steps, least_epochs):
        sizes = _batches(num_records, epochs, least_steps, gradients)
        best = plan(sizes[0], epochs)
        if allows(best, ENOUGH):
            break
    for batch in sizes[1:]:
        smaller = plan(batch, epochs)
        if not allows(smaller, ENOUGH):
            break
        best = smaller
    return best.changed(steps=best.steps)


def default_delta(num_records: int) -> float:
    """Return the largest power of ten that is at most 1 / (10 N)."""
    return float(f"1e-{len(str(whole('num_records', num_records) - 1)) + 1}")


def _doubled(most: float, least_steps: int, first: int = 1) -> list[float]:
    """Return epochs, doubled from the first until full batches make enough steps.

    None is above the most, which is the last one if it comes earlier.
    """
    if not most >= first:
        return [most]
    powers = (-(-least_steps // first) - 1).bit_length()
    last = math.floor(min(most, first * 2**powers))
    epochs = (first * 2**power for power in range(powers + 1))
    return [*(float(each) for each in epochs if each < last), float(last)]


def _steps(num_records: int, batch_size: int, epochs: float) -> int:
    """Return the steps of whole epochs, or of a part of one."""
    if epochs == int(epochs):
        return int(epochs) * steps_per_epoch(num_records, batch_size)
    return max(1, math.floor(epochs * num_records / batch_size))


def _batches(num_records: int, epochs: float, least_steps: int, gradients: float) -> list[int]:
    """Return N and powers of 2 with which there are enough steps, the largest first; or 1.

    Not those whose last batch of an epoch, as large as the others, takes many gradients more.
    """
    sizes = [num_records, *reversed(_powers_below(num_records))]

    def fits(batch: int) -> bool:
        per_epoch = steps_per_epoch(num_records, batch) if epochs >= 1 else num_records / batch
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


# -- in words -----------------------------------------------------------------------------------


def settings(plan: TrainingPlan, processes: int = 1) -> str:
    """Return a plan as the arguments to write, on one line, for processes that share each batch.

    Example:
        >>> from lightning_dp.plan import plan_training
        >>> plan = plan_training(22_000, 1024, epochs=8, target_epsilon=3.0, target_delta=1e-5)
        >>> settings(plan, processes=2)
        'batch_size=512 on each of 2 processes (or batch_size × accumulate_grad_batches), max_epochs=8'
    """
    if plan.sample_rate == 1:
        batch = "sampling=FullBatch()"
    else:
        each = "" if processes == 1 else f" on each of {processes} processes"
        size = -(-plan.batch_size // processes)
        batch = f"batch_size={size}{each} (or batch_size × accumulate_grad_batches)"
    whole = plan.epochs.is_integer()
    length = f"max_epochs={plan.epochs:.0f}" if whole else f"max_steps={plan.steps}"
    return f"{batch}, {length}"


def text(
    found: Suggestion,
    *,
    num_parameters: int | None = None,
    layer_inputs: int = 256,
    yours: TrainingPlan | None = None,
) -> str:
    """Return a table and the choice with its reason; the options are those of the command."""
    best, speed, first = found.best, found.records_per_second, found.table[0]
    column = min(range(len(first)), key=lambda index: abs(first[index].epochs - best.epochs))
    table = [[_size(row[0]), *(_cell(plan, best) for plan in row)] for row in found.table]
    if speed is not None:
        table.append(["time", *(f"{duration(plan.seconds(speed))} " for plan in first)])
    steps = [_step(row[column], num_parameters) for row in found.table]
    stars = ["", *("*" if row[column] == best else "" for row in found.table)]
    norm = [] if num_parameters is None else [f"noise norm ({num_parameters:,} weights)"]
    heads = ["batch size", "steps", "q", "z", "z/B", *norm]
    lines = [
        f"{best.num_records:,} records, ε = {best.target_epsilon:g} at δ = {best.target_delta:g} "
        f"({best.relation}), independent noise",
        "noise over the whole run, full batches = 1; in brackets the steps",
        "",
        *_aligned(["batch size", *(f"{_number(each.epochs)} epochs" for each in first)], table, 17),
        "",
        f"a step, in {_number(first[column].epochs)} epochs; noise is that of the mean gradient, in "
        "units of C",
        *(line + star for line, star in zip(_aligned(heads, steps, 11), stars, strict=True)),
        "",
        *_choice(found, layer_inputs),
    ]
    if yours is not None:
        ratio = yours.noise_of_the_run / best.noise_of_the_run
        lines += [
            "",
            f"yours: {settings(yours)}",
            f"  {yours.steps:,} steps, z = {yours.noise_multiplier:.3g}, z/B = "
            f"{yours.noise_batch_ratio:.3g}; noise {yours.excess:.2f} times that of full batches",
            f"  {max(ratio, 1 / ratio):.2g} times {'more' if ratio >= 1 else 'less'} noise over the "
            "run than the suggestion",
        ]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Return a time in two digits or so: seconds, minutes, hours or days."""
    for unit, size in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < size:
            return f"{seconds:.2g} {unit}"
        seconds /= 24 if unit == "h" else 60
    return f"{seconds:.3g} days" if seconds >= 10 else f"{seconds:.2g} days"


def _aligned(heads: list[str], rows: list[list[str]], width: int) -> list[str]:
    """Return lines with columns of at least a width, the first of 14 characters."""
    widths = [max(width, len(head) + 3) for head in heads[1:]]
    return [
        f"{first:>14} "
        + "".join(f"{cell:>{size}}" for cell, size in zip(cells, widths, strict=True))
        for first, *cells in [heads, *rows]
    ]


def _cell(plan: TrainingPlan, best: TrainingPlan) -> str:
    return f"{plan.excess:.2f} ({plan.steps:,}){'*' if plan == best else ' '}"


def _step(plan: TrainingPlan, num_parameters: int | None) -> list[str]:
    numbers = [plan.sample_rate, plan.noise_multiplier, plan.noise_batch_ratio]
    if num_parameters is not None:
        numbers.append(plan.noise_length(num_parameters))
    return [_size(plan), f"{plan.steps:,}", *(f"{each:.3g}" for each in numbers)]


def _size(plan: TrainingPlan) -> str:
    return "all records" if plan.sample_rate == 1 else f"{plan.batch_size:,}"


def _number(epochs: float) -> str:
    return f"{epochs:.0f}" if epochs.is_integer() else f"{epochs:.2g}"


def _choice(found: Suggestion, layer_inputs: int) -> Iterator[str]:
    """Yield the choice with its reason."""
    best = found.best
    yield f"* choose: {settings(best)}"
    if found.records_per_second is not None:
        there_is = "" if found.seconds is None else f" of {duration(found.seconds)}"
        yield f"  time: {duration(best.seconds(found.records_per_second))}{there_is}"
    rate = rounded(learning_rate(best, math.sqrt(2 / layer_inputs)))
    yield (
        f"  learning rate to begin with: {rate:g} for Adam (layers of {layer_inputs} inputs); a third "
        "of it for pre-trained weights"
    )
    if found.is_short_of_time:
        yield "why: the time is short. This is the largest batch with enough steps; its noise is that of"
        yield f"  full batches on one record in {best.excess:.2g}. More time takes noise away."
    else:
        yield f"why: the fewest epochs (1, 2, 4, ...) in which a batch size has {LEAST_STEPS} steps"
        yield f"  and at most {ENOUGH} times the noise of full batches; the smallest such batch, for the"
        yield "  most steps. Down a column there is less noise, and there are fewer steps to learn in."
