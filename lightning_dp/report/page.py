"""The page of a report as Markdown or HTML: page one for people, the annex for engineers.

The words are in ``templates/people.j2`` and ``templates/annex.j2``, the markup in ``md.j2`` and
``html.j2``. Every number on page one is an upper bound of what can go wrong, and is rounded up.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from lightning_dp._validate import one_of
from lightning_dp.accounting.events import History
from lightning_dp.accounting.external import AbstractExternal
from lightning_dp.accounting.hypothesis_tests import TradeOff, up_to
from lightning_dp.accounting.pld import PLDAccountant
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.report.content import READERS, PrivacyReport, Reader

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

    from lightning_dp.report.files import CheckedDocument, Total

__all__ = ["Page", "charged", "render", "summarise"]

_MOST_EVENTS = 8
_MOST_DATA = 200_000  # characters of a report that are shown; a longer one is in its file
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Page:
    """A report, and what is found when its page is made.

    Args:
        report: of a run.
        about: the user's words about the data, which replace those of the report.
        checked: the report's document with its checks; None if nothing was checked.
        together: of this ledger and those beside it; None if none was found.
        problems: contradictions that were found.
        day: of the checks.
        is_over: False while the training goes on: then there is no page one, which takes a second.
    """

    report: PrivacyReport
    about: Mapping[str, str] = field(default_factory=dict)
    checked: CheckedDocument | None = None
    together: Total | None = None
    problems: Sequence[str] = ()
    day: str = ""
    is_over: bool = True

    @property
    def stated(self) -> dict[str, str]:
        """The user's words about the data, by name."""
        return {**self.report.about, **self.about}

    @cached_property
    def claim(self) -> dict[str, Any]:
        """The largest ε that may have to be claimed, why, and bounds on tests (:class:`TradeOff`)."""
        report, checked, why = self.report, self.checked, ""
        epsilon, history = report.epsilon, report.history()
        in_journal = None if checked is None else checked.journal_epsilon
        if checked is not None and in_journal is not None and in_journal > epsilon:
            epsilon, history, why = in_journal, checked.charges.history(), "journal"
        only_the_pair = report.claims_budget
        spent = epsilon
        if (of_plan := report.epsilon_of_plan) is not None and of_plan > epsilon:
            epsilon, only_the_pair, why = of_plan, True, "plan"
        pair = (epsilon, report.delta)
        if only_the_pair or not math.isfinite(epsilon):
            tests = TradeOff((pair,))
        else:
            judge = report.known_accountant() or PLDAccountant()
            tests = up_to(pair, history, report.relation, judge)
        return {"epsilon": epsilon, "spent": spent, "why": why, "tests": tests}

    @property
    def epsilon_at_tolerance(self) -> float | None:
        """ε under the largest coupling that comparisons let pass, where they had to look for it."""
        report = self.report
        is_exact = report.claims_budget or not report.ran_whole
        if is_exact or not (report.private and report.steps and self.is_over):
            return None
        return report.epsilon_at_tolerance()

    @property
    def journal(self) -> str | None:
        """The name of the journal; its path is nobody's business."""
        return None if self.report.journal is None else PurePath(self.report.journal).name

    @property
    def data(self) -> str | None:
        """The report as JSON; None if it is too long to be shown."""
        content = {**self.report.to_dict(), "journal": self.journal}
        text = json.dumps(content, ensure_ascii=False, indent=1)
        return text if len(text) <= _MOST_DATA else None

    def picture(self) -> dict[str, str]:
        """Return the picture as a data URI, or the reason why there is none."""
        if not self.report.events:
            return {"missing": "nothing was charged."}
        from lightning_dp.plotting import svg

        try:
            content = base64.b64encode(svg(self.report.plot)).decode("ascii")
        except ImportError as error:
            return {"missing": str(error)}
        return {"uri": f"data:image/svg+xml;base64,{content}"}


def render(pages: Sequence[Page], form: Literal["md", "html"], reader: Reader | None = None) -> str:
    """Return a document with a page for each ledger.

    Args:
        pages: one for each.
        form: Markdown, or one HTML file that loads nothing and runs no script.
        reader: page one alone, or the annex alone; both by default.

    Raises:
        ValueError: for an unknown reader.
    """
    if reader is not None:
        one_of(READERS)("reader", reader)
    environment = _environment(form)
    text = environment.get_template("document.j2").render(pages=pages, reader=reader)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def summarise(report: PrivacyReport) -> str:
    """Return nine lines of plain text."""
    return _environment("txt").get_template("summary.j2").render(page=Page(report), report=report)


@cache
def _environment(form: str) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> object:
        """Escape what Markdown would take for markup; Jinja itself escapes HTML."""
        return value if isinstance(value, Markup) else Markup(_escaped(str(value)))

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=form != "txt",
        undefined=StrictUndefined,
        finalize=finalize if form == "md" else None,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["markup"] = f"{form}.j2"
    environment.filters |= {
        "eps": epsilon_text,
        "percent": lambda probability: epsilon_text(min(100.0, 100 * probability), 3),
        "plural": lambda number, word: f"{number:,} {word}{'' if number == 1 else 's'}",
        "flow": _flow,
        "paragraphs": lambda text: _paragraphs(text, "<p>{}</p>" if form == "html" else "{}"),
        "lines": lambda text: Markup("\n".join(filter(None, map(str.strip, text.splitlines())))),
        "raw": Markup,
        "exact": lambda number: f"{Decimal(repr(number)):f}",
        "odds": lambda probability: f"{int(1 / Decimal(repr(probability))):,}",
        "charged": charged,
    }
    environment.globals["exp"] = lambda x: math.exp(x) if x < 700 else math.inf
    return environment


def _flow(text: str) -> Markup:
    """Return a text of several lines as one line."""
    from markupsafe import Markup

    return Markup(" ".join(text.split()))


def _paragraphs(text: str, markup: str) -> Markup:
    """Mark up what blank lines separate, but for lists and tables, which begin with their own marks."""
    from markupsafe import Markup

    blocks = (block.strip() for block in re.split(r"\n\s*\n", text))
    marked = (
        block if block.startswith(("<", "- ", "| ")) else markup.format(_flow(block))
        for block in blocks
        if block
    )
    return Markup("\n\n".join(marked))


def _escaped(text: str) -> str:
    """Return a text in which a user's words are neither HTML nor marks of Markdown."""
    marked = re.sub(r"[\\`*\[]|__", lambda found: "".join(f"\\{each}" for each in found[0]), text)
    return marked.replace("&", "&amp;").replace("<", "&lt;")


def charged(history: History) -> list[str]:
    """Return what was charged, one line for each kind of event; a range where there are many kinds."""
    external = [event for event, _ in history if isinstance(event, AbstractExternal)]
    if external:
        declared = [f"{each.declared}, declared by the user and not checked" for each in external]
        return [*declared, *charged([each for each in history if each[0] not in external])]
    if len(history) <= _MOST_EVENTS:
        return [f"{count} × {event}" for event, count in history]
    multipliers, rates = zip(*(event.pair for event, _ in history), strict=True)
    steps = sum(count for _, count in history)
    low, high = f"{min(rates):.4g}", f"{max(rates):.4g}"
    return [
        f"{steps} events of {len(history)} kinds: noise multipliers {min(multipliers):.4g} to "
        f"{max(multipliers):.4g}, sampling rate {low if low == high else f'{low} to {high}'}"
    ]
