"""The notices of a fit as it runs: who acts on metrics, who else spent, and ε."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Trainer

from lightning_dp.run import PrivateRun
from lightning_dp.strategies.earlier_training import EarlierTraining
from lightning_dp.strategies.monitors import Monitors
from lightning_dp.strategies.publish import Publisher

__all__ = ["Notices"]


class Notices:
    """Keeps users, and other ledgers, informed during a fit whose plan has been declared.

    Args:
        trainer: whose fit begins.
        run: its privacy side.
        monitors: has begun.
        earlier: was made before the plan was.
    """

    def __init__(
        self, trainer: Trainer, run: PrivateRun, monitors: Monitors, earlier: EarlierTraining
    ) -> None:
        self._run = run
        self._is_lead = trainer.is_global_zero
        self._monitors, self._earlier = monitors, earlier
        self._publisher = Publisher(trainer, run)

    def begin(self, folder: Path | None) -> None:
        """Say what others spent, and publish ε for the first time.

        Args:
            folder: of the journal; None if there is none.
        """
        if self._is_lead:
            self._earlier.begin(folder)
        self._publisher.publish()

    def check_monitors(self) -> None:
        """Refuse schedulers that follow what was logged since (:class:`Monitors`)."""
        self._monitors.check()

    def replanned(self) -> None:
        """Read ε from the new plan from now on."""
        self._publisher.begin()

    def stepped(self) -> None:
        """Publish ε after a step."""
        self._publisher.publish(final=self._run.stop_reason is not None)

    def ended(self) -> None:
        """Publish ε at the end of training."""
        self._publisher.publish(final=True)

    def released(self, tensors: Mapping[str, object] | None = None) -> None:
        """Note the weights that others will see: those of a checkpoint, or as they are now."""
        if self._is_lead:
            self._earlier.released(tensors)
