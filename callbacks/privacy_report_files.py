"""The report files of a fit, and the line at its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_dp._refusals import warn
from lightning_dp.run import PrivateRun
from lightning_dp.strategies.hooks import PrivacyCallback

if TYPE_CHECKING:
    from lightning_dp.report import PrivacyReport


class PrivacyReportFiles(PrivacyCallback):
    """Writes the report where people look for it.

    - In the logger's folder (``lightning_logs/version_0``, which the folder of checkpoints is in);
      without a logger, or if it has no folder of this machine, next to the journal. Never among
      checkpoints: people load every file there, and each checkpoint holds the report anyway.
    - As JSON, and as Markdown: at the end with page one in plain words, before that the facts alone.
    - Before each checkpoint is saved, so it is never older than one, and at the end of the fit,
      also by the budget, an exception or Ctrl-C. Nothing in a ``fast_dev_run``, which leaves no
      checkpoints and logs either.
    - By the lead process only, and only if steps were charged.
    - A file that cannot be written ends no training: there is a warning.

    :class:`DifferentialPrivacy` and the private strategies bring one along.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None  # no files
        self._is_open = False  # a fit has begun, and the line about its end was not printed
        self._has_warned = False
        # The last one of a fit that is over.
        self._written: tuple[PrivacyReport, Path] | None = None

    def on_privacy_start(self, trainer: Trainer, run: PrivateRun, folder: Path) -> None:
        # On all processes: the Trainer asks for the log folder on all of them.
        self._folder = None if trainer.fast_dev_run else _folder(trainer, folder)  # type: ignore[attr-defined]
        self._is_open, self._has_warned = trainer.is_global_zero, False
        self._written = None

    def on_privacy_save(self, run: PrivateRun, content: PrivacyReport) -> None:
        if content.steps:
            self._warn(self._write(content, is_over=not run.is_under_way)[1])

    def on_privacy_end(self, trainer: Trainer, run: PrivateRun) -> None:
        self._warn(self._finish(run))

    def on_privacy_teardown(self, trainer: Trainer, run: PrivateRun) -> None:
        self._finish(run)

    def _finish(self, run: PrivateRun) -> str | None:
        """Write the last report and print how the fit ended, once; return the failure."""
        if not self._is_open or not run.steps:
            return None
        self._is_open = False
        if run.voided is not None:
            return None  # the error is printed; nothing is written after it

        from lightning_dp.report.run_report import at_end, report_of_run

        content = report_of_run(run)
        written, failure = self._write(content, is_over=True)
        where = failure or ("none in a fast_dev_run" if written is None else _shown(written))
        rank_zero_info(content.summary(where))
        if (total := at_end(run)) is not None:
            rank_zero_info(total)
        return failure

    def _write(self, content: PrivacyReport, *, is_over: bool) -> tuple[Path | None, str | None]:
        """Return the file that was written, and the failure."""
        from lightning_dp.report.files import write_report

        if self._folder is None:
            return None, None
        if self._written is not None and self._written[0] == content and self._written[1].exists():
            return self._written[1], None
        try:
            path = write_report(content, self._folder, is_over=is_over)
        except OSError as error:
            return None, f"could not be written into {self._folder}: {error}"
        self._written = (content, path) if is_over else None
        return path, None

    def _warn(self, failure: str | None) -> None:
        if failure is not None and not self._has_warned:
            self._has_warned = True
            warn(
                f"The privacy report {failure}. Training goes on; checkpoints hold it as well.",
                topic="report-not-written",
            )


def _folder(trainer: Trainer, journal_folder: Path) -> Path:
    """Return the logger's folder, unless checkpoints go there; else the journal's."""
    places = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    of_checkpoints = {_local(place) for place in places if place is not None}
    log_dir = trainer.log_dir if trainer.loggers else None  # on all processes: it is broadcast
    folder = None if log_dir is None else _local(log_dir)
    if folder is None or folder in of_checkpoints:
        return journal_folder.absolute()
    return folder


def _shown(path: Path) -> str:
    """Return a path from the present folder, if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _local(place: str | os.PathLike[str]) -> Path | None:
    """Return the folder, if it is one of this machine."""
    name = os.fspath(place)
    return None if "://" in name else Path(os.path.abspath(name))
