"""Checks that a document, its own events and its journal agree."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_dp.accounting.base import AbstractAccountant
from lightning_dp.accounting.charges import Charges, JournalError
from lightning_dp.accounting.journal import read_journal
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.accounting.release_file import federations_in
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.content import PrivacyReport
from lightning_dp.report.files import Document

__all__ = ["Checked", "check", "check_journal_alone"]

_TOLERANCE = 5e-4  # relative; twice the accuracy of ε


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A document with the result of its checks.

    Args:
        document: was checked.
        epsilon: ε of its events, computed again.
        known: the charges that the document or its journal knows, by run.
        journal: the file that was compared with it; None if there is none.
        journal_steps, journal_epsilon: of all runs in the journal; None without one.
        parts: of a journal by itself, ε of each run, or of each federation over a client's data.
        problems: what does not agree, in words.
        notes: what should be known, and is no fault.
    """

    document: Document
    epsilon: float
    known: Charges
    journal: Path | None = None
    journal_steps: int | None = None
    journal_epsilon: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Noised steps among the document's events."""
        return self.document.events.steps

    def to_dict(self) -> dict[str, Any]:
        """Return all that was found."""
        document = self.document
        return {
            "path": str(document.path),
            "kind": document.kind,
            "ledger_id": document.ledger_id,
            "epsilon": self.epsilon,
            "delta": document.delta,
            "relation": document.relation,
            "steps": self.steps,
            "runs": self.parts,
            "journal": None if self.journal is None else str(self.journal),
            "journal_steps": self.journal_steps,
            "journal_epsilon": self.journal_epsilon,
            "problems": self.problems,
            "notes": self.notes,
            "report": None if document.report is None else document.report.to_dict(),
        }


def check(document: Document, journal: Path | None) -> Checked:
    """Check a document by itself, and against its journal.

    Args:
        document: a checkpoint or a report.
        journal: where its journal is now.
    """
    accountant, is_the_same = _accountant(document.report)
    epsilon = _claim(document, document.events, accountant)
    problems = list(_against_its_events(document, epsilon, is_the_same))
    notes = list(_notes(document.report, is_the_same))
    steps = journal_epsilon = None
    known, voided = Charges(document.events), document.events.voided
    try:
        if journal is not None:
            found, written = read_journal(journal)
            problems += _against_journal(document, journal, found, written)
            if found == document.ledger_id:
                steps, journal_epsilon = written.steps, _claim(document, written, accountant)
                _add_longer(known, written)
                voided = voided or written.voided
        elif document.events:
            problems.append("it has charges, and names no journal")
    except JournalError as error:
        problems.append(
            f"{error.text} What ran after this {document.kind} was written is unknown. "
            "If the journal was moved, say where it is: --journal."
        )
    if voided is not None:
        problems.append(f"its run was VOIDED, and ε of all its releases is withdrawn: {voided}")
    if (beyond := (steps or 0) - document.events.steps) > 0:
        notes.append(f"the journal has {beyond} steps beyond this {document.kind}")
    return Checked(
        document=document,
        epsilon=epsilon,
        known=known,
        journal=journal,
        journal_steps=steps,
        journal_epsilon=journal_epsilon,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def check_journal_alone(document: Document) -> Checked:
    """Compute ε of a journal, and of each run or federation in it."""
    events = document.events

    def epsilon(runs: Charges) -> float:
        history = runs.history()
        return PLDAccountant().epsilon(history, document.delta, document.relation)

    by_name = federations_in(events) or {
        run: Charges({run: charges}) for run, charges in events.items()
    }
    voided = events.voided
    return Checked(
        document=document,
        epsilon=epsilon(events),
        known=events,
        parts={name: epsilon(runs) for name, runs in by_name.items()},
        problems=()
        if voided is None
        else (f"a run was VOIDED, and ε of all releases is withdrawn: {voided}",),
    )


def _add_longer(known: Charges, written: Charges) -> None:
    """Add the longer record of each run, of those in which the two do not contradict."""
    for run, charges in written.items():
        with contextlib.suppress(JournalError):  # a contradiction is among the problems
            known.merge({run: charges})


def _notes(report: PrivacyReport | None, is_the_same: bool) -> Iterator[str]:
    if report is None:
        yield "it holds no report: it was saved by an older version"
    elif not is_the_same:
        yield f"its accountant {report.accountant!r} is not known here: compared with PLD"


def _against_its_events(document: Document, epsilon: float, is_the_same: bool) -> Iterator[str]:
    """Compare what a document says with its own events.

    Args:
        document: a checkpoint or a report.
        epsilon: ε of its events.
        is_the_same: True if ``epsilon`` is by the accountant that the document names.
    """
    charged, report = document.events.steps, document.report
    if charged < document.steps_made:
        yield f"its weights went through {document.steps_made} private steps, {charged} are charged"
    if report is None:
        return
    if report.steps != charged:
        yield f"it says {report.steps} steps, its events are {charged}"
    # PLD is tight: an unknown accountant may find more than it, but less would be a fault.
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


def _against_journal(document: Document, path: Path, found: str, written: Charges) -> Iterator[str]:
    """Compare what a document knows with its journal, which must know as much."""
    if found != document.ledger_id:
        yield f"the journal {path} belongs to ledger {found}, not to {document.ledger_id}"
        return
    for run in document.events:
        try:
            is_cut = document.events.knows_more(run, written)
        except JournalError as error:
            yield f"{error.text} (journal {path})"
            continue
        if is_cut:
            here, there = document.events.length(run), written.length(run)
            yield (
                f"run {run} has {here} charges here and {there} in the journal {path}: charges were "
                "removed from it, or it is an older copy"
            )


def _claim(document: Document, events: Charges, accountant: AbstractAccountant) -> float:
    """Return ε of events as the document has to state it."""
    epsilon = accountant.epsilon(events.history(), document.delta, document.relation)
    report = document.report
    if report is not None and report.claims_budget and events.steps:
        # Noise chosen at run time: the events that came out do not bound what could have.
        budget = math.inf if report.target_epsilon is None else report.target_epsilon
        return max(epsilon, budget)
    return epsilon


def _accountant(report: PrivacyReport | None) -> tuple[AbstractAccountant, bool]:
    """Return an accountant to check with, and whether it is the one that the report names."""
    known = None if report is None else report.known_accountant()
    return (PLDAccountant(), False) if known is None else (known, True)
