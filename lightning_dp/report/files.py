"""The report as two files, replaced whole: a reader never finds half of one."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from lightning_dp._files import FILE_MODE, replaced
from lightning_dp.accounting.ids import is_ledger_id
from lightning_dp.report.content import PrivacyReport
from lightning_dp.report.markdown import markdown

__all__ = ["PATTERN", "read_report", "write_report"]

PATTERN = "privacy_report-*.json"


def write_report(report: PrivacyReport, folder: str | Path) -> Path:
    """Write ``privacy_report-<ledger id>.json`` and ``.md`` into a folder, atomically.

    Runs of one ledger replace each other's file, since a later report holds what an earlier one
    says; runs of other ledgers have files of their own. New files are readable by their owner alone.

    Args:
        report: what to write.
        folder: made if it does not exist.

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
    content = json.dumps(report.to_dict(), ensure_ascii=False, allow_nan=False, indent=1)
    _write(path.with_suffix(".md"), markdown(report))
    _write(path, content + "\n")
    return path


def read_report(path: str | Path) -> PrivacyReport:
    """The report of a JSON file.

    Raises:
        ValueError: if it is not one, saying why.
        OSError: if it cannot be read.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a dictionary")
        return PrivacyReport.from_dict(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not a privacy report: {error}") from None


def _write(path: Path, content: str) -> None:
    # Who may read a file that exists is for its owner to say.
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else FILE_MODE
    with replaced(path, mode) as file:
        file.write(content.encode())
