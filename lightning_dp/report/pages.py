"""The page of a report: page one for people, the annex for engineers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_dp.report import annex, people
from lightning_dp.report.people import Beside
from lightning_dp.report.render import Page

if TYPE_CHECKING:
    from lightning_dp.report.facts import AbstractReport

__all__ = ["annex_of", "draft", "page"]


_DRAFT = (
    "The training was not over when this was written. Page one, in plain words, is written at its "
    "end, and by: python -m lightning_dp.report FILE --html PAGE.html"
)


def page(report: AbstractReport, beside: Beside | None = None) -> Page:
    """Return the page of a report.

    Args:
        report: of a run.
        beside: what is known when the page is made, and not in the report.
    """
    beside = Beside() if beside is None else beside
    report = replace(report, about={**report.about, **beside.about})
    return replace(
        annex_of(report),
        warnings=people.warnings(report, beside),
        sections=people.sections(report, beside),
    )


def annex_of(report: AbstractReport) -> Page:
    """Return the annex alone."""
    return Page(
        warnings=(),
        statements=annex.statements(report),
        sections={},
        annex=annex.sections(report),
        code=annex.code(report),
        report=report,
    )


def draft(report: AbstractReport) -> Page:
    """Return the annex of a run that is under way: it is written often, and must not take long."""
    return replace(annex_of(report), sections={"Not over": [_DRAFT]})
