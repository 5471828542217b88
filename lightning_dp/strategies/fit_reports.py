"""The report files of one fit, beside its checkpoints, and the line that says how it ended."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from lightning_dp.private_run import PrivateRun
from lightning_dp.report.content import PrivacyReport
from lightning_dp.report.files import write_report
from lightning_dp.report.of_run import report
from lightning_dp.report.text import summary
from lightning_dp.warnings import warn

__all__ = ["FitReports"]


class FitReports:
    """Writes the report where people look for it.

    - Beside each checkpoint, before it is saved: the report there is never older than it.
    - At the end of the fit, also by the budget, an exception or Ctrl-C, once more: in all folders
      of its checkpoints; without any, in the logger's folder, else beside the journal. Nothing in
      a ``fast_dev_run``, which leaves no checkpoints and logs either.
    - By the lead process only, and only if steps were charged.
    - A file that cannot be written ends no training: it is said, and the content is in the
      checkpoints, too. Folders that are no local ones (``s3://``) have it there only.

    Make it on all processes (the Trainer asks for the log folder on all of them).

    Args:
        trainer: whose fit begins.
        run: what is reported.
        journal_folder: where the journal is.
    """

    def __init__(self, trainer: Trainer, run: PrivateRun, journal_folder: Path) -> None:
        self._run = run
        self._is_lead = trainer.is_global_zero
        self._folders = set() if trainer.fast_dev_run else _folders(trainer, journal_folder)  # type: ignore[attr-defined]
        self._is_finished = False
        self._has_warned = False

    def write_beside(self, checkpoint: str | os.PathLike[str], content: PrivacyReport) -> None:
        """Write the report into the folder of a checkpoint that is about to be saved."""
        folder = _local(os.path.dirname(os.fspath(checkpoint)) or ".")
        if folder is None or not content.steps:
            return
        if not self._is_finished:
            self._folders.add(folder)
        self._say(self._write(content, {folder})[1])

    def finish(self, *, may_warn: bool) -> None:
        """Write the last report and say how the fit ended, once.

        Args:
            may_warn: whether a warning, which the user may have made an error, hides nothing.
        """
        if self._is_finished or not self._is_lead or not self._run.steps:
            return
        self._is_finished = True
        content = report(self._run)
        written, failure = self._write(content, self._folders)
        where = [*(str(path) for path in written), *([] if failure is None else [failure])]
        rank_zero_info(summary(content, ", ".join(where) or "none in a fast_dev_run"))
        if may_warn:
            self._say(failure)

    def _write(self, content: PrivacyReport, folders: set[Path]) -> tuple[list[Path], str | None]:
        """The files that were written, and what went wrong with others."""
        written, failures = [], []
        for folder in sorted(folders):
            try:
                written.append(write_report(content, folder))
            except OSError as error:
                failures.append(f"could not be written into {folder}: {error}")
        return written, "; ".join(failures) or None

    def _say(self, failure: str | None) -> None:
        if failure is not None and not self._has_warned:
            self._has_warned = True
            warn(f"The privacy report {failure}. Training goes on; checkpoints hold it, too.")


def _folders(trainer: Trainer, journal_folder: Path) -> set[Path]:
    """Where checkpoints go; else the logger's folder; else the journal's."""
    checkpoints = [
        callback.dirpath
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None
    ]
    log_dir = trainer.log_dir if trainer.loggers else None  # on all processes: it is broadcast
    places = checkpoints or ([] if log_dir is None else [log_dir])
    return {folder for place in places if (folder := _local(place)) is not None} or {
        journal_folder.absolute()
    }


def _local(place: str | os.PathLike[str]) -> Path | None:
    """The folder, if it is one of this machine."""
    name = os.fspath(place)
    return None if "://" in name else Path(name).absolute()
