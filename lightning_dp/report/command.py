"""``python -m lightning_dp.report``: print a report, and check it against ledger and journal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_dp.accounting import PLDAccountant
from lightning_dp.accounting.base import Relation, check_delta
from lightning_dp.accounting.charges import Charges, JournalError
from lightning_dp.accounting.release_file import federations_in
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.checks import Checked, check, check_journal_alone
from lightning_dp.report.content import plain
from lightning_dp.report.files import (
    Document,
    NotPrivateError,
    documents_in,
    find_journal,
    read_charges,
    read_document,
)
from lightning_dp.report.render import charged

__all__ = ["Total", "main", "total"]

_DESCRIPTION = """\
Print the privacy report of a run and check that what was written about it agrees: epsilon is
computed again from the charged events, and the journal must know every charge that a checkpoint or
a report knows. Nothing is written, and a running training is not disturbed."""

_EPILOG = """\
exit status: 0 if all agrees, 1 if something does not (each fault is named), 2 if PATH or the
options cannot be used.

examples:
  python -m lightning_dp.report lightning_logs/version_0
  python -m lightning_dp.report last.ckpt --json
  python -m lightning_dp.report privacy/3f0c.journal --delta 1e-5
  python -m lightning_dp.report ledgers --delta 1e-5      (federated clients)"""


@dataclass(frozen=True)
class _Found:
    """All that PATH holds, checked.

    Args:
        documents: checkpoints and reports.
        journals: those that no document speaks of.
        problems, notes: about files that could not be checked.
        total: of the ledgers of a folder.
    """

    documents: Sequence[Checked] = ()
    journals: Sequence[Checked] = ()
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()
    total: Total | None = None

    def number_of_problems(self) -> int:
        """Count the things that do not agree, or do not hold."""
        each_of = (*self.documents, *self.journals)
        return len(self.problems) + sum(len(each.problems) for each in each_of)


class _UsageError(ValueError):
    """PATH or the options cannot be used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        found = _find(options)
    except (OSError, ValueError, JournalError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if options.json:
        print(json.dumps(plain(_as_dict(found)), ensure_ascii=False, indent=1))
    else:
        print("\n".join(_lines(found)))
    return 1 if found.number_of_problems() else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lightning_dp.report",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path", type=Path, help="a checkpoint, a report (.json), a journal, or a folder of these"
    )
    parser.add_argument(
        "--delta", type=float, help="for journals by themselves: they know no delta"
    )
    parser.add_argument(
        "--relation",
        choices=("add_remove", "replace_one"),
        default="add_remove",
        help="for journals by themselves (default: %(default)s)",
    )
    parser.add_argument("--journal", type=Path, help="where the journal is now, if it was moved")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _find(options: argparse.Namespace) -> _Found:
    path: Path = options.path
    if not path.exists():
        raise _UsageError(f"{path} does not exist.")
    if options.delta is not None:
        check_delta(options.delta)
    if path.is_dir():
        return _find_in_folder(path, options)
    if path.suffix == ".journal":
        return _Found(journals=[_check_alone(path, *read_charges(path), options)])
    document = read_document(path)
    journal = options.journal or find_journal(document.journal, path.parent)
    return _Found([check(document, journal)])


def _find_in_folder(folder: Path, options: argparse.Namespace) -> _Found:
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
    spoken_of = {each.journal.resolve() for each in checked if each.journal is not None}
    rest = [path for path in journals if path.resolve() not in spoken_of]
    if not (checked or rest or problems or notes):
        raise _UsageError(f"{folder} holds no checkpoint, report or journal.")
    alone, others = [], []
    for path in rest:
        try:
            ledger_id, events = read_charges(path)
        except JournalError as error:
            problems.append(str(error))
            continue
        others.append((ledger_id, events))
        if checked and options.delta is None:
            notes.append(f"{path}: no checkpoint or report here is of it, and ε needs --delta")
        else:
            alone.append(_check_alone(path, ledger_id, events, options))
    together = total(checked, others, options.delta, options.relation)
    return _Found(checked, alone, problems, notes, together)


def _check_alone(
    path: Path, ledger_id: str, events: Charges, options: argparse.Namespace
) -> Checked:
    if options.delta is None:
        raise _UsageError(
            f"{path} is a journal without its checkpoint or report, and a journal does not know δ: "
            "give --delta (and --relation, if it is not add_remove)."
        )
    return check_journal_alone(
        Document(
            path=path,
            kind="journal",
            ledger_id=ledger_id,
            journal=path,
            events=events,
            delta=options.delta,
            relation=options.relation,
        )
    )


# -- printing ----------------------------------------------------------------------------------


def _lines(found: _Found) -> Iterator[str]:
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


def _latest(one: Checked, documents: Sequence[Checked]) -> Checked | None:
    """Return the document of the same ledger that knows most: its report is printed in full."""
    same = [each for each in documents if each.document.ledger_id == one.document.ledger_id]
    charges = [each.document.events.total for each in same]
    return same[charges.index(max(charges))] if same else None


def _lines_of(checked: Checked, in_full: bool) -> Iterator[str]:
    document = checked.document
    yield f"== {document.kind} {document.path} of {document.ledger_id}"
    if document.report is not None and in_full:
        yield str(document.report)
        yield "-- checked"
    else:
        yield from (f"charged: {line}" for line in charged(document.events.history()))
    yield (
        f"its own events: ε = {epsilon_text(checked.epsilon)} at δ = {document.delta:g} "
        f"({document.relation}), {checked.steps} steps"
    )
    if checked.journal_epsilon is not None:
        yield (
            f"all runs in the journal {checked.journal}: ε = {epsilon_text(checked.journal_epsilon)} at "
            f"δ = {document.delta:g}, {checked.journal_steps} steps; this is what counts"
        )
    if len(checked.parts) > 1:
        yield from (f"run {name}: ε = {epsilon_text(each)}" for name, each in checked.parts.items())
    yield from (f"note: {note}" for note in checked.notes)
    yield from (f"PROBLEM: {problem}" for problem in checked.problems)


def _as_dict(found: _Found) -> dict[str, Any]:
    return {
        "agrees": not found.number_of_problems(),
        "problems": found.problems,
        "notes": found.notes,
        "total": None if found.total is None else asdict(found.total),
        "documents": [each.to_dict() for each in found.documents],
        "journals": [each.to_dict() for each in found.journals],
    }


# -- the sum over ledgers ----------------------------------------------------------------------


@dataclass(frozen=True)
class Total:
    """ε of several ledgers together, if they are about the same records.

    Args:
        ledgers: how many there are.
        steps: charges, over all of them.
        epsilon: of the union of their events at ``delta``.
        delta: the least δ that a report in the folder states, unless one is given.
        relation: replace-one, if a report in the folder is under it.
    """

    ledgers: int
    steps: int
    epsilon: float
    delta: float
    relation: Relation

    def __str__(self) -> str:
        return (
            f"== total of {self.ledgers} ledgers, if they are about the same records: "
            f"ε = {epsilon_text(self.epsilon)} at δ = {self.delta:g} ({self.relation}), "
            f"{self.steps} steps"
        )


def total(
    checked: Sequence[Checked],
    journals: Sequence[tuple[str, Charges]],
    delta: float | None,
    relation: Relation,
) -> Total | None:
    r"""Compose what all ledgers were charged; each run counts once.

    A ledger whose noise was chosen at run time has the ε_i of its whole budget at δ_i. It is
    added to the others' by basic composition: :math:`\epsilon + \sum_i \epsilon_i` at
    :math:`\delta + \sum_i \delta_i`.

    Journals of federated clients are left out: each is about another client's records.

    Args:
        checked: the documents, with what their journals know.
        journals: ledger id and charges of those that no document speaks of.
        delta: δ; by default the documents' smallest one.
        relation: for journals by themselves.

    Returns:
        None if there are fewer than two ledgers, or no δ is known.
    """
    known: dict[str, Charges] = {}
    budgets: dict[str, tuple[float, float]] = {}
    for each in checked:
        known.setdefault(each.document.ledger_id, Charges()).merge(each.known)
        report = each.document.report
        if report is not None and report.claims_budget:
            budgets[report.ledger_id] = (each.epsilon, report.delta)
    for ledger_id, runs in journals:
        if not federations_in(runs):
            known.setdefault(ledger_id, Charges()).merge(runs)
    deltas = [each.document.delta for each in checked] if delta is None else [delta]
    if len(known) < 2 or not deltas:
        return None
    relations = {relation, *(each.document.relation for each in checked)}
    under: Relation = "replace_one" if "replace_one" in relations else "add_remove"
    fixed = [run for name in known if name not in budgets for run in known[name].items()]
    history = Charges(dict(fixed)).history()
    return Total(
        ledgers=len(known),
        steps=sum(runs.total for runs in known.values()),
        epsilon=PLDAccountant().epsilon(history, min(deltas), under)
        + sum(epsilon for epsilon, _ in budgets.values()),
        delta=min(deltas) + sum(its_own for _, its_own in budgets.values()),
        relation=under,
    )
