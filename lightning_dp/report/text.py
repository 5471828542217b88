"""The report for a terminal, and in one line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_dp.accounting.base import History
from lightning_dp.accounting.rounding import epsilon_text
from lightning_dp.accounting.voided import reason_in

if TYPE_CHECKING:
    from lightning_dp.report.content import PrivacyReport

__all__ = ["charged", "not_private", "summary", "text"]

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
