"""What several trainings cost together: the union of their journals."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

from lightning_dp.accounting.events import AbstractEvent
from lightning_dp.accounting.journal import JournalError, read_journal
from lightning_dp.accounting.ledger import Ledger, ledger_in

__all__ = ["sweep_history"]


def sweep_history(paths: str | Path | Iterable[str | Path]) -> list[tuple[AbstractEvent, int]]:
    """All that was asked of one data set by several trainings, each run counted once.

    For a hyper-parameter sweep whose results are seen: by plain composition it costs the epsilon
    of this history. The trials may share a ledger, a folder, or neither; a run that several
    journals or checkpoints know of (resumed from one another) is counted once.

    The sum holds if number and plans of the trials were fixed before the first one, or depend
    on the results only within a total that was. A trial that a *result* ended early
    counts with its whole plan: add the rest, ``[*sweep_history(...), (event, steps_left)]``. It does
    not cover choosing by a score on private validation data.

    Args:
        paths: journals, checkpoints, or folders, of which all ``*.journal`` directly in it are
            read (``<default_root_dir>/privacy`` of a Trainer).

    Returns:
        ``[(event, count), ...]``, for :func:`epsilon` and accountants, or as ``spent`` of
        :func:`calibrate`.

    Raises:
        JournalError: if a file is missing, damaged or not a journal, a folder has no journal, or
            two contradict each other.
        ValueError: if no path is given, or a checkpoint is not one of a private run.

    Example:
        >>> import tempfile
        >>> from lightning_dp.accounting import Gaussian, epsilon
        >>> folder = tempfile.mkdtemp()
        >>> for trial in range(5):
        ...     ledger = Ledger()
        ...     ledger.begin(f"trial {trial}", Path(folder))
        ...     ledger.charge(Gaussian(10.0))
        ...     ledger.end()
        >>> sweep_history(folder)
        [(Gaussian(noise_multiplier=10.0), 5)]
        >>> round(epsilon(sweep_history(folder), delta=1e-5), 3)
        0.82
    """
    given = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]
    if not given:
        raise ValueError("paths is empty; name the journals, checkpoints or folders of the trials.")
    union = Ledger()
    for path in given:
        for file in _files(path):
            _add(union, file)
    return union.history()


def _files(path: Path) -> list[Path]:
    """The file, or the journals in the folder."""
    if not path.is_dir():
        return [path]
    journals = sorted(path.glob("*.journal"))
    if not journals:
        raise JournalError(f"There is no privacy journal (*.journal) in the folder {path}.")
    return journals


def _add(union: Ledger, file: Path) -> None:
    """Add what a journal or a checkpoint (a zip archive) knows."""
    if not zipfile.is_zipfile(file):
        union.merge(read_journal(file)[1])
        return
    state = ledger_in(file)
    if state is None:
        raise ValueError(f"{file} is not a checkpoint of a private run.")
    union.restore(state, file.parent)
