"""The facts of a report in two layouts: text for a terminal, and Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_dp.accounting.events import History
from lightning_dp.accounting.external import AbstractExternal

__all__ = ["Fact", "Page", "charged"]

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
class Page:
    """A report for people.

    Args:
        statements: what must be read first.
        sections: the facts, by title.
    """

    statements: Sequence[str]
    sections: Mapping[str, Sequence[Fact]]

    def text(self) -> str:
        """Return one line for each named fact, and one for all others of a section."""
        lines = list(self.statements)
        for title, facts in self.sections.items():
            lines += [f"{fact.name}: {fact.value}" for fact in facts if fact.name]
            if rest := [fact.value for fact in facts if not fact.name]:
                lines.append(f"{title.lower()}: {'; '.join(rest)}")
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return a document with a heading for each section and an item for each fact."""
        lines = ["# Privacy report", ""]
        for statement in self.statements:
            lines += [f"**{statement}**", ""]
        for title, facts in self.sections.items():
            lines += [f"## {title}", ""]
            for fact in facts:
                value = f"`{fact.value}`" if fact.is_code else fact.value
                lines.append(f"- {fact.name}: {value}" if fact.name else f"- {value}")
            lines.append("")
        return "\n".join(lines)


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
