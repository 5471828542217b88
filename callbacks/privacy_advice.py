"""A short block of advice before the first step, and a judgement after the last."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_dp.run import PrivateRun
from lightning_dp.strategies.hooks import PrivacyCallback


class PrivacyAdvice(PrivacyCallback):
    """Prints advice about noise and batches, before the first step and after the last.

    All from public numbers and releases, so it costs no privacy. Nothing is printed in a
    ``fast_dev_run``, for ``advice=False``, or for a run that was voided.

    :class:`DifferentialPrivacy` and the private strategies bring one along.
    """

    def on_privacy_start(self, trainer: Trainer, run: PrivateRun, folder: Path) -> None:
        from lightning_dp.plan.advice import before

        if _is_wanted(trainer, run) and run.setting is not None:
            _print(before(run.setting))

    def on_privacy_end(self, trainer: Trainer, run: PrivateRun) -> None:
        from lightning_dp.plan.advice import after

        if not _is_wanted(trainer, run) or run.voided is not None:
            return
        signal = run.signal
        if run.setting is not None and signal is not None:
            _print(after(run.setting, signal))


def _is_wanted(trainer: Trainer, run: PrivateRun) -> bool:
    return run.config.advice and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _print(sentences: list[str]) -> None:
    if sentences:
        rank_zero_info("\n  ".join([f"privacy advice: {sentences[0]}", *sentences[1:]]))
