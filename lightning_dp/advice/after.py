"""Advice after the last step: what the releases show, and what to try where they show little."""

from __future__ import annotations

from lightning_dp.advice.before import changes, suggested_rate
from lightning_dp.advice.setting import Setting
from lightning_dp.advice.verdict import Verdict, judged
from lightning_dp.plan.learning_rate import rounded
from lightning_dp.signal import Signal

__all__ = ["after"]

_FEW_CLIPPED = 0.05  # share of records below which C is a bound that nobody reaches
_STEP = 3.0  # factor between learning rates that are worth a try


def after(setting: Setting, signal: Signal) -> list[str]:
    """Return sentences about a training that ended; none where nothing is to be mended.

    Args:
        setting: of the training.
        signal: of its releases.
    """
    verdict = judged(signal)
    lines = [] if verdict is None else _judgement(setting, verdict)
    return [*lines, *_clipping(setting, signal)]


def _judgement(setting: Setting, verdict: Verdict) -> list[str]:
    if not verdict.learns:
        return [
            "The releases hold no direction that outlasts their noise (largest agreement "
            f"{verdict.largest:.1f}, noise alone stays below {verdict.threshold:.1f} in 99 of 100 "
            "runs): as far as they show, nothing was learnt.",
            *(changes(setting) or [_NOTHING_ELSE]),
        ]
    if verdict.stops_short:
        return [
            "At the end the releases still pointed where earlier ones had (agreement "
            f"{verdict.quarters[-1]:.0f} in the last quarter, noise alone gives 0 ± 1): the steps "
            "were too short to get there, or too few.",
            *(changes(setting) or [_longer_steps(setting)]),
        ]
    if verdict.jumps:
        return [
            "In the second half the releases pointed against earlier ones: the steps jump across what "
            "they look for.",
            _shorter_steps(setting),
        ]
    return []


_NOTHING_ELSE = (
    "Try a larger ε, more records, fewer trained weights (freeze layers, LoRA), or weights that were "
    "trained on public data."
)


def _longer_steps(setting: Setting) -> str:
    """Return which learning rate to try: the planner's if it is larger, else three times as much."""
    optimizer = setting.optimizer
    if optimizer is None or not optimizer.learning_rate > 0:
        return "Try three times the learning rate, or more epochs."
    planned = suggested_rate(setting) or 0.0
    rate = max(_STEP * optimizer.learning_rate, planned)
    return (
        f"Try lr={rounded(rate):g} for {optimizer.name} (now {optimizer.learning_rate:g}), or more "
        "epochs."
    )


def _shorter_steps(setting: Setting) -> str:
    optimizer = setting.optimizer
    if optimizer is None or not optimizer.learning_rate > 0:
        return "Try a third of the learning rate, or one that decays."
    rate = optimizer.learning_rate / _STEP
    return (
        f"Try lr={rounded(rate):g} for {optimizer.name} (now {optimizer.learning_rate:g}), or one that "
        "decays."
    )


def _clipping(setting: Setting, signal: Signal) -> list[str]:
    """Return a word about C, where the share of clipped records was released and is very small."""
    share = signal.whole.share_clipped
    if share is None or not share[0] + 2 * share[1] < _FEW_CLIPPED:
        return []
    return [
        f"Less than {100 * _FEW_CLIPPED:g} % of the records were clipped: the noise is made for "
        f"gradients of length C = {setting.clip_norm:g}, which hardly any has. Try max_grad_norm="
        f"{rounded(setting.clip_norm / _STEP):g}."
    ]
