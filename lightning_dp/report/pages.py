"""The page of a report: page one for people, the annex for engineers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_dp.report import annex, people
from lightning_dp.report.people import Known
from lightning_dp.report.render import Fact, Page

if TYPE_CHECKING:
    from lightning_dp.report.facts import AbstractReport

__all__ = ["annex_of", "draft", "page"]


_DRAFT = (
    "The training was not over when this was written. Page one, in plain words, is written at its "
    "end, and by: python -m lightning_dp.report FILE --html PAGE.html"
)


def page(report: AbstractReport, known: Known | None = None) -> Page:
    """Return the page of a report.

    Args:
        report: of a run.
        known: what is known when the page is made, and not in the report.
    """
    known = Known() if known is None else known
    report = replace(report, about={**report.about, **known.about})
    return replace(
        annex_of(report),
        warnings=people.warnings(report, known),
        sections=people.sections(report, known),
    )


def annex_of(report: AbstractReport, facts: Mapping[str, Sequence[Fact]] | None = None) -> Page:
    """Return the annex alone, with all facts or with those that are given."""
    return Page(
        warnings=(),
        statements=annex.statements(report),
        sections={},
        annex=annex.sections(report) if facts is None else facts,
        code=annex.code(report),
        report=report,
    )


def draft(report: AbstractReport) -> Page:
    """Return the annex of a run that is not over: it is written often, and must not take long."""
    facts = annex.sections(report, is_draft=True)
    return replace(annex_of(report, facts), sections={"Not over": [_DRAFT]})
