"""Documents about a ledger: written, read without trust, compared with each other, and added up."""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lightning_dp._files import FILE_MODE, replaced
from lightning_dp._refusals import RefusedSetting, text_of
from lightning_dp.accounting.base import (
    AbstractAccountant,
    Relation,
    check_delta,
    check_relation,
    epsilon_text,
)
from lightning_dp.accounting.events import ApproximateDP
from lightning_dp.accounting.journal import (
    Charges,
    JournalContent,
    JournalError,
    federations_in,
    is_journal_name,
    is_ledger_id,
    read_written,
)
from lightning_dp.accounting.ledger import privacy_record, read_state
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.report.content import Page, PrivacyReport, Total, render
from lightning_dp.sampling.units import is_by_user

CHECKPOINT_KEY = "lightning_dp"
"""The key of the privacy record in a checkpoint."""

PATTERN = "privacy_report-*.json"
"""Names of report files."""


def write_report(report: PrivacyReport, folder: str | Path, *, is_over: bool = True) -> Path:
    """Write ``privacy_report-<ledger id>.json`` and ``.md`` into a folder, each replaced whole.

    Runs of one ledger replace each other's files: a later report holds all of an earlier one. New
    files are readable by their owner alone. Where the disk refuses them, they are what they were before.

    Args:
        report: of a run.
        folder: made if it does not exist.
        is_over: False while the training goes on: the Markdown has no page one then.

    Returns:
        the path of the JSON file.
    """
    if not is_ledger_id(report.ledger_id):
        raise ValueError(f"ledger_id={report.ledger_id!r} is not one of 16 hexadecimal digits.")
    path = Path(folder) / PATTERN.replace("*", report.ledger_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = replace(report, journal=_relative_path(report.journal, path.parent))
    content = json.dumps(written.to_dict(), ensure_ascii=False, allow_nan=False, indent=1)
    write_text(path.with_suffix(".md"), render([Page(report, is_over=is_over)], "md"))
    write_text(path, content + "\n")
    return path


def read_report(path: str | Path) -> PrivacyReport:
    """Read the report of a JSON file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a dictionary")
        report = PrivacyReport.from_dict(content)
        return replace(report, journal=_absolute_path(report.journal, Path(path).parent))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RefusedSetting(
            f"{path} is not a privacy report: {text_of(error)}", topic="unreadable-checkpoint"
        ) from None


def _relative_path(journal: str | None, folder: Path) -> str | None:
    """Return a path from a folder, or from ``~``: a report is shown to people, without user names."""
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


def _absolute_path(journal: str | None, folder: Path) -> str | None:
    """Return the absolute path, inverting :func:`_relative_path` for this folder."""
    if journal is None or not is_journal_name(Path(journal).name) or "\0" in journal:
        return journal
    return os.path.normpath(os.path.abspath(folder) / Path(os.path.expanduser(journal)))


def write_text(path: Path, content: str) -> None:
    """Write a file, replaced whole if it exists; a new one is readable by its owner alone."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else FILE_MODE
    with replaced(path, mode) as file:
        file.write(content.encode())


class NotPrivateError(ValueError):
    """A checkpoint without a ledger: of a run without privacy."""


@dataclass(frozen=True)
class Document:
    """The privacy content of a checkpoint, a report file or a journal.

    A journal records neither ``delta`` nor ``relation``: they are the reader's.
    """

    path: Path
    kind: Literal["checkpoint", "report", "journal"]
    ledger_id: str  # in a federated client's journal, the id of its data set
    journal: Path | None  # as it was recorded
    events: Charges
    delta: float
    relation: Relation
    seeded: bool = False  # a test seed was set at any time
    report: PrivacyReport | None = None  # not in journals, and checkpoints of versions without
    steps_made: int = 0  # a lower bound on the charged steps in a checkpoint's weights


def in_checkpoint(report: PrivacyReport) -> dict[str, Any]:
    """Return a report for a checkpoint: without the events, which its ledger has."""
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
        if record := privacy_record(path):
            return _checkpoint(path, record)
    except (KeyError, TypeError, AttributeError) as error:
        raise RefusedSetting(
            f"{path} has a damaged privacy record: {error!r}.", topic="unreadable-checkpoint"
        ) from None
    raise NotPrivateError(f"{path} is not a checkpoint of a private run: it holds no ledger.")


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


def _journal(document: Path, recorded: str | None) -> Path | None:
    """Return the recorded path of a document's journal, if that can be the name of one."""
    if recorded is None:
        return None
    if "\0" not in recorded and is_journal_name(Path(recorded).name):
        return Path(recorded)
    raise RefusedSetting(
        f"{document} names a file that is not a journal: {reprlib.repr(recorded)}.",
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


# -- checks and sums ----------------------------------------------------------------------------

_TOLERANCE = 5e-4  # relative; twice the accuracy of ε


@dataclass(frozen=True, kw_only=True)
class CheckedDocument:
    """A document with the result of its checks."""

    document: Document
    epsilon: float  # of its events, computed again
    charges: Charges  # of the document or its journal
    journal: Path | None = None  # that was compared with it
    journal_steps: int | None = None  # of all runs in the journal
    journal_epsilon: float | None = None
    budget: ApproximateDP | None = None  # the journal's, if noise was chosen at run time
    runs: dict[str, float] = field(
        default_factory=dict
    )  # ε of each run, or federation, in a journal
    problems: tuple[str, ...] = ()  # contradictions
    notes: tuple[str, ...] = ()

    @property
    def report(self) -> PrivacyReport:
        """The document's report, without a promise if the journal withdraws it."""
        report = self.document.report
        assert report is not None
        if self.charges.voided is None:
            return report
        return replace(report, private=False, events=self.charges)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it, for JSON."""
        document, values = self.document, vars(self)
        of_document = ("path", "kind", "ledger_id", "delta", "relation")
        return {
            **{name: getattr(document, name) for name in of_document},
            **{
                name: value for name, value in values.items() if name not in ("document", "charges")
            },
            "steps": document.events.steps,
            "report": None if document.report is None else document.report.to_dict(),
        }


def check(document: Document, journal: Path | None) -> CheckedDocument:
    """Check a checkpoint or a report by itself, and against its journal, where that is now."""
    report, events, kind = document.report, document.events, document.kind
    named = None if report is None else report.find_accountant()
    accountant = PLDAccountant() if named is None else named
    epsilon = _claim(document, events, accountant)
    problems = [*_against_its_events(document, epsilon, has_its_accountant=named is not None)]
    notes = []
    if report is None:
        notes.append("it holds no report: it was saved by an older version")
    elif named is None:
        notes.append(
            f"its accountant {report.accountant!r} is not of this version: compared with PLD"
        )
    written, charges = Charges(), Charges(events)
    steps = journal_epsilon = budget = None
    try:
        if journal is not None:
            content = read_written(journal)
            found, written = content.ledger_id, content.runs
            problems += _against_journal(document, journal, found, written)
            if found == document.ledger_id:
                steps, budget = written.steps, content.budget
                journal_epsilon = _claim(document, written, accountant)
                journal_epsilon = _of_budget(journal_epsilon, budget, document)
                for run, each in written.items():
                    with contextlib.suppress(JournalError):  # a contradiction is among the problems
                        charges.merge({run: each})
            else:
                written = Charges()
        elif events:
            problems.append("it has charges, and names no journal")
    except JournalError as error:
        problems.append(
            f"{error.text} What ran after this {kind} was written is unknown. "
            "If the journal was moved, give its path: --journal."
        )
    if (voided := events.voided or written.voided) is not None:
        problems.append(f"its run was VOIDED, and ε of all its releases is withdrawn: {voided}")
    if (beyond := (steps or 0) - events.steps) > 0:
        notes.append(f"the journal has {beyond} steps beyond this {kind}")
    return CheckedDocument(
        document=document,
        epsilon=epsilon,
        charges=charges,
        journal=journal,
        journal_steps=steps,
        journal_epsilon=journal_epsilon,
        budget=budget,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def check_journal(
    written: JournalContent, delta: float | None, relation: Relation
) -> CheckedDocument:
    """Compute ε of a journal by itself, and of each run or federation in it.

    One whose noise was chosen at run time has that of its budget, at its δ or a larger one.
    """
    path, events, budget = written.path, written.runs, written.budget
    if delta is None:
        raise ValueError(
            f"{path} is a journal without its checkpoint or report, and a journal does not record δ: "
            "give --delta (and --relation, if it is not add_remove)."
        )
    by_name = federations_in(events) or {run: Charges({run: each}) for run, each in events.items()}
    epsilons = {
        name: PLDAccountant().epsilon(each.history(), delta, relation)
        for name, each in {**by_name, "": events}.items()
    }
    voided = f"a run was VOIDED, and ε of all releases is withdrawn: {events.voided}"
    document = Document(path, "journal", written.ledger_id, path, events, delta, relation)
    return CheckedDocument(
        document=document,
        epsilon=_of_budget(epsilons.pop(""), budget, document),
        charges=events,
        budget=budget,
        runs={} if budget is not None else epsilons,
        problems=() if events.voided is None else (voided,),
    )


def _against_its_events(
    document: Document, epsilon: float, has_its_accountant: bool
) -> Iterator[str]:
    """Compare the statements of a document with its own events, whose ε is given."""
    charged, report = document.events.steps, document.report
    if charged < document.steps_made:
        yield f"its weights went through {document.steps_made} private steps, {charged} are charged"
    if report is None:
        return
    if report.steps != charged:
        yield f"it says {report.steps} steps, its events are {charged}"
    # PLD is tight: an unknown accountant may find more than it, but less would be a fault.
    written, exact = report.epsilon, epsilon_text(epsilon, 6)
    too_low = written < epsilon * (1 - _TOLERANCE)
    if too_low or (has_its_accountant and written > epsilon * (1 + _TOLERANCE)):
        yield f"it says ε = {epsilon_text(written, 6)}, its events give ε = {exact}"
    of_plan = report.epsilon_of_plan
    if of_plan is not None and of_plan < epsilon * (1 - _TOLERANCE):
        plan = epsilon_text(of_plan, 6)
        yield f"it says ε = {plan} for the whole plan, its events give {exact} already"
    if report.private != (math.isfinite(epsilon) and not document.seeded):
        yield f"it says private: {report.private}, with ε = {exact}, seed: {document.seeded}"
    for name in ("ledger_id", "delta", "relation", "seeded"):
        says, holds = getattr(report, name), getattr(document, name)
        if says != holds:
            yield f"its report says {name}={says}, its ledger and configuration {holds}"


def _against_journal(document: Document, path: Path, found: str, written: Charges) -> Iterator[str]:
    """Compare a document with its journal, which must hold all its charges."""
    if found != document.ledger_id:
        yield f"the journal {path} belongs to ledger {found}, not to {document.ledger_id}"
        return
    for run in document.events:
        try:
            is_cut = document.events.is_ahead_of(run, written)
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


def _of_budget(epsilon: float, budget: ApproximateDP | None, document: Document) -> float:
    """Return ε of charges, or that of the budget of which they were taken, at the document's δ."""
    if budget is None:
        return epsilon
    claim, its_own, _ = budget.costs(document.relation)
    return max(epsilon, claim if document.delta >= its_own else math.inf)


def total(
    checked: Sequence[CheckedDocument],
    journals: Sequence[JournalContent],
    delta: float | None,
    relation: Relation,
) -> Total | None:
    r"""Compose what all ledgers were charged; each run counts once.

    A ledger whose noise was chosen at run time has the ε_i of its whole budget at δ_i, under the
    relation of the sum. It is added to the others' by basic composition:
    :math:`\epsilon + \sum_i \epsilon_i` at :math:`\delta + \sum_i \delta_i`.

    Journals of federated clients are left out: each is about another client's records. Ledgers that
    protect users promise nothing next to ledgers of records: a record more or less of a user is no user
    more or less.

    Args:
        checked: the documents, with the charges of their journals.
        journals: those without a document.
        delta: δ; by default the documents' smallest one.
        relation: for journals by themselves.

    Returns:
        None if there are fewer than two ledgers, or no δ is known.
    """
    relations = {relation, *(each.document.relation for each in checked)}
    stated: tuple[Relation, ...] = ("replace_one", "zero_out", "add_remove")
    under = next(each for each in stated if each in relations)  # which says something of all
    ledgers: dict[str, Charges] = {}
    budgets: dict[str, tuple[float, float]] = {}
    by_user: set[str] = set()
    for each in checked:
        name, report = each.document.ledger_id, each.document.report
        ledgers.setdefault(name, Charges()).merge(each.charges)
        for pair in _budgets(each, under):
            budgets[name] = _larger(budgets.get(name), pair)
        if report is not None and report.unit == "user":
            by_user.add(name)
    for written in journals:
        name, budget = written.ledger_id, written.budget
        if not written.runs or federations_in(written.runs):
            continue
        ledgers.setdefault(name, Charges()).merge(written.runs)
        if budget is not None:
            budgets[name] = _larger(budgets.get(name), budget.costs(under)[:2])
        if any(is_by_user(title) for _, title in written.data):
            by_user.add(name)
    deltas = [each.document.delta for each in checked] if delta is None else [delta]
    if len(ledgers) < 2 or not deltas:
        return None
    seeded = {each.document.ledger_id for each in checked if each.document.seeded}
    apart = seeded | {name for name, runs in ledgers.items() if not has_guarantee(runs)}
    if not ledgers.keys() <= by_user:
        apart |= by_user
    fixed = Charges()
    for name in ledgers.keys() - budgets.keys() - apart:
        fixed.merge(ledgers[name])  # of a run in two ledgers, the longer record
    epsilon = PLDAccountant().epsilon(fixed.history(), min(deltas), under) + sum(
        budget for name, (budget, _) in budgets.items() if name not in apart
    )
    return Total(
        ledgers=len(ledgers),
        steps=sum(runs.steps for runs in ledgers.values()),
        epsilon=math.inf if apart else epsilon,
        delta=min(deltas) + sum(its_own for _, its_own in budgets.values()),
        relation=under,
        seeded=tuple(sorted(seeded)),
        apart=tuple(sorted(apart)),
        epsilon_of_others=epsilon if apart else None,
    )


def _budgets(checked: CheckedDocument, relation: Relation) -> Iterator[tuple[float, float]]:
    """Yield (ε, δ) of budgets that a ledger claims whole, under the relation of the sum."""
    document, report = checked.document, checked.document.report
    if checked.budget is not None:
        yield checked.budget.costs(relation)[:2]
    if report is None or not report.claims_budget:
        return
    epsilon = max(checked.epsilon, checked.journal_epsilon or 0.0)
    if math.isfinite(epsilon):
        claim = ApproximateDP(epsilon, document.delta, document.relation, "a budget")
        yield claim.costs(relation)[:2]
    else:
        yield math.inf, document.delta


def _larger(one: tuple[float, float] | None, other: tuple[float, float]) -> tuple[float, float]:
    return other if one is None else (max(one[0], other[0]), max(one[1], other[1]))


def has_guarantee(charges: Charges) -> bool:
    """Return False if one of the charges promises nothing: it had no noise, or was voided."""
    has_noise = (event.pair[0] > 0 for event, _ in charges.history() if event.is_gaussian)
    return charges.voided is None and all(has_noise)
