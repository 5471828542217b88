"""The report for a terminal, and in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_dp.accounting.events import History, reason_in
from lightning_dp.accounting.rounding import epsilon_text

if TYPE_CHECKING:
    from lightning_dp.report.content import PrivacyReport

__all__ = ["charged", "markdown", "not_private", "summary", "text"]


_MOST_EVENTS = 8


def summary(report: PrivacyReport, where: str | None = None) -> str:
    """One line for the end of a fit.

    Args:
        report: what to tell.
        where: the report's file, or what became of it.
    """
    of = "" if report.target_epsilon is None else f" of {report.target_epsilon:g}"
    parts = [
        f"ε = {epsilon_text(report.epsilon)}{of} at δ = {report.delta:g} ({report.relation}) "
        f"after {report.steps} noised step{'' if report.steps == 1 else 's'}",
        *([] if report.stop_reason is None else [report.stop_reason]),
        *(
            []
            if report.isolation.startswith("probed")
            else ["isolation of records was not checked"]
        ),
        *([] if where is None else [f"report: {where}"]),
    ]
    return f"privacy: {not_private(report)}" + "; ".join(parts)


def not_private(report: PrivacyReport) -> str:
    """A beginning for statements that do not hold; empty for those that do."""
    if report.private:
        return ""
    if (reason := reason_in(report.events)) is not None:
        return f"VOIDED, NOT PRIVATE ({reason}): "
    return f"NOT PRIVATE ({'a seed was set' if report.seeded else 'no noise'}): "


def charged(history: History) -> list[str]:
    """What was charged, one line for each kind of event; a range where there are many kinds."""
    if len(history) <= _MOST_EVENTS:
        return [f"{count} × {event}" for event, count in history]
    multipliers, rates = zip(*(event.pair for event, _ in history), strict=True)
    steps = sum(count for _, count in history)
    low, high = f"{min(rates):.4g}", f"{max(rates):.4g}"
    return [
        f"{steps} events of {len(history)} kinds: noise multipliers {min(multipliers):.4g} to "
        f"{max(multipliers):.4g}, sampling rate {low if low == high else f'{low} to {high}'}"
    ]


def text(report: PrivacyReport) -> str:
    """What ``print(report)`` shows."""
    lines = [
        f"ε = {epsilon_text(report.epsilon)} at δ = {report.delta:g} ({report.relation}), "
        f"{report.steps} steps"
    ]
    if report.target_epsilon is not None:
        lines[0] += f", target ε = {report.target_epsilon:g}"
    if wrong := not_private(report):
        lines.insert(0, f"{wrong}the numbers below do not hold")
    if report.epsilon_of_plan is not None and report.epsilon_of_plan != report.epsilon:
        lines.append(
            f"if a result chose when to stop: ε = {epsilon_text(report.epsilon_of_plan)} (whole plan)"
        )
    if report.claims_budget:
        lines.append("ε is that of the whole budget: noise is chosen at run time")
    if report.stop_reason is not None:
        lines.append(f"stopped: {report.stop_reason}")
    if report.sample_rate is not None:
        lines.append(
            f"q = {report.sample_rate:.4g}, expected batch {report.expected_batch_size:g} of "
            f"{report.num_records} records, noise multiplier {report.noise_multiplier}"
        )
    lines += [f"charged: {line}" for line in charged(report.history())]
    lines += [f"{name}: {value}" for name, value in report.mechanism.items()]
    lines += [f"clip norm {name}: {value:g}" for name, value in report.clip_norms.items()]
    lines.append(f"isolation: {report.isolation}")
    lines.append(f"accountant: {report.accountant}; budget guard: {report.guard}")
    lines.append(f"ledger: {report.ledger_id}; journal: {report.journal or 'none yet'}")
    lines.append("not covered: " + "; ".join(report.not_covered))
    return "\n".join(lines)


def markdown(report: PrivacyReport) -> str:
    """A document for people; what is in it is in :meth:`PrivacyReport.to_dict`, too."""
    sections = [
        ("Guarantee", _guarantee(report)),
        ("Charged", _charged(report)),
        ("Mechanism", _mechanism(report)),
        ("Not covered", list(report.not_covered)),
        ("Versions", [f"{name} {version}" for name, version in report.versions.items()]),
    ]
    lines = ["# Privacy report", ""]
    if wrong := not_private(report):
        lines += [f"**{wrong}the numbers below do not hold.**", ""]
    lines += [
        f"**(ε, δ) = ({epsilon_text(report.epsilon)}, {report.delta:g})** under "
        f"`{report.relation}`, after {report.steps} noised steps.",
        "",
    ]
    for title, items in sections:
        lines += [f"## {title}", "", *(f"- {item}" for item in items), ""]
    return "\n".join(lines[:-1]) + "\n"


def _guarantee(report: PrivacyReport) -> list[str]:
    items = []
    if report.target_epsilon is not None:
        items.append(f"budget: ε = {report.target_epsilon:g}")
    if report.claims_budget:
        items.append("noise is chosen at run time: ε is that of the whole budget")
    if report.epsilon_of_plan is not None:
        items.append(
            f"if a result chose when to stop: ε = {epsilon_text(report.epsilon_of_plan)} (the whole plan)"
        )
    if report.stop_reason is not None:
        items.append(f"stopped: {report.stop_reason}")
    return [
        *items,
        f"accountant: {report.accountant}",
        f"budget guard: {report.guard}",
        f"isolation of records: {report.isolation}",
        f"test seed: {'yes, so nothing is private' if report.seeded else 'none'}",
    ]


def _charged(report: PrivacyReport) -> list[str]:
    return [
        *(f"{line}" for line in charged(report.history())),
        f"in {len(report.events)} run{'' if len(report.events) == 1 else 's'} of ledger "
        f"`{report.ledger_id}`",
        f"journal: `{report.journal}`",
    ]


def _mechanism(report: PrivacyReport) -> list[str]:
    items = [f"{name}: `{value}`" for name, value in report.mechanism.items()]
    items += [f"clip norm `{name}`: {value:g}" for name, value in report.clip_norms.items()]
    if report.sample_rate is not None:
        items += [
            f"sampling rate q = {report.sample_rate:.4g}, expected batch "
            f"{report.expected_batch_size:g} of {report.num_records} records",
            f"noise multiplier of the latest step: {report.noise_multiplier}",
        ]
    return items
