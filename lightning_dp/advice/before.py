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
        f"{s.num_records:,} records, {s.batch_size:g} in a batch on average (q = {s.sample_rate:.3g}), "
        f"{_count(s.steps)} steps ({_epochs(s)}), noise multiplier z = {s.noise_multiplier:.3g}, clip "
        f"norm C = {s.clip_norm:g}."
    ]
    if s.noise_multiplier > 0 and math.isfinite(s.clip_norm):
        length = s.noise_length
        longer = length > s.clip_norm
        lines.append(
            f"The noise in a step's mean gradient is z·C·√d/B = {length:.3g} long (d = {s.size:,} "
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
    if setting.steps == 1 < setting.planned_steps:
        lines.append(
            "One step spends the whole budget. Raise noise_multiplier, or leave it out: then it is "
            "calibrated for all steps."
        )
    elif 1 < setting.steps < setting.planned_steps:
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
    present = None if setting.optimizer is None else setting.optimizer.learning_rate
    rate = _advised_rate(setting, better)
    if better is None and rate is None:
        return []
    epochs = math.ceil(setting.epochs - 1e-9) if math.isfinite(setting.epochs) else None
    batch, epochs = (
        (round(setting.batch_size), epochs)
        if better is None
        else (better.batch_size, better.epochs)
    )
    parts = [f"batch_size={batch} (or batch_size × accumulate_grad_batches)"]
    parts += [] if epochs is None else [f"max_epochs={epochs}"]
    if rate is not None or present is not None:
        parts.append(f"learning rate {present if rate is None else rate:g}")
    return [f"try: {', '.join(parts)}", *_reasons(setting, better, rate)]


def _reasons(setting: Setting, better: Alternative | None, rate: float | None) -> list[str]:
    """Return why, in one sentence or two."""
    words = []
    if better is not None:
        few = "at least 100 steps are worth having; " if setting.steps < LEAST_STEPS else ""
        words.append(
            f"That is {better.steps} steps ({few}the noise over the run would be about "
            f"{better.excess:.2g} times that of full batches)."
        )
    if rate is not None and setting.optimizer is not None:
        words.append(
            f"With this learning rate of {setting.optimizer.name} (now "
            f"{setting.optimizer.learning_rate:g}) the noise moves each weight by about its own size "
            "over the run; for weights that were trained before, take a third of it."
        )
    return words


def _advised_rate(setting: Setting, better: Alternative | None) -> float | None:
    """Return the learning rate to take for these steps, if it is far from the present one."""
    optimizer = setting.optimizer
    rate = suggested_rate(setting, better)
    if optimizer is None or rate is None or not optimizer.learning_rate > 0:
        return None
    return None if 1 / _FAR < rate / optimizer.learning_rate < _FAR else rounded(rate)


def suggested_rate(setting: Setting, better: Alternative | None = None) -> float | None:
    """Return the planner's learning rate for a setting, or for what is to be tried instead of it.

    None for an optimizer that the principle does not know, and for SGD with hardly any noise, which
    sets no scale then.
    """
    optimizer = setting.optimizer
    if optimizer is None or optimizer.kind is None or setting.weight_size is None:
        return None
    if not (setting.is_constant and setting.noise_multiplier > 0 and 1 <= setting.steps < math.inf):
        return None
    if not (setting.clip_norm < math.inf and 0 <= optimizer.momentum < 1):
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
