"""Advice before the first step: the noise of this setting, and what another one would give."""

from __future__ import annotations

import math

from lightning_dp.advice.alternatives import Alternative, Alternatives
from lightning_dp.advice.setting import Setting
from lightning_dp.plan import TrainingPlan, learning_rate
from lightning_dp.plan.learning_rate import rounded
from lightning_dp.plan.suggestion import ENOUGH, LEAST_STEPS

__all__ = ["before", "changes", "suggested_rate"]

_FAR = 3.0  # a learning rate is a scale: within that factor nothing is said
_MUCH = 0.1  # of C: with shorter noise, what is stable without privacy limits SGD, and not noise


def before(setting: Setting) -> list[str]:
    """Return sentences about a training that begins, from public numbers alone.

    Args:
        setting: of the training.
    """
    return [*_numbers(setting), *_budget(setting), *_over_the_run(setting), *changes(setting)]


def _numbers(setting: Setting) -> list[str]:
    s = setting
    lines = [
        f"{s.num_records} records, {s.batch_size:g} in a batch on average (q = {s.sample_rate:.3g}), "
        f"{_count(s.steps)} steps ({_epochs(s)}), noise multiplier z = {s.noise_multiplier:.3g}, clip "
        f"norm C = {s.clip_norm:g}."
    ]
    if s.noise_multiplier > 0 and math.isfinite(s.clip_norm):
        length = s.noise_length
        longer = length > s.clip_norm
        lines.append(
            f"The noise in a step's mean gradient is z·C·√d/B = {length:.3g} long (d = {s.size} "
            f"weights), the gradient itself at most C = {s.clip_norm:g}."
            + (" That is no fault: over the steps noise averages out." if longer else "")
        )
    return lines


def _budget(setting: Setting) -> list[str]:
    """Return what is wrong with δ or with the steps that the budget affords."""
    lines = []
    if not setting.target_delta * setting.num_records < 1:
        lines.append(
            f"δ = {setting.target_delta:g} is not below 1/N = {1 / setting.num_records:.2g}: "
            "choose it below, or ε means little."
        )
    if setting.steps <= 1 < setting.planned_steps:
        lines.append(
            "One step spends the whole budget. Raise noise_multiplier, or leave it out: then it is "
            "calibrated for all steps."
        )
    elif setting.steps < setting.planned_steps:
        lines.append(
            f"The budget ends after {_count(setting.steps)} of {_count(setting.planned_steps)} steps. "
            "Without noise_multiplier, the noise is calibrated for all of them."
        )
    return lines


def _over_the_run(setting: Setting) -> list[str]:
    """Return the noise over the run, and that of a batch four times as large or of more epochs."""
    found = Alternatives.of(setting)
    if found is None:
        return []
    line = (
        f"Over the run, the noise is {found.excess:.2g} times that of full batches with the same ε "
        f"(1 is the least; {ENOUGH:g} is good)."
    )
    if setting.sample_rate < 1:
        batch, epochs = round(setting.batch_size), max(1, round(setting.epochs))
        larger, longer = found.at(4 * batch, epochs), found.at(batch, 4 * epochs)
        line += (
            f" With batches of {larger.batch_size} it would be about {larger.excess:.2g}, with "
            f"{longer.epochs} epochs about {longer.excess:.2g}."
        )
    return [line]


def changes(setting: Setting) -> list[str]:
    """Return what to change, in words that can be followed; nothing if the setting is good."""
    found = Alternatives.of(setting)
    better = None if found is None else found.better()
    lines = []
    if better is not None:
        lines.append(_of_batch(setting, better))
    advised = _advised_rate(setting, better)
    if advised is not None:
        lines.append(advised)
    return lines


def _of_batch(setting: Setting, better: Alternative) -> str:
    wanted = []
    if better.batch_size != round(setting.batch_size):
        times = better.batch_size / setting.batch_size
        memory = "; accumulate_grad_batches saves memory" if times > 1 else ""
        wanted.append(f"batch_size={better.batch_size} (in all, {times:.2g} times as much{memory})")
    if abs(better.epochs - setting.epochs) > 0.1:
        wanted.append(f"max_epochs={better.epochs} (instead of {setting.epochs:.3g})")
    few = f"{_count(setting.steps)} steps are few, and " if setting.steps < LEAST_STEPS else ""
    return (
        f"Try {' and '.join(wanted)}, which is {better.steps} steps: {few}the noise over the run would "
        f"be about {better.excess:.2g} times that of full batches."
    )


def _advised_rate(setting: Setting, better: Alternative | None) -> str | None:
    """Return which learning rate to take for these steps, if it is far from the present one."""
    optimizer = setting.optimizer
    rate = suggested_rate(setting, better)
    if optimizer is None or rate is None or not optimizer.learning_rate > 0:
        return None
    if 1 / _FAR < rate / optimizer.learning_rate < _FAR:
        return None
    return (
        f"With {'that' if better else 'this'}, try lr={rounded(rate):g} for {optimizer.name} (now "
        f"{optimizer.learning_rate:g}): the noise then moves each weight by about its own size over the "
        "run. For weights that were trained before, take a third of it."
    )


def suggested_rate(setting: Setting, better: Alternative | None = None) -> float | None:
    """Return the planner's learning rate for a setting, or for what is to be tried instead of it.

    None for an optimizer that the principle does not know, and for SGD with hardly any noise, which
    sets no scale then.
    """
    optimizer = setting.optimizer
    if optimizer is None or optimizer.kind is None or setting.weight_size is None:
        return None
    if not (setting.noise_multiplier > 0 and math.isfinite(setting.steps) and setting.steps >= 1):
        return None
    plan = TrainingPlan(
        num_records=setting.num_records,
        batch_size=better.batch_size if better else max(1, round(setting.batch_size)),
        steps=better.steps if better else int(setting.steps),
        noise_multiplier=better.noise_multiplier if better else setting.noise_multiplier,
        target_epsilon=setting.target_epsilon or 1.0,  # which has no part in it
        target_delta=setting.target_delta,
        relation=setting.relation,
    )
    noise = plan.noise_length(setting.size, setting.clip_norm)
    if optimizer.kind == "sgd" and not _MUCH * setting.clip_norm < noise < math.inf:
        return None
    return learning_rate(
        plan,
        setting.weight_size,
        optimizer=optimizer.kind,
        max_grad_norm=setting.clip_norm,
        momentum=optimizer.momentum,
    )


def _count(steps: float) -> str:
    return f"{steps:.0f}" if math.isfinite(steps) else "an unknown number of"


def _epochs(setting: Setting) -> str:
    if not math.isfinite(setting.epochs):
        return "no last one"
    epochs = round(setting.epochs, 1)
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
