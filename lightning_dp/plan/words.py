"""A suggestion in words and as plain data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from lightning_dp.plan.learning_rate import learning_rate, rounded
from lightning_dp.plan.suggestion import ENOUGH, LEAST_STEPS, Suggestion
from lightning_dp.plan.training_plan import TrainingPlan

__all__ = ["as_dict", "duration", "plan_as_dict", "settings", "text"]


def settings(plan: TrainingPlan, rate: float | None = None) -> str:
    """Return a plan as the arguments to write, on one line.

    Args:
        plan: what to do.
        rate: a learning rate, if there is one to try.

    Example:
        >>> from lightning_dp.plan import plan_training
        >>> plan = plan_training(22_000, 1024, epochs=8, target_epsilon=3.0, target_delta=1e-5)
        >>> settings(plan, 0.0072)
        'batch_size=1024 (or batch_size × accumulate_grad_batches), max_epochs=8, learning rate 0.007'
    """
    if plan.sample_rate == 1:
        batch = "sampling=FullBatch()"
    else:
        batch = f"batch_size={plan.batch_size} (or batch_size × accumulate_grad_batches)"
    whole = plan.epochs.is_integer()
    length = f"max_epochs={plan.epochs:.0f}" if whole else f"max_steps={plan.steps}"
    end = "" if rate is None else f", learning rate {rounded(rate):g}"
    return f"{batch}, {length}{end}"


def text(
    found: Suggestion,
    *,
    num_parameters: int | None = None,
    layer_inputs: int = 256,
    yours: TrainingPlan | None = None,
) -> str:
    """Return a table, what to choose, and why.

    Args:
        found: the suggestion.
        num_parameters: d, trained weights, for the length of the noise vector.
        layer_inputs: n of a typical layer, for the learning rate.
        yours: the plan that the reader has, to be compared.
    """
    lines = [*_head(found), "", *_table(found), "", *_details(found, num_parameters)]
    lines += ["", *_choice(found, layer_inputs)]
    if yours is not None:
        lines += ["", *_comparison(found, yours)]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Return a time in two digits or so: seconds, minutes, hours or days.

    Example:
        >>> duration(40), duration(700), duration(7200), duration(400_000)
        ('40 s', '12 min', '2 h', '4.6 days')
    """
    for unit, size in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < size:
            return f"{seconds:.2g} {unit}"
        seconds /= 24 if unit == "h" else 60
    return f"{seconds:.3g} days" if seconds >= 10 else f"{seconds:.2g} days"


def _head(found: Suggestion) -> Iterator[str]:
    best = found.best
    yield (
        f"{best.num_records:,} records, ε = {best.target_epsilon:g} at δ = {best.target_delta:g} "
        f"({best.relation}), {best.noise.name} noise"
    )
    yield "noise over the whole run, full batches = 1; in brackets the steps"


def _table(found: Suggestion) -> Iterator[str]:
    """Yield a row for each batch size, with a star at the suggestion."""
    head = [f"{_number(plan.epochs)} epochs" for plan in found.table[0]]
    yield f"{'batch size':>14} " + "".join(f"{each:>17}" for each in head)
    for row in found.table:
        yield f"{_size(row[0]):>14} " + "".join(f"{_cell(found, plan):>17}" for plan in row)
    if found.records_per_second is not None:
        speed = found.records_per_second
        times = (duration(plan.seconds(speed)) for plan in found.table[0])
        yield f"{'time':>14} " + "".join(f"{each:>16} " for each in times)


def _cell(found: Suggestion, plan: TrainingPlan) -> str:
    star = "*" if plan == found.best else " "
    return f"{plan.excess:.2f} ({plan.steps:,}){star}"


def _size(plan: TrainingPlan) -> str:
    return "all records" if plan.sample_rate == 1 else f"{plan.batch_size:,}"


def _number(epochs: float) -> str:
    return f"{epochs:.0f}" if epochs.is_integer() else f"{epochs:.2g}"


def _details(found: Suggestion, num_parameters: int | None) -> Iterator[str]:
    """Yield what a step is with each batch size, at the suggested number of epochs."""
    epochs = [plan.epochs for plan in found.table[0]]
    column = min(range(len(epochs)), key=lambda index: abs(epochs[index] - found.best.epochs))
    what = "noise is that of the mean gradient, in units of C"
    yield f"a step, in {_number(epochs[column])} epochs; {what}"
    lengths = [] if num_parameters is None else [f"noise length ({num_parameters:,} weights)"]
    heads = ["steps", "q", "z", "z/B", *lengths]
    yield f"{'batch size':>14} " + "".join(f"{head:>{_width(head)}}" for head in heads)
    for plan in (row[column] for row in found.table):
        ratio = f"{plan.noise_batch_ratio:.3g}"
        cells = [
            f"{plan.steps:,}",
            f"{plan.sample_rate:.3g}",
            f"{plan.noise_multiplier:.3g}",
            ratio,
        ]
        if num_parameters is not None:
            cells.append(f"{plan.noise_length(num_parameters):.3g}")
        star = "*" if plan == found.best else ""
        pairs = zip(cells, heads, strict=True)
        yield f"{_size(plan):>14} " + "".join(f"{c:>{_width(head)}}" for c, head in pairs) + star


def _width(head: str) -> int:
    return max(11, len(head) + 3)


def _choice(found: Suggestion, layer_inputs: int) -> Iterator[str]:
    best = found.best
    rate = learning_rate(best, math.sqrt(2 / layer_inputs))
    yield f"* choose: {settings(best)}"
    if found.records_per_second is not None:
        there_is = "" if found.seconds is None else f" of {duration(found.seconds)}"
        yield f"  time: {duration(best.seconds(found.records_per_second))}{there_is}"
    yield (
        f"  learning rate to begin with: {rounded(rate):g} for Adam (layers of {layer_inputs} inputs); "
        "a third of it for pre-trained weights"
    )
    yield from _reasons(found)


def _reasons(found: Suggestion) -> Iterator[str]:
    best = found.best
    if found.is_short_of_time:
        yield "why: the time is short. This is the largest batch with enough steps; its noise is that of"
        yield f"  full batches on one record in {best.excess:.2g}. More time takes noise away."
        return
    yield f"why: the fewest epochs (1, 2, 4, ...) with which a batch size has {LEAST_STEPS} steps or more"
    yield f"  and at most {ENOUGH} times the noise of full batches; the smallest such batch, for the most"
    yield "  steps. Down a column there is less noise, and there are fewer steps to learn in."


def _comparison(found: Suggestion, yours: TrainingPlan) -> Iterator[str]:
    yield f"yours: {settings(yours)}"
    yield (
        f"  {yours.steps:,} steps, z = {yours.noise_multiplier:.3g}, z/B = "
        f"{yours.noise_batch_ratio:.3g}; noise {yours.excess:.2f} times that of full batches"
    )
    ratio = yours.noise_of_the_run / found.best.noise_of_the_run
    word = "more" if ratio >= 1 else "less"
    yield f"  {max(ratio, 1 / ratio):.2g} times {word} noise over the run than the suggestion"


def plan_as_dict(plan: TrainingPlan, records_per_second: float | None = None) -> dict[str, Any]:
    """Return a plan and what follows from it as plain data."""
    return {
        "batch_size": plan.batch_size,
        "epochs": plan.epochs,
        "steps": plan.steps,
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise_multiplier,
        "noise_batch_ratio": plan.noise_batch_ratio,
        "noise_of_the_run": plan.noise_of_the_run,
        "excess": plan.excess,
        "seconds": None if records_per_second is None else plan.seconds(records_per_second),
    }


def as_dict(
    found: Suggestion,
    *,
    num_parameters: int | None = None,
    layer_inputs: int = 256,
    yours: TrainingPlan | None = None,
) -> dict[str, Any]:
    """Return what :func:`text` says as plain data, of all plans."""
    best, speed = found.best, found.records_per_second
    length = None if num_parameters is None else best.noise_length(num_parameters)
    return {
        "num_records": best.num_records,
        "target_epsilon": best.target_epsilon,
        "target_delta": best.target_delta,
        "relation": best.relation,
        "noise": best.noise.name,
        "records_per_second": speed,
        "seconds": found.seconds,
        "is_short_of_time": found.is_short_of_time,
        "best": {
            **plan_as_dict(best, speed),
            "noise_length": length,
            "learning_rate_adam": rounded(learning_rate(best, math.sqrt(2 / layer_inputs))),
        },
        "yours": None if yours is None else plan_as_dict(yours, speed),
        "plans": [plan_as_dict(plan, speed) for row in found.table for plan in row],
    }
