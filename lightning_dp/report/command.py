"""``python -m lightning_dp.report``: print a report, and check it against ledger and journal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_dp.accounting import PLDAccountant, Relation
from lightning_dp.accounting.base import check_delta
from lightning_dp.accounting.journal import JournalError, Runs, history_of, longer_run, read_journal
from lightning_dp.accounting.release_file import federations_in
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.checks import Checked, check
from lightning_dp.report.content import plain
from lightning_dp.report.files import (
    JournalAlone,
    NotPrivateError,
    documents_in,
    find_journal,
    read_alone,
    read_document,
)
from lightning_dp.report.render import charged

__all__ = ["Total", "main", "total"]


_DESCRIPTION = """\
Print the privacy report of a run and check that what was written about it agrees: epsilon is
computed anew from the charged events, and the journal must know every charge that a checkpoint or
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
    """What PATH holds: checked documents, and journals that no document speaks of."""

    checked: list[Checked]
    journals: list[JournalAlone]
    problems: list[str]
    notes: list[str]
    total: Total | None = None  # of a folder

    @property
    def is_sound(self) -> bool:
        return not self.number_of_problems()

    def number_of_problems(self) -> int:
        """Count the things that do not agree, or do not hold."""
        voided = sum(each.voided is not None for each in self.journals)
        return len(self.problems) + voided + sum(len(each.problems) for each in self.checked)


class _UsageError(ValueError):
    """PATH or the options cannot be used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        found = _find(options)
    except (OSError, ValueError, JournalError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if options.json:
        print(json.dumps(plain(_as_dict(found)), ensure_ascii=False, indent=1))
    else:
        print("\n".join(_lines(found, options)))
    return 0 if found.is_sound else 1


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
    """Documents first, then journals: a running training may write one in between."""
    path: Path = options.path
    if not path.exists():
        raise _UsageError(f"{path} does not exist.")
    if options.delta is not None:
        check_delta(options.delta)
    if path.is_dir():
        return _find_in_folder(path, options)
    if path.suffix == ".journal":
        return _Found([], [_alone(path, options)], [], [])
    document = read_document(path)
    journal = options.journal or find_journal(document.journal, path.parent)
    return _Found([check(document, journal)], [], [], [])


def _find_in_folder(folder: Path, options: argparse.Namespace) -> _Found:
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
    alone, sound = [], []
    for path in rest:
        try:
            if checked and options.delta is None:
                read_journal(path)
                notes.append(f"{path}: no checkpoint or report here is of it, and ε needs --delta")
            else:
                alone.append(_alone(path, options))
            sound.append(path)
        except JournalError as error:
            problems.append(str(error))
    together = total(checked, sound, options.delta, options.relation)
    return _Found(checked, alone, problems, notes, together)


def _alone(path: Path, options: argparse.Namespace) -> JournalAlone:
    if options.delta is None:
        raise _UsageError(
            f"{path} is a journal without its checkpoint or report, and a journal does not know δ: "
            "give --delta (and --relation, if it is not add_remove)."
        )
    return read_alone(path, options.delta, options.relation)


def _lines(found: _Found, options: argparse.Namespace) -> Iterator[str]:
    for each in found.checked:
        yield from _document(each, in_full=each is _latest(each, found.checked))
        yield ""
    for journal in found.journals:
        yield from _journal(journal, options)
        yield ""
    if found.total is not None:
        yield str(found.total)
        yield ""
    yield from (f"note: {note}" for note in found.notes)
    yield from (f"PROBLEM: {problem}" for problem in found.problems)
    count = found.number_of_problems()
    yield "all agrees" if found.is_sound else f"{count} PROBLEM{'S' if count > 1 else ''} FOUND"


def _latest(one: Checked, checked: Sequence[Checked]) -> Checked:
    """The document of the same ledger that knows most: its report is printed in full."""
    same = [each for each in checked if each.document.ledger_id == one.document.ledger_id]
    return max(same, key=lambda each: sum(count for _, count in each.document.history()))


def _document(checked: Checked, in_full: bool) -> Iterator[str]:
    document = checked.document
    yield f"== {document.kind} {document.path}"
    if document.report is not None and in_full:
        yield str(document.report)
        yield "-- checked"
    else:
        yield from (f"charged: {line}" for line in charged(document.history()))
    yield (
        f"its own events: ε = {epsilon_text(checked.epsilon)} at δ = {document.delta:g} "
        f"({document.relation})"
    )
    if checked.journal_epsilon is not None:
        yield (
            f"all runs in the journal {checked.journal}: ε = {epsilon_text(checked.journal_epsilon)} at "
            f"δ = {document.delta:g}, {checked.journal_steps} steps; this is what counts"
        )
    yield from (f"note: {note}" for note in checked.notes)
    yield from (f"PROBLEM: {problem}" for problem in checked.problems)


def _journal(journal: JournalAlone, options: argparse.Namespace) -> Iterator[str]:
    yield f"== journal {journal.path} of {journal.ledger_id}"
    yield (
        f"ε = {epsilon_text(journal.epsilon)} at δ = {options.delta:g} ({options.relation}), "
        f"{journal.steps} steps"
    )
    yield from (f"charged: {line}" for line in charged(journal.history()))
    if journal.voided is not None:
        yield f"PROBLEM: a run was VOIDED, and ε of all releases is withdrawn: {journal.voided}"
    if len(journal.parts) > 1:
        yield from (
            f"run {name}: ε = {epsilon_text(value)}" for name, value in journal.parts.items()
        )


def _as_dict(found: _Found) -> dict[str, Any]:
    return {
        "agrees": found.is_sound,
        "problems": found.problems,
        "notes": found.notes,
        "total": None if found.total is None else asdict(found.total),
        "documents": [
            {
                "path": str(each.document.path),
                "kind": each.document.kind,
                "ledger_id": each.document.ledger_id,
                "epsilon": each.epsilon,
                "delta": each.document.delta,
                "relation": each.document.relation,
                "journal": None if each.journal is None else str(each.journal),
                "journal_steps": each.journal_steps,
                "journal_epsilon": each.journal_epsilon,
                "problems": each.problems,
                "notes": each.notes,
                "report": None if each.document.report is None else each.document.report.to_dict(),
            }
            for each in found.checked
        ],
        "journals": [
            {
                "path": str(each.path),
                "ledger_id": each.ledger_id,
                "steps": each.steps,
                "epsilon": each.epsilon,
                "runs": each.parts,
            }
            for each in found.journals
        ],
    }


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
    checked: Sequence[Checked], journals: Sequence[Path], delta: float | None, relation: Relation
) -> Total | None:
    r"""Compose what all ledgers were charged; each run counts once.

    A ledger whose noise was chosen at run time has the ε_i of its whole budget at δ_i. It is
    added to the others' by basic composition: :math:`\epsilon + \sum_i \epsilon_i` at
    :math:`\delta + \sum_i \delta_i`.

    Journals of federated clients are left out: each is about another client's records.

    Args:
        checked: the documents, with what their journals know.
        journals: those that no document speaks of, all of them sound.
        delta: δ; by default the documents' smallest one.
        relation: for journals by themselves.

    Returns:
        None if there are fewer than two ledgers, or no δ is known.
    """
    known: dict[str, Runs] = {}
    budgets: dict[str, tuple[float, float]] = {}
    for each in checked:
        _add(known, each.document.ledger_id, each.known)
        report = each.document.report
        if report is not None and report.claims_budget:
            budgets[report.ledger_id] = (each.epsilon, report.delta)
    for path in journals:
        ledger_id, runs = read_journal(path)
        if not federations_in(runs):
            _add(known, ledger_id, runs)
    deltas = [each.document.delta for each in checked] if delta is None else [delta]
    if len(known) < 2 or not deltas:
        return None
    relations = {relation, *(each.document.relation for each in checked)}
    under: Relation = "replace_one" if "replace_one" in relations else "add_remove"
    fixed = [run for name in known if name not in budgets for run in known[name].items()]
    history = history_of(dict(fixed))
    return Total(
        ledgers=len(known),
        steps=sum(n for runs in known.values() for charges in runs.values() for _, n in charges),
        epsilon=PLDAccountant().epsilon(history, min(deltas), under)
        + sum(epsilon for epsilon, _ in budgets.values()),
        delta=min(deltas) + sum(its_own for _, its_own in budgets.values()),
        relation=under,
    )


def _add(known: dict[str, Runs], ledger_id: str, runs: Runs) -> None:
    """Add what one more document or journal knows of a ledger."""
    mine = known.setdefault(ledger_id, {})
    for run, charges in runs.items():
        mine[run] = longer_run(run, mine.get(run, []), charges)
