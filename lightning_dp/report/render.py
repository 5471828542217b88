"""The parts of a page, and two of its layouts: text for a terminal, and Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from lightning_dp._validate import one_of
from lightning_dp.accounting.events import AbstractExternal, History
from lightning_dp.report.facts import READERS, AbstractReport, Reader

__all__ = ["Block", "Fact", "Page", "Table", "charged"]

_MOST_EVENTS = 8


@dataclass(frozen=True)
class Fact:
    """One thing that a report says.

    Args:
        value: what it says; as code if it ``is_code``.
        name: of what; a fact without one stands for itself.
    """

    value: str
    name: str = ""
    is_code: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells below a head."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


Block: TypeAlias = str | Fact | Table
"""A paragraph, an item or a table."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report for people, and its annex for engineers.

    Args:
        warnings: what makes the rest worthless, or doubtful; each with what follows from it.
        statements: the numbers in a line.
        sections: page one, by title.
        annex: the facts for engineers, by title.
        code: a program that computes ε again.
        report: that the page is about, for its picture and its data.
    """

    warnings: Sequence[str]
    statements: Sequence[str]
    sections: Mapping[str, Sequence[Block]]
    annex: Mapping[str, Sequence[Fact]]
    code: str
    report: AbstractReport = field(repr=False)

    def part_for(self, reader: Reader | None) -> Page:
        """Return what one reader needs, with all warnings; the whole page for None.

        Raises:
            ValueError: for an unknown reader.
        """
        if reader is None:
            return self
        if one_of(READERS)("reader", reader) == "people":
            return replace(self, statements=(), annex={}, code="")
        return replace(self, sections={})

    @property
    def title(self) -> str:
        """The heading of the whole, or of the annex by itself."""
        return "Privacy report" if self.sections else "Privacy report: annex for engineers"

    def text(self) -> str:
        """Return the annex: one line for each named fact, and one for all others of a section."""
        lines = list(self.statements)
        for title, facts in self.annex.items():
            lines += [f"{fact.name}: {fact.value}" for fact in facts if fact.name]
            if rest := [fact.value for fact in facts if not fact.name]:
                lines.append(f"{title.lower()}: {'; '.join(rest)}")
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return a document with a heading for each section and an item for each fact."""
        lines = [f"# {self.title}", ""]
        for warning in self.warnings:
            lines += [f"> **{_escaped(warning)}**", ""]
        for title, blocks in self.sections.items():
            lines += [f"## {title}", "", *_markdown(blocks)]
        if not self.annex:
            return "\n".join(lines)
        if self.sections:
            lines += ["# Annex for engineers", ""]
        for statement in self.statements:
            lines += [f"**{_escaped(statement)}**", ""]
        for title, facts in self.annex.items():
            lines += [f"## {title}", "", *_markdown(facts)]
        lines += ["## Compute it again", "", "```python", self.code, "```", ""]
        return "\n".join(lines)


def _markdown(blocks: Sequence[Block]) -> list[str]:
    """Return lines; items that follow each other are one list."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Fact):
            value = f"`{block.value}`" if block.is_code else _escaped(block.value)
            lines.append(f"- {_escaped(block.name)}: {value}" if block.name else f"- {value}")
            continue
        if lines and lines[-1]:
            lines.append("")
        if isinstance(block, Table):
            lines += [_row(block.head), _row(("---",) * len(block.head)), *map(_row, block.rows)]
        else:
            lines.append(_escaped(block))
        lines.append("")
    return lines if not lines or not lines[-1] else [*lines, ""]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Return a text in which a user's words are neither HTML nor marks of Markdown."""
    marked = re.sub(r"[\\`*\[]|__", lambda found: "".join(f"\\{each}" for each in found[0]), text)
    return marked.replace("&", "&amp;").replace("<", "&lt;")


def charged(history: History) -> list[str]:
    """Return what was charged, one line for each kind of event; a range where there are many kinds."""
    external = [event for event, _ in history if isinstance(event, AbstractExternal)]
    if external:
        said = [f"{event.declared}, declared by the user and not checked" for event in external]
        return [*said, *charged([each for each in history if each[0] not in external])]
    if len(history) <= _MOST_EVENTS:
        return [f"{count} × {event}" for event, count in history]
    multipliers, rates = zip(*(event.pair for event, _ in history), strict=True)
    steps = sum(count for _, count in history)
    low, high = f"{min(rates):.4g}", f"{max(rates):.4g}"
    return [
        f"{steps} events of {len(history)} kinds: noise multipliers {min(multipliers):.4g} to "
        f"{max(multipliers):.4g}, sampling rate {low if low == high else f'{low} to {high}'}"
    ]
