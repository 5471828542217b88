"""Documents about a ledger: report files, checkpoints and journals, read without trusting them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import reprlib
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_dp._files import FILE_MODE, file_of_checkpoint, replaced
from lightning_dp._refusals import RefusedSetting, text_of
from lightning_dp.accounting.base import Relation, check_delta, check_relation
from lightning_dp.accounting.charges import Charges, JournalError
from lightning_dp.accounting.journal import (
    is_journal_name,
    is_ledger_id,
    read_journal,
)
from lightning_dp.accounting.ledger import read_state
from lightning_dp.accounting.release_file import (
    check_nothing_is_missing,
    progress_of_all,
)
from lightning_dp.report.content import PrivacyReport
from lightning_dp.report.pages import draft, page

__all__ = [
    "CHECKPOINT_KEY",
    "PATTERN",
    "Document",
    "NotPrivateError",
    "documents_in",
    "find_journal",
    "from_checkpoint",
    "in_checkpoint",
    "read_charges",
    "read_document",
    "read_report",
    "write_report",
    "write_text",
]

CHECKPOINT_KEY = "lightning_dp"
"""The key of the privacy record in a checkpoint."""

PATTERN = "privacy_report-*.json"
"""Names of report files."""

# -- report files ------------------------------------------------------------------------------


def write_report(report: PrivacyReport, folder: str | Path, *, is_over: bool = True) -> Path:
    """Write ``privacy_report-<ledger id>.json`` and ``.md`` into a folder, each replaced whole.

    Runs of one ledger replace each other's file, since a later report holds what an earlier one
    says; another ledger has other files. New files are readable by their owner alone.

    Args:
        report: what to write.
        folder: made if it does not exist.
        is_over: False while the training goes on: the Markdown has no page one then, which would
            take a second at every checkpoint.

    Returns:
        the path of the JSON file.

    Raises:
        ValueError: if its ``ledger_id``, which names the file, is none.
        OSError: if the disk does not take it. The files are then what they were before.
    """
    if not is_ledger_id(report.ledger_id):
        raise ValueError(f"ledger_id={report.ledger_id!r} is not one of 16 hexadecimal digits.")
    path = Path(folder) / PATTERN.replace("*", report.ledger_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    told = replace(report, journal=_told(report.journal, path.parent))
    content = json.dumps(told.to_dict(), ensure_ascii=False, allow_nan=False, indent=1)
    layout = page(report) if is_over else draft(report)
    write_text(path.with_suffix(".md"), layout.markdown())
    write_text(path, content + "\n")
    return path


def read_report(path: str | Path) -> PrivacyReport:
    """Read the report of a JSON file.

    Raises:
        ValueError: if it is not one, saying why.
        OSError: if it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a dictionary")
        report = PrivacyReport.from_dict(content)
        return replace(report, journal=_found(report.journal, Path(path).parent))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RefusedSetting(
            f"{path} is not a privacy report: {text_of(error)}", topic="unreadable-checkpoint"
        ) from None


def _told(journal: str | None, folder: Path) -> str | None:
    """Return the path of a journal from a folder; below ``~`` where they have nothing in common.

    A report is shown to people: it tells no user names that it need not.
    """
    if journal is None or not os.path.isabs(journal):
        return journal
    start = os.path.abspath(folder)
    with contextlib.suppress(ValueError):  # another drive
        if (common := os.path.commonpath((start, journal))) != os.path.dirname(common):
            return Path(os.path.relpath(journal, start)).as_posix()
    home = os.path.expanduser("~")
    if Path(journal).is_relative_to(home):
        return f"~/{Path(journal).relative_to(home).as_posix()}"
    return journal


def _found(journal: str | None, folder: Path) -> str | None:
    """Return the absolute path that :func:`_told` was given, seen from the folder of the report."""
    if journal is None or not is_journal_name(Path(journal).name) or "\0" in journal:
        return journal
    return os.path.normpath(os.path.abspath(folder) / Path(os.path.expanduser(journal)))


def write_text(path: Path, content: str) -> None:
    """Write a file, replaced whole if it exists; a new one is readable by its owner alone."""
    # Who may read a file that exists is for its owner to say.
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else FILE_MODE
    with replaced(path, mode) as file:
        file.write(content.encode())


# -- all kinds of files ------------------------------------------------------------------------


class NotPrivateError(ValueError):
    """A checkpoint without a ledger: of a run without privacy."""


@dataclass(frozen=True)
class Document:
    """A checkpoint, a report file or a journal, by what it says about privacy.

    Args:
        path: the file.
        kind: of the file.
        ledger_id: of its ledger; in a federated client's journal, the id of its data set.
        journal: where it says that the journal is; None if it has none.
        events: the charges that it knows, by run.
        delta, relation: of its ε; a journal knows neither, they are the reader's.
        seeded: whether a test seed was set at any time.
        report: None in a journal, and in checkpoints of versions that had none in them.
        steps_made: private steps that the checkpoint's weights went through and that were charged,
            at least; 0 for a report.
    """

    path: Path
    kind: Literal["checkpoint", "report", "journal"]
    ledger_id: str
    journal: Path | None
    events: Charges
    delta: float
    relation: Relation
    seeded: bool = False
    report: PrivacyReport | None = None
    steps_made: int = 0


def in_checkpoint(report: PrivacyReport) -> dict[str, Any]:
    """Return what a checkpoint holds of a report: all but the events, which its ledger has already."""
    content = report.to_dict()
    del content["events"]
    return content


def from_checkpoint(record: dict[str, Any]) -> PrivacyReport | None:
    """Return the report in the ``lightning_dp`` record of a checkpoint; None if it has none."""
    content = record.get("report")
    if content is None:
        return None
    return PrivacyReport.from_dict({**content, "events": record["ledger"]["runs"]})


def read_document(path: Path) -> Document:
    """Read a checkpoint or, if its name ends with ``.json``, a report.

    Raises:
        NotPrivateError: for a checkpoint of a run without privacy.
        ValueError: if it is neither, or cannot be read without running code that is in it.
    """
    if path.suffix == ".json":
        report = read_report(path)
        return Document(
            path=path,
            kind="report",
            ledger_id=report.ledger_id,
            journal=_journal(path, report.journal),
            events=report.events,
            delta=check_delta(report.delta),
            relation=report.relation,
            seeded=report.seeded,
            report=report,
        )
    try:
        return _checkpoint(path, _load(path))
    except (KeyError, TypeError, AttributeError) as error:
        raise RefusedSetting(
            f"{path} has a damaged privacy record: {error!r}.", topic="unreadable-checkpoint"
        ) from None


def _load(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(
            file_of_checkpoint(path), map_location="cpu", weights_only=True, mmap=True
        )
    except (pickle.UnpicklingError, RuntimeError, EOFError, UnicodeDecodeError) as error:
        reason = str(error).strip().splitlines()
        raise RefusedSetting(
            f"{path} cannot be read as a checkpoint of plain types and tensors (nothing else is "
            "loaded, since that could run code): check the run's report file, or the journal. "
            f"torch says: {reason[0] if reason else error!r}",
            topic="unreadable-checkpoint",
        ) from None
    if not isinstance(content, dict) or CHECKPOINT_KEY not in content:
        raise NotPrivateError(f"{path} is no checkpoint of a private run: it holds no ledger.")
    record: dict[str, Any] = content[CHECKPOINT_KEY]
    return record


def _checkpoint(path: Path, record: dict[str, Any]) -> Document:
    mechanism = record["mechanism"]
    try:
        ledger_id, journal, events = read_state(record["ledger"])
    except JournalError as error:
        raise ValueError(f"{path}: {error.text}") from None
    unasked = 0 if mechanism is None else sum(count for _, count in mechanism["unasked"])
    relation: Relation = record["config"]["relation"]
    check_relation(relation)
    return Document(
        path=path,
        kind="checkpoint",
        ledger_id=ledger_id,
        journal=journal,
        events=events,
        delta=check_delta(record["config"]["target_delta"]),
        relation=relation,
        seeded=bool(record["seeded"]),
        report=from_checkpoint(record),
        steps_made=0 if mechanism is None else int(mechanism["step"]) - unasked,
    )


def _journal(document: Path, recorded: object) -> Path | None:
    """Return where a document says that its journal is, if that can be the name of one."""
    if recorded is None:
        return None
    if isinstance(recorded, str) and "\0" not in recorded:
        path = Path(recorded)
        if is_journal_name(path.name):
            return path
    raise RefusedSetting(
        f"{document} names a journal that is none: {reprlib.repr(recorded)}.",
        topic="unreadable-checkpoint",
    )


def documents_in(folder: Path) -> Iterator[Path]:
    """Find checkpoints and reports in a folder and below it."""
    for pattern in ("*.ckpt", PATTERN):
        yield from sorted(folder.rglob(pattern))


def find_journal(recorded: Path | None, folder: Path) -> Path | None:
    """Find a journal where it was recorded, else by its name in or below a folder."""
    if recorded is None or recorded.exists():
        return recorded
    return next(iter(sorted(folder.rglob(recorded.name))), recorded)


def read_charges(journal: Path) -> tuple[str, Charges]:
    """Read a journal by itself: the id of its ledger or data set, and its charges.

    Raises:
        JournalError: if it is missing or damaged, or a client's release files know of more.
    """
    known = [*progress_of_all(journal)]  # first: a client that goes on charges the journal first
    ledger_id, runs = read_journal(journal)
    check_nothing_is_missing(journal, ledger_id, runs, known)
    return ledger_id, runs
