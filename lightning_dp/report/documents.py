"""What was written about a ledger: checkpoints and report files, read without trusting them."""

from __future__ import annotations

import pickle
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_dp.accounting import AbstractEvent
from lightning_dp.accounting.base import Relation, check_delta, check_relation
from lightning_dp.accounting.ids import is_journal_name
from lightning_dp.accounting.journal import Runs, history_of
from lightning_dp.accounting.ledger import runs_from_dict
from lightning_dp.report.content import PrivacyReport
from lightning_dp.report.files import PATTERN, read_report

__all__ = [
    "CHECKPOINT_KEY",
    "Document",
    "NotPrivateError",
    "documents_in",
    "from_checkpoint",
    "in_checkpoint",
    "read_document",
]

CHECKPOINT_KEY = "lightning_dp"
"""Where the privacy record is in a checkpoint."""


class NotPrivateError(ValueError):
    """A checkpoint without a ledger: of a run without privacy."""


@dataclass(frozen=True)
class Document:
    """A checkpoint or a report file, by what it says about privacy.

    Args:
        path: the file.
        kind: "checkpoint" or "report".
        ledger_id: of its ledger.
        journal: where it says that the journal is; None if it has none.
        events: the charges that it knows, by run.
        delta, relation: of its ε.
        seeded: whether a test seed was set at any time.
        report: None in checkpoints of versions that had none in them.
        steps_made: private steps that the checkpoint's weights went through and that were charged,
            at least; 0 for a report.
    """

    path: Path
    kind: str
    ledger_id: str
    journal: Path | None
    events: Runs
    delta: float
    relation: Relation
    seeded: bool
    report: PrivacyReport | None
    steps_made: int = 0

    def history(self) -> list[tuple[AbstractEvent, int]]:
        """All events with their counts, over all runs."""
        return history_of(self.events)


def in_checkpoint(report: PrivacyReport) -> dict[str, Any]:
    """What a checkpoint holds of a report: all but the events, which its ledger has already."""
    content = report.to_dict()
    del content["events"]
    return content


def from_checkpoint(record: dict[str, Any]) -> PrivacyReport | None:
    """The report in the ``lightning_dp`` record of a checkpoint; None if it has none."""
    content = record.get("report")
    if content is None:
        return None
    return PrivacyReport.from_dict({**content, "events": record["ledger"]["runs"]})


def read_document(path: Path) -> Document:
    """A checkpoint or, if its name ends with ``.json``, a report.

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
        raise ValueError(f"{path} has a damaged privacy record: {error!r}.") from None


def _load(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, UnicodeDecodeError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"{path} cannot be read as a checkpoint of plain types and tensors (nothing else is "
            "loaded, since that could run code): check the run's report file, or the journal. "
            f"torch says: {reason[0] if reason else error!r}"
        ) from None
    if not isinstance(content, dict) or CHECKPOINT_KEY not in content:
        raise NotPrivateError(f"{path} is no checkpoint of a private run: it holds no ledger.")
    record: dict[str, Any] = content[CHECKPOINT_KEY]
    return record


def _checkpoint(path: Path, record: dict[str, Any]) -> Document:
    ledger, mechanism = record["ledger"], record["mechanism"]
    unasked = 0 if mechanism is None else sum(count for _, count in mechanism["unasked"])
    relation: Relation = record["config"]["relation"]
    check_relation(relation)
    return Document(
        path=path,
        kind="checkpoint",
        ledger_id=str(ledger["id"]),
        journal=_journal(path, ledger["journal"]),
        events=runs_from_dict(ledger["runs"]),
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
    raise ValueError(f"{document} names a journal that is none: {reprlib.repr(recorded)}.")


def documents_in(folder: Path) -> Iterator[Path]:
    """Checkpoints and reports in a folder and below it."""
    for pattern in ("*.ckpt", PATTERN):
        yield from sorted(folder.rglob(pattern))
