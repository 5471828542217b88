"""Hooks for callbacks that follow the privacy side of a fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Callback, Trainer

from lightning_dp.run import PrivateRun

if TYPE_CHECKING:
    from lightning_dp.report import PrivacyReport

__all__ = ["PrivacyCallback"]


class PrivacyCallback(Callback):
    """A callback with hooks that a private strategy calls, where Lightning has none.

    It hears them if it is among the Trainer's callbacks, or came to the strategy together with the
    run (:meth:`DifferentialPrivacyStrategy.use_privacy`). All processes call each hook, except
    :meth:`on_privacy_save`.
    """

    def on_privacy_start(self, trainer: Trainer, run: PrivateRun, folder: Path) -> None:
        """Act when the plan is declared; no record was read yet.

        Args:
            trainer: whose fit begins.
            run: its privacy side: plan, ledger, ε.
            folder: of a new journal.
        """

    def on_privacy_replan(self, trainer: Trainer, run: PrivateRun) -> None:
        """Act when a charge was spent on nothing, so the budget affords less of the plan."""

    def on_privacy_step(self, trainer: Trainer, run: PrivateRun) -> None:
        """Act when the optimizer has stepped on a private gradient."""

    def on_privacy_save(self, run: PrivateRun, content: PrivacyReport) -> None:
        """Act before a checkpoint is saved that holds this report, on the process that writes it.

        That may be after the fit, and in a copy of the strategy, which has no Trainer.
        """

    def on_privacy_end(self, trainer: Trainer, run: PrivateRun) -> None:
        """Act at the end of training."""

    def on_privacy_teardown(self, trainer: Trainer, run: PrivateRun) -> None:
        """Act at the end of the fit, also by an exception, which an error or a warning would hide."""
