"""Whether a document, and what its journal knows, agree."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_dp.accounting import AbstractAccountant, History, PLDAccountant
from lightning_dp.accounting.events import reason_in, steps_in
from lightning_dp.accounting.journal import (
    JournalError,
    Runs,
    history_of,
    longer_run,
    read_journal,
)
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.content import PrivacyReport
from lightning_dp.report.files import Document

__all__ = ["Checked", "check", "check_document", "check_journal"]

_TOLERANCE = 5e-4  # relative; twice the accuracy of ε


@dataclass(frozen=True)
class Checked:
    """What came of the checks of one document.

    Args:
        document: what was checked.
        journal: the file that was compared with it; None if it has none.
        epsilon: ε of its events, computed anew.
        journal_steps, journal_epsilon: of all runs in the journal; None without one.
        known: the charges that the document or its journal knows, by run.
        problems: what does not agree, in words.
        notes: what should be known, and is no fault.
    """

    document: Document
    journal: Path | None
    epsilon: float
    journal_steps: int | None
    journal_epsilon: float | None
    known: Runs
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check(document: Document, journal: Path | None) -> Checked:
    """Check a document by itself, and against its journal.

    Args:
        document: a checkpoint or a report.
        journal: where its journal is now.
    """
    accountant, is_the_same = _accountant(document.report)
    epsilon = claim(document, document.events, accountant)
    problems = list(check_document(document, epsilon, is_the_same))
    notes = list(_notes(document.report, is_the_same))
    steps = beyond = journal_epsilon = None
    known = dict(document.events)
    voided = reason_in(document.events)
    try:
        if journal is not None:
            found, written = read_journal(journal)
            problems += check_journal(document, journal, found, written)
            if found == document.ledger_id:
                steps, journal_epsilon = steps_in(written), claim(document, written, accountant)
                beyond = steps - steps_in(document.events)
                known = {**known, **_longer(known, written)}
                voided = voided or reason_in(written)
        elif document.events:
            problems.append("it has charges, and names no journal")
    except JournalError as error:
        problems.append(
            f"{error} What ran after this {document.kind} was written is unknown. "
            "If the journal was moved, say where it is: --journal."
        )
    if voided is not None:
        problems.append(f"its run was VOIDED, and ε of all its releases is withdrawn: {voided}")
    if beyond and beyond > 0:
        notes.append(f"the journal has {beyond} steps beyond this {document.kind}")
    return Checked(
        document, journal, epsilon, steps, journal_epsilon, known, tuple(problems), tuple(notes)
    )


def _longer(known: Runs, written: Runs) -> Runs:
    """Return the longer record of each run, of those in which the two do not contradict."""
    found = {}
    for run, charges in written.items():
        with contextlib.suppress(JournalError):  # a contradiction is among the problems
            found[run] = longer_run(run, known.get(run, []), charges)
    return found


def _notes(report: PrivacyReport | None, is_the_same: bool) -> Iterator[str]:
    if report is None:
        yield "it holds no report: it was saved by an older version"
    elif not is_the_same:
        yield f"its accountant {report.accountant!r} is not known here: compared with PLD"


def check_document(document: Document, epsilon: float, is_the_same: bool) -> Iterator[str]:
    """What a document says, against its own events.

    Args:
        document: a checkpoint or a report.
        epsilon: ε of its events.
        is_the_same: whether ``epsilon`` is by the accountant that the document names.
    """
    charged, report = steps_in(document.events), document.report
    if charged < document.steps_made:
        yield f"its weights went through {document.steps_made} private steps, {charged} are charged"
    if report is None:
        return
    if report.steps != charged:
        yield f"it says {report.steps} steps, its events are {charged}"
    written = report.epsilon
    too_low = written < epsilon * (1 - _TOLERANCE)
    if too_low or (is_the_same and written > epsilon * (1 + _TOLERANCE)):
        yield f"it says ε = {epsilon_text(written, 6)}, its events give ε = {epsilon_text(epsilon, 6)}"
    of_plan = report.epsilon_of_plan
    if of_plan is not None and of_plan < epsilon * (1 - _TOLERANCE):
        yield (
            f"it says ε = {epsilon_text(of_plan, 6)} for the whole plan, its events give "
            f"{epsilon_text(epsilon, 6)} already"
        )
    if report.private != (math.isfinite(epsilon) and not document.seeded):
        yield (
            f"it says private: {report.private}, with ε = {epsilon_text(epsilon, 6)}, seed: "
            f"{document.seeded}"
        )
    pairs = (
        ("ledger id", report.ledger_id, document.ledger_id),
        ("δ", report.delta, document.delta),
        ("relation", report.relation, document.relation),
        ("seed", report.seeded, document.seeded),
    )
    for name, says, holds in pairs:
        if says != holds:
            yield f"its report says {name} {says}, its ledger and configuration {holds}"


def check_journal(document: Document, path: Path, found: str, written: Runs) -> Iterator[str]:
    """What a document knows and its journal does not."""
    if found != document.ledger_id:
        yield f"the journal {path} belongs to ledger {found}, not to {document.ledger_id}"
        return
    for run, charges in document.events.items():
        known = written.get(run, [])
        try:
            longer = longer_run(run, known, charges)
        except JournalError as error:
            yield f"{error} (journal {path})"
            continue
        if longer != known:
            here, there = (sum(count for _, count in each) for each in (charges, known))
            yield (
                f"run {run} has {here} charges here and {there} in the journal {path}: charges were "
                "removed from it, or it is an older copy"
            )


def claim(document: Document, events: Runs, accountant: AbstractAccountant) -> float:
    """ε of events as the document would have to state it."""
    history: History = history_of(events)
    epsilon = accountant.epsilon(history, document.delta, document.relation)
    report = document.report
    if report is not None and report.claims_budget and steps_in(events):
        budget = math.inf if report.target_epsilon is None else report.target_epsilon
        return max(epsilon, budget)
    return epsilon


def _accountant(report: PrivacyReport | None) -> tuple[AbstractAccountant, bool]:
    """An accountant to check with, and whether it is the one that the report names."""
    known = None if report is None else report.known_accountant()
    return (PLDAccountant(), False) if known is None else (known, True)
