"""The report files of one fit, and the line that says how it ended."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_dp._warnings import warn
from lightning_dp.report.content import PrivacyReport
from lightning_dp.report.files import write_report
from lightning_dp.report.of_run import report
from lightning_dp.run import PrivateRun

__all__ = ["FitReports"]


class FitReports:
    """Writes the report where people look for it.

    - In the logger's folder (``lightning_logs/version_0``, which the folder of checkpoints is in);
      without a logger, or if it has no folder of this machine, beside the journal. Never among
      checkpoints: people load every file there, and each checkpoint holds the report anyway.
    - Before each checkpoint is saved, so it is never older than one, and at the end of the fit,
      also by the budget, an exception or Ctrl-C. Nothing in a ``fast_dev_run``, which leaves no
      checkpoints and logs either.
    - By the lead process only, and only if steps were charged.
    - A file that cannot be written ends no training: it is said.

    Make it on all processes (the Trainer asks for the log folder on all of them).

    Args:
        trainer: whose fit begins.
        run: what is reported.
        journal_folder: where the journal is.
    """

    def __init__(self, trainer: Trainer, run: PrivateRun, journal_folder: Path) -> None:
        self._run = run
        self._is_lead = trainer.is_global_zero
        self._folder = None if trainer.fast_dev_run else _folder(trainer, journal_folder)  # type: ignore[attr-defined]
        self._is_finished = False
        self._has_warned = False

    def write(self, content: PrivacyReport) -> None:
        """Write the report of a checkpoint that is about to be saved."""
        if content.steps:
            self._say(self._write(content)[1])

    def finish(self, *, may_warn: bool) -> None:
        """Write the last report and say how the fit ended, once.

        Args:
            may_warn: whether a warning, which the user may have made an error, hides nothing.
        """
        if self._is_finished or not self._is_lead or not self._run.steps:
            return
        self._is_finished = True
        if self._run.voided is not None:
            return  # the error says it; nothing is written after it
        content = report(self._run)
        written, failure = self._write(content)
        where = failure or ("none in a fast_dev_run" if written is None else str(written))
        rank_zero_info(content.summary(where))
        if may_warn:
            self._say(failure)

    def _write(self, content: PrivacyReport) -> tuple[Path | None, str | None]:
        """The file that was written, and what went wrong."""
        if self._folder is None:
            return None, None
        try:
            return write_report(content, self._folder), None
        except OSError as error:
            return None, f"could not be written into {self._folder}: {error}"

    def _say(self, failure: str | None) -> None:
        if failure is not None and not self._has_warned:
            self._has_warned = True
            warn(f"The privacy report {failure}. Training goes on; checkpoints hold it, too.")


def _folder(trainer: Trainer, journal_folder: Path) -> Path:
    """The logger's folder, unless checkpoints go there; else the journal's."""
    places = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    of_checkpoints = {_local(place) for place in places if place is not None}
    log_dir = trainer.log_dir if trainer.loggers else None  # on all processes: it is broadcast
    folder = None if log_dir is None else _local(log_dir)
    if folder is None or folder in of_checkpoints:
        return journal_folder.absolute()
    return folder


def _local(place: str | os.PathLike[str]) -> Path | None:
    """The folder, if it is one of this machine."""
    name = os.fspath(place)
    return None if "://" in name else Path(os.path.abspath(name))
