"""Pages for people, made of what the command found and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.checks import Checked
from lightning_dp.report.pages import page
from lightning_dp.report.people import Known
from lightning_dp.report.render import Page
from lightning_dp.report.total import Total

__all__ = ["pages"]


def pages(
    documents: Sequence[Checked],
    together: Total | None,
    about: Mapping[str, str],
    problems: Sequence[str] = (),
    today: str | None = None,
) -> list[Page]:
    """Return a page for each ledger, of the document that knows most of it.

    Args:
        documents: checkpoints and reports, checked.
        together: of all ledgers that were looked at; None if there is one only.
        about: the user's words about the data, which go before those of the reports.
        problems: besides those of the documents.
        today: the day on which was looked; by default the present one.
    """
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d") if today is None else today
    return [
        _page(
            checked,
            Known(
                about=about,
                problems=(*problems, *checked.problems),
                epsilon=checked.journal_epsilon,
                history=checked.known.history(),
                others=[*_others(checked, together, day)],
                checked=[*_agreements(checked, day)],
            ),
        )
        for checked in _latest_of_each(documents)
    ]


def _latest_of_each(documents: Sequence[Checked]) -> list[Checked]:
    """Return, of each ledger, the document with a report that knows the most charges."""
    latest: dict[str, Checked] = {}
    for each in documents:
        known = latest.get(each.document.ledger_id)
        is_more = known is None or each.document.events.total > known.document.events.total
        if each.document.report is not None and is_more:
            latest[each.document.ledger_id] = each
    return list(latest.values())


def _page(checked: Checked, known: Known) -> Page:
    report = checked.document.report
    assert report is not None
    if checked.known.voided is not None:  # the journal knows it, the report may be older
        report = replace(report, private=False, events=checked.known)
    return page(report, known)


def _others(checked: Checked, together: Total | None, day: str) -> Iterator[str]:
    """Say what else is known to have been spent."""
    if checked.journal is None:
        return
    if together is None:
        yield f"On {day} no other ledger was found next to this one. Others may be elsewhere."
        return
    count = together.ledgers - 1
    found = "1 other ledger was" if count == 1 else f"{count} other ledgers were"
    yield (
        f"On {day} {found} found next to this one. If all of them are about the same records, they "
        "promise together "
        f"ε = {epsilon_text(together.epsilon)} at δ = {epsilon_text(together.delta)}, and no less. "
        "Others may be elsewhere."
    )


def _agreements(checked: Checked, day: str) -> Iterator[str]:
    """Say what was found to agree."""
    if checked.problems:
        return
    yield f"On {day} ε was computed again from the list of all steps, and it agrees."
    if checked.journal_steps is not None:
        yield "The journal (the file of the ledger, written before each step) knows all these steps."
