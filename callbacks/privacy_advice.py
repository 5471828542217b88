"""A short block before the first step, and words after the last where there is something to say."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_dp.run import PrivateRun
from lightning_dp.strategies.hooks import PrivacyCallback

__all__ = ["PrivacyAdvice"]


class PrivacyAdvice(PrivacyCallback):
    """Says what noise and batches mean for learning, and what the releases tell of it.

    All from public numbers and releases, so it costs no privacy. Nothing in a ``fast_dev_run``, for
    ``advice=False``, or of a run that was voided.

    :class:`DifferentialPrivacy` and the private strategies bring one along.
    """

    def on_privacy_start(self, trainer: Trainer, run: PrivateRun, folder: Path) -> None:
        from lightning_dp.advice import before

        if _is_wanted(trainer, run) and run.setting is not None:
            _say(before(run.setting))

    def on_privacy_end(self, trainer: Trainer, run: PrivateRun) -> None:
        from lightning_dp.advice import after

        if not _is_wanted(trainer, run) or run.voided is not None:
            return
        signal = run.signal
        if run.setting is not None and signal is not None:
            _say(after(run.setting, signal))


def _is_wanted(trainer: Trainer, run: PrivateRun) -> bool:
    return run.config.advice and not trainer.fast_dev_run  # type: ignore[attr-defined]


def _say(sentences: list[str]) -> None:
    if sentences:
        rank_zero_info("\n  ".join(["privacy advice:", *sentences]))
