"""``python -m lightning_dp.report``: print a report, and check it against ledger and journal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, get_args

from lightning_dp._files import file_of_checkpoint
from lightning_dp.accounting.base import Relation, check_delta, epsilon_text
from lightning_dp.accounting.journal import JournalError, read_alone
from lightning_dp.config import About
from lightning_dp.report.content import READERS, Page, Total, charged, plain, render
from lightning_dp.report.files import (
    CheckedDocument,
    NotPrivateError,
    check,
    check_journal,
    documents_in,
    find_journal,
    read_document,
    total,
    write_text,
)
from lightning_dp.search import STATE, search_text

_DESCRIPTION = """\
Print the privacy report of a run and check that what was written about it agrees: epsilon is
computed again from the charged events, and the journal must hold every charge that a checkpoint or
a report holds. Nothing is written but the page of --html, and a running training is not disturbed."""

_EPILOG = """\
exit status: 0 if all agrees, 1 if something does not (each fault is named), 2 if PATH or the
options cannot be used.

examples:
  python -m lightning_dp.report lightning_logs/version_0
  python -m lightning_dp.report last.ckpt --json
  python -m lightning_dp.report last.ckpt --html page.html --record "one visit of a patient"
  python -m lightning_dp.report privacy/3f0c.journal --delta 1e-5
  python -m lightning_dp.report ledgers --delta 1e-5      (federated clients)"""


@dataclass(frozen=True)
class _Findings:
    """All that PATH holds, checked."""

    documents: Sequence[CheckedDocument] = ()  # checkpoints and reports
    journals: Sequence[CheckedDocument] = ()  # those without a document
    problems: Sequence[str] = ()  # about files that could not be checked
    notes: Sequence[str] = ()
    total: Total | None = None  # of the ledgers of a folder

    def number_of_problems(self) -> int:
        """Count the contradictions and withdrawn promises."""
        each_of = (*self.documents, *self.journals)
        return len(self.problems) + sum(len(each.problems) for each in each_of)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        found = _find(options)
        if options.html is not None:
            _write_html(found, options)
    except (OSError, ValueError, JournalError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if options.json:
        print(json.dumps(plain(_as_dict(found)), ensure_ascii=False, indent=1))
    else:
        print("\n".join(_lines(found)))
        if options.html is not None:
            print(f"page: {options.html}")
    return 1 if found.number_of_problems() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lightning_dp.report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("path", type=Path, help="a checkpoint, a report (.json), a journal, or a folder of these")
    add("--delta", type=float, help="for journals by themselves, which hold no delta")
    add(
        "--relation",
        choices=get_args(Relation),
        default="add_remove",
        help="for journals by themselves (default: %(default)s)",
    )
    add("--journal", type=Path, help="where the journal is now, if it was moved")
    add("--json", action="store_true", help="print JSON")
    page = parser.add_argument_group(
        "a page for people, in plain words, with an annex for engineers"
    )
    add = page.add_argument
    add("--html", type=Path, metavar="FILE", help="write it to this file")
    add("--for", dest="reader", choices=READERS, help="page one or the annex alone (default: both)")
    add("--data-set", metavar="NAME", help="name of the data set, to be printed on it")
    add("--record", metavar="WORDS", help="the meaning of one record")
    add("--controller", metavar="NAME", help="who is responsible for the data")
    add("--trained-by", metavar="NAME", help="who made the training")
    return parser


def _write_html(found: _Findings, options: argparse.Namespace) -> None:
    if not options.html.parent.is_dir():
        raise ValueError(f"--html {options.html}: there is no folder {options.html.parent}.")
    stated = About(**{each.name: getattr(options, each.name) for each in fields(About)})
    together = found.total or _beside(found.documents, options.delta)
    made = pages(found.documents, together, stated.to_dict(), found.problems)
    if not made:
        raise ValueError(
            f"{options.path} holds no report, so there is nothing to make a page of: a journal by "
            "itself does not record what was trained. Give a checkpoint, a report or their folder."
        )
    write_text(options.html, render(made, "html", options.reader))


def pages(
    documents: Sequence[CheckedDocument],
    together: Total | None,
    about: Mapping[str, str],
    problems: Sequence[str] = (),
    today: str | None = None,
) -> list[Page]:
    """Return a page for each ledger, of the document with the most charges.

    Args:
        documents, problems: checked.
        together: of all ledgers of the folder; None if there is one.
        about: the user's words about the data, which replace those of the reports.
        today: the day of the checks; by default the present one.
    """
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d") if today is None else today
    reports = [each for each in documents if each.document.report is not None]
    return [
        Page(
            each.report,
            about=about,
            problems=(*problems, *each.problems),
            day=day,
            has_journal=each.journal is not None,
            epsilon=each.journal_epsilon,
            charges=each.charges,
            together=together,
        )
        for each in reports
        if each is _latest(each, reports)
    ]


def _beside(documents: Sequence[CheckedDocument], delta: float | None) -> Total | None:
    """Return the total with the ledgers whose journals are in the same folder as a document's."""
    own = {each.journal.resolve() for each in documents if each.journal is not None}
    others = {path for each in own for path in each.parent.glob("*.journal")} - own
    relation = documents[0].document.relation if documents else "add_remove"
    return total(documents, [read_alone(path) for path in sorted(others)], delta, relation)


def _find(options: argparse.Namespace) -> _Findings:
    path: Path = options.path
    if not path.exists():
        raise ValueError(f"{path} does not exist.")
    if options.delta is not None:
        check_delta(options.delta)
    if file_of_checkpoint(path).is_dir():
        return _find_in_folder(path, options)
    if path.suffix == ".journal":
        return _Findings(
            journals=[check_journal(read_alone(path), options.delta, options.relation)]
        )
    document = read_document(path)
    journal = options.journal or find_journal(document.journal, path.parent)
    return _Findings([check(document, journal)])


def _find_in_folder(folder: Path, options: argparse.Namespace) -> _Findings:
    """Read documents first, then journals: a running training may write one in between."""
    problems, notes, documents = [], [], []
    for path in documents_in(folder):
        try:
            documents.append(read_document(path))
        except NotPrivateError as error:
            notes.append(str(error))
        except (OSError, ValueError) as error:
            problems.append(str(error))
    journals = sorted(folder.rglob("*.journal"))
    checked = [
        check(document, options.journal or find_journal(document.journal, folder))
        for document in documents
    ]
    of_documents = {each.journal.resolve() for each in checked if each.journal is not None}
    rest = [path for path in journals if path.resolve() not in of_documents]
    if not (checked or rest or problems or notes):
        raise ValueError(f"{folder} holds no checkpoint, report or journal.")
    alone, others = [], []
    for path in rest:
        try:
            written = read_alone(path)
        except JournalError as error:
            problems.append(str(error))
            continue
        if not written.runs:
            notes.append(f"{path}: no charges, as after a fit that was refused")
            continue
        others.append(written)
        if checked and options.delta is None:
            notes.append(f"{path}: no checkpoint or report here is of it, and ε needs --delta")
        else:
            alone.append(check_journal(written, options.delta, options.relation))
    notes += [search_text(path) for path in sorted(folder.rglob(STATE))]
    together = total(checked, others, options.delta, options.relation)
    return _Findings(checked, alone, problems, notes, together)


# -- printing ----------------------------------------------------------------------------------


def _lines(found: _Findings) -> Iterator[str]:
    for each in (*found.documents, *found.journals):
        yield from _lines_of(each, in_full=each is _latest(each, found.documents))
        yield ""
    if found.total is not None:
        yield str(found.total)
        yield ""
    yield from (f"note: {note}" for note in found.notes)
    yield from (f"PROBLEM: {problem}" for problem in found.problems)
    count = found.number_of_problems()
    yield f"{count} PROBLEM{'S' if count > 1 else ''} FOUND" if count else "all agrees"


def _latest(one: CheckedDocument, documents: Sequence[CheckedDocument]) -> CheckedDocument | None:
    """Return the document of the same ledger with the most charges."""
    same = [each for each in documents if each.document.ledger_id == one.document.ledger_id]
    charges = [each.document.events.total for each in same]
    return same[charges.index(max(charges))] if same else None


def _lines_of(checked: CheckedDocument, in_full: bool) -> Iterator[str]:
    document = checked.document
    yield f"== {document.kind} {document.path} of {document.ledger_id}"
    if document.report is not None and in_full:
        yield str(document.report)
        yield "-- checked"
    else:
        yield from (f"charged: {line}" for line in charged(document.events.history()))
    yield (
        f"its own events: ε = {epsilon_text(checked.epsilon)} at δ = {epsilon_text(document.delta, 6)} "
        f"({document.relation}), {document.events.steps} steps"
    )
    if checked.journal_epsilon is not None:
        yield (
            f"all runs in the journal {checked.journal}: ε = {epsilon_text(checked.journal_epsilon)} at "
            f"δ = {epsilon_text(document.delta, 6)}, {checked.journal_steps} steps; this is what counts"
        )
    if len(checked.runs) > 1:
        yield from (f"run {name}: ε = {epsilon_text(each)}" for name, each in checked.runs.items())
    yield from (f"note: {note}" for note in checked.notes)
    yield from (f"PROBLEM: {problem}" for problem in checked.problems)


def _as_dict(found: _Findings) -> dict[str, Any]:
    return {
        "agrees": not found.number_of_problems(),
        "problems": found.problems,
        "notes": found.notes,
        "total": None if found.total is None else asdict(found.total),
        "documents": [each.to_dict() for each in found.documents],
        "journals": [each.to_dict() for each in found.journals],
    }


if __name__ == "__main__":
    sys.exit(main())
